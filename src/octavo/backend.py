"""The triple that engines know: Backend (what is possible), MetadataBuilder (a step), Impl (a layer).

vLLM's v1 interface is the model, so that a plug-in only renames; nothing here imports an engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from octavo import kernels
from octavo.batch import AttentionBatch
from octavo.cache import LayerCache, Order, PageLayout
from octavo.errors import Unsupported
from octavo.formats import EIGHT_BIT_FORMATS, FLOAT_FORMATS, KVFormat
from octavo.launch import Plan, PlanBuffers
from octavo.planner import Planner
from octavo.rotation import Rotation, rotate
from octavo.run import append, run
from octavo.spec import AttentionSpec, KVShard
from octavo.warm_up import warm_up

AttentionKind = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]
"""decoder: causal over pages. encoder: both ways over raw keys. encoder_only: the same, the whole model.
encoder_decoder: cross attention over pages that were written once."""

MIN_CASCADE_TOKENS = 256
MIN_CASCADE_SEQS = 8


class Backend:
    """Capabilities of this library, answered without making anything."""

    name = "OCTAVO"
    kinds: tuple[AttentionKind, ...] = get_args(AttentionKind)
    dtypes = kernels.FLOAT_DTYPES
    kv_formats = ("auto", *FLOAT_FORMATS, *EIGHT_BIT_FORMATS)
    layouts: tuple[Order, ...] = get_args(Order)
    preferred_block_size = 16

    @classmethod
    def supports(
        cls,
        *,
        spec: AttentionSpec,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: str = "auto",
        block_size: int = 16,
        kind: AttentionKind = "decoder",
    ) -> str | None:
        """Why a configuration cannot be served, in words to act on; None: it can."""
        if kind not in cls.kinds:
            return f"unknown kind of attention {kind!r}; known kinds: {', '.join(cls.kinds)}"
        if spec.causal != (kind == "decoder"):
            return f"a layer of kind {kind!r} has causal={kind == 'decoder'}, the spec says causal={spec.causal}"
        if block_size < 1:
            return f"block_size must be at least 1, got {block_size}"
        try:
            parsed = KVFormat.parse(kv_format, dtype)
        except ValueError as error:
            return str(error)
        return kernels.unsupported(spec, device, dtype, kv_format=parsed)

    @staticmethod
    def page_layout(
        spec: AttentionSpec, dtype: torch.dtype, kv_format: str, block_size: int, order: Order = "HND"
    ) -> PageLayout:
        """The record of one page of a layer: its bytes, its views, its shape and stride order."""
        return PageLayout(
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.v_dim,
            format=KVFormat.parse(kv_format, dtype),
            order=order,
        )


@dataclass(frozen=True, slots=True)
class BuilderConfig:
    """What a cache group's layers have in common.

    Args:
        num_q_heads, value_dim: of the widest layer.
        num_kv_heads: of the layer with the fewest; how finely keys are cut on a GPU. None: num_q_heads.
        block_size, num_blocks: of the cache; for raw keys (encoder layers) 1 and None.
        max_model_len: longest sequence in tokens.
        max_num_seqs, max_num_tokens: of a step. Given both, the builder of a GPU keeps memory for plans and writes all
            plans without a shared prefix to it, at the same addresses: a plan is then valid until the next `build`,
            and graphs captured over plans see those built later. None: every plan has memory of its own.
        num_speculative_tokens: draft tokens per request and step. Decodes with at most so many drafts are all planned
            alike, so that a graph of decodes fits each of them.
        graphs_of_all_steps: graphs are captured over steps of every kind and told apart by num_seqs and num_tokens
            alone. Steps with equal ones are then planned alike, decodes as if they were prefills.
        shard: the keys that this rank holds.
        batch_invariant: output bits of a request depend on that request alone.
        device: where batches live.
    """

    num_q_heads: int
    value_dim: int
    block_size: int
    num_blocks: int | None
    max_model_len: int
    num_kv_heads: int | None = None
    num_speculative_tokens: int = 0
    graphs_of_all_steps: bool = False
    shard: KVShard = KVShard()
    batch_invariant: bool = False
    device: torch.device = torch.device("cpu")
    max_num_seqs: int | None = None
    max_num_tokens: int | None = None


class MetadataBuilder:
    """Builds the plan of a step; made once per cache group."""

    def __init__(self, config: BuilderConfig) -> None:
        self.config = config
        self._planner = Planner(
            num_q_heads=config.num_q_heads,
            value_dim=config.value_dim,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            device=config.device,
            shard=config.shard,
            batch_invariant=config.batch_invariant,
            num_kv_heads=config.num_kv_heads,
        )
        seqs, tokens = config.max_num_seqs, config.max_num_tokens
        self._buffers: PlanBuffers | None = None
        if seqs is not None and tokens is not None and self._planner.on_device(config.device):
            self._buffers = self._planner.buffers(tokens, seqs, config.max_model_len)

    @property
    def reorder_batch_threshold(self) -> int:
        """A request with at most this many new tokens is a decode; engines put decodes first."""
        return 1 + self.config.num_speculative_tokens

    def build(self, common_prefix_len: int, metadata: AttentionBatch) -> Plan:
        """The plan of a step for all layers of the group.

        Args:
            common_prefix_len: keys shared by all sequences, page by page; 0: none.
            metadata: the step.
        """
        buffers = None if common_prefix_len else self._buffers
        metadata = dataclasses.replace(metadata, max_query_len=self._query_len_to_plan_for(metadata))
        return self._planner.plan(metadata, common_prefix_len=common_prefix_len, buffers=buffers)

    def _query_len_to_plan_for(self, metadata: AttentionBatch) -> int:
        """Plans follow from an upper bound of query lengths; steps that share a graph must have equal ones."""
        if self._buffers is None:
            return metadata.max_query_len
        if self.config.graphs_of_all_steps:
            return metadata.num_tokens
        return max(metadata.max_query_len, self.reorder_batch_threshold)

    def build_for_graph_capture(self, metadata: AttentionBatch) -> Plan:
        """The plan to capture: as if every sequence could be as long as the model allows.

        If the graph does not hold the making of the plan, the builder must keep memory for plans (`BuilderConfig`),
        the batch's tensors must stay where they are, and later steps of the graph are planned with this method too.
        """
        return self.build(0, dataclasses.replace(metadata, max_seq_len=self.config.max_model_len))

    def warm_up(self, impl: Impl, cache: LayerCache, dtype: torch.dtype, max_num_seqs: int) -> None:
        """Compile all kernels that steps of a decoder's layer can reach, so that none is compiled while serving.

        Args:
            impl: the layer.
            cache: its pages.
            dtype: of queries, keys, values and results.
            max_num_seqs: sequences of a step.
        """
        warm_up(
            self._planner,
            impl.spec,
            cache,
            dtype,
            max_num_seqs=max_num_seqs,
            max_seq_len=self.config.max_model_len,
            prefixes=max_num_seqs >= MIN_CASCADE_SEQS and self.config.max_model_len > MIN_CASCADE_TOKENS,
            lse=self.config.shard.is_part,
            alibi_slopes=impl.alibi_slopes,
            sinks=impl.sinks,
        )

    def use_cascade(self, common_prefix_len: int, num_seqs: int) -> bool:
        """Whether reading a prefix once for all sequences pays."""
        return common_prefix_len >= MIN_CASCADE_TOKENS and num_seqs >= MIN_CASCADE_SEQS


class Impl:
    """One layer's attention.

    Args:
        spec: what the layer computes; `window_radii` turns a model's window into the spec's.
        kind: kind of attention.
        alibi_slopes: [num_q_heads] float or None, iff spec.alibi.
        sinks: [num_q_heads] float or None, iff spec.sinks.
        shares_kv: the layer reads the pages of another layer and writes none.
        k_offset: float32 [num_kv_heads, head_dim], subtracted from K before it is stored, so that the int8 formats lose
            less where channels of K lie far from zero. Softmax does not see it, as it moves all scores of a row alike;
            `forward` puts it back into the LSE. None: nothing is subtracted.
        rotation: what K (less its offset) is multiplied by before it is stored, and q before it meets K, so that the
            int8 formats lose less where channels of K or q are larger than the others. Scores stay. A layer that shares
            pages has the rotation of the one that writes them. None: nothing is multiplied.

    Raises:
        ValueError: tensors and spec do not fit.
        Unsupported: the kind contradicts the spec, or the softmax would see the offset.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        kind: AttentionKind = "decoder",
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        shares_kv: bool = False,
        k_offset: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        for name, term, wanted in (
            ("alibi_slopes", alibi_slopes, spec.alibi is not None),
            ("sinks", sinks, spec.sinks),
        ):
            if (term is not None) != wanted:
                raise ValueError(f"{name} must be {'given' if wanted else 'None'}: the spec says {spec}")
        if kind not in get_args(AttentionKind) or spec.causal != (kind == "decoder"):
            raise Unsupported(f"kind {kind!r} and causal={spec.causal} contradict each other")
        self.spec = spec
        self.kind = kind
        self.shares_kv = shares_kv
        self.alibi_slopes = None if alibi_slopes is None else alibi_slopes.float()
        self.sinks = None if sinks is None else sinks.float()
        self.k_offset = k_offset
        if k_offset is not None:
            _check_offset(spec, k_offset, kind)
        self.rotation = rotation
        if rotation is not None:
            _check_rotation(spec, rotation, kind)

    def update_cache(self, k: Tensor, v: Tensor, cache: LayerCache, plan: Plan | None) -> None:
        """Write new keys and values [>= num_slots, num_kv_heads, head_dim | value_dim] into their pages.

        A layer that shares another's pages writes nothing, nor does a step without slots or plan.
        """
        if plan is not None and plan.slot_mapping is not None:
            self.append(k, v, cache, plan.slot_mapping)

    def append(self, k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        """The same for slots [num_slots] int64 that no plan names, as engines that write outside of plans have them."""
        if self.shares_kv:
            return
        if self.k_offset is not None:
            k = (k.float() - self.k_offset).to(k.dtype)
        if self.rotation is not None:
            k = rotate(k, self.rotation.k, self.rotation.batch_invariant)
        append(cache, k, v, slot_mapping)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache | None,
        plan: Plan | None,
        out: Tensor,
        lse: Tensor | None = None,
        q_descale: Tensor | None = None,
    ) -> None:
        """Attend, into `out`.

        Args:
            q: [>= num_tokens, num_q_heads, head_dim].
            k, v: [num_keys, num_kv_heads, head_dim | value_dim], read by encoder layers, whose plan comes
                from `AttentionBatch.from_raw_keys`; other layers read `cache`.
            cache: the layer's pages; None for encoder layers.
            plan: the step; None (a profiling run): out is filled with 0.
            out: [>= num_tokens, num_q_heads, value_dim], written in place.
            lse: [>= num_tokens, num_q_heads] float32 or None, written in place.
            q_descale: float32 [] or [num_seqs, num_kv_heads], of a q that comes in fp8; None: 1.

        Where ranks hold parts of the keys, out and lse are this rank's; `merge_states` makes the layer's result of all
        of them, and takes the sinks.
        """
        if plan is None:
            out.zero_()
            return
        if self.kind in ("encoder", "encoder_only"):
            if k is None or v is None:
                raise ValueError(f"a layer of kind {self.kind!r} attends to k and v, got None")
            cache = LayerCache(k.unsqueeze(1), v.unsqueeze(1))  # raw keys are pages of one row
        if cache is None:
            raise ValueError(f"a layer of kind {self.kind!r} attends to its cache, got None")
        run(
            plan,
            self.spec,
            q if self.rotation is None else _rotated(q, self.rotation, plan),
            cache,
            out,
            lse,
            alibi_slopes=self.alibi_slopes,
            sinks=None if plan.shard.is_part else self.sinks,
            q_descale=q_descale,
        )
        if lse is not None and self.k_offset is not None and plan.launches:
            _restore_lse(plan, self.spec, q, self.k_offset, lse)


def _check_offset(spec: AttentionSpec, k_offset: Tensor, kind: AttentionKind) -> None:
    """An offset of K must fit, and must move all that a row's softmax weighs alike."""
    if spec.logits_soft_cap is not None:
        raise Unsupported(
            "K's offset and a soft cap exclude each other: the cap bends scores that were moved differently"
        )
    if spec.sinks:
        raise Unsupported("K's offset and sinks exclude each other: the offset moves the scores of keys, not the sink")
    if kind in ("encoder", "encoder_only"):
        raise Unsupported(f"K's offset is for pages; a layer of kind {kind!r} attends to raw keys")
    shape = (spec.num_kv_heads, spec.head_dim)
    if k_offset.dtype != torch.float32 or tuple(k_offset.shape) != shape:
        raise ValueError(f"k_offset must be float32 {shape}, got {k_offset.dtype} {tuple(k_offset.shape)}")


def _check_rotation(spec: AttentionSpec, rotation: Rotation, kind: AttentionKind) -> None:
    if kind in ("encoder", "encoder_only"):
        raise Unsupported(f"a rotation is for pages; a layer of kind {kind!r} attends to raw keys")
    shape = (spec.head_dim, spec.head_dim)
    if tuple(rotation.q.shape) != shape or tuple(rotation.k.shape) != shape:
        raise ValueError(
            f"a rotation of K and q must be {shape}, got {tuple(rotation.k.shape)} and {tuple(rotation.q.shape)}"
        )


def _rotated(q: Tensor, rotation: Rotation, plan: Plan) -> Tensor:
    """q as it meets rotated keys."""
    if plan.batch_invariant and not rotation.batch_invariant:
        raise Unsupported(
            "a batch-invariant plan needs a rotation that is: hadamard(..., batch_invariant=True); "
            "a product of matrices may round a row by its neighbours"
        )
    return rotate(q, rotation.q, rotation.batch_invariant)


def _restore_lse(plan: Plan, spec: AttentionSpec, q: Tensor, k_offset: Tensor, lse: Tensor) -> None:
    """Add what the offset took off the scores, scale * (q . offset), to the LSE of rows that belong to a sequence."""
    n = plan.num_tokens
    grouped = q[:n].float().reshape(n, spec.num_kv_heads, spec.group_size, spec.head_dim)
    moved = torch.einsum("nhgd,hd->nhg", grouped, k_offset).flatten(1) * spec.scale
    starts, rows = plan.launches[-1].query_start_loc, torch.arange(n, device=q.device)
    belongs = (rows >= starts[0]) & (rows < starts[-1])
    # A row that sees no key has LSE -inf whatever its q is.
    lse[:n] = torch.where(belongs[:, None] & (lse[:n] > -torch.inf), lse[:n] + moved, lse[:n])


def window_radii(sliding_window: int | None, kind: AttentionKind = "decoder") -> tuple[int | None, int | None]:
    """(window_left, window_right) of a model's `sliding_window`, which counts the query itself.

    A decoder's window looks back, an encoder's both ways. None: no window.

    Raises:
        ValueError: a window below 1.
    """
    if sliding_window is None:
        return None, None
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be None or at least 1, got {sliding_window}")
    return sliding_window - 1, 0 if kind == "decoder" else sliding_window - 1
