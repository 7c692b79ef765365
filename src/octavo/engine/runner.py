"""Runs a step of the scheduler through the model: tensors in, logits out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.backend import Backend, BuilderConfig, Impl, MetadataBuilder
from octavo.batch import AttentionBatch
from octavo.cache import LayerCache, PagedKVCache
from octavo.engine.attention import CurrentStep, PagedLayer, attach
from octavo.engine.graphs import DecodeGraphs
from octavo.engine.probe import ProbedLayer, probe
from octavo.engine.scheduler import ScheduledChunk
from octavo.errors import Unsupported
from octavo.formats import KVFormat
from octavo.launch import Plan
from octavo.rotation import hadamard
from octavo.scales import KVModel, KVScales, LayerShape, fingerprint

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the device's free memory that the cache takes when no budget is given."""


class ModelRunner:
    """A model over a paged cache.

    Args:
        model: a Transformers causal language model; its attention is replaced.
        kv_format: how the cache stores K and V.
        kv_scales: static scales of the attention layers, in the model's order, where the format has any.
        block_size: tokens of a page.
        num_blocks: pages; None: as many as `kv_cache_bytes` holds.
        kv_cache_bytes: memory budget of the cache; None: MEMORY_SHARE of what is free.
        max_num_seqs, max_model_len: what the cache must hold at most.
        use_graphs: decode steps run as CUDA graphs; None: on a GPU, if the model can be captured.

    Raises:
        ModelError: the model's attention cannot be replaced, with the reason.
        Unsupported: no kernels serve it on this device or in this format, with the reason.
        ValueError: the budget holds no page, the machine does not hold the cache, or graphs are asked for where
            there are none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_format: str,
        kv_scales: KVScales | None,
        block_size: int,
        num_blocks: int | None,
        kv_cache_bytes: int | None,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool | None,
    ) -> None:
        if use_graphs and model.device.type != "cuda":
            raise ValueError(f"use_graphs=True needs a model on a GPU, this one is on {model.device}")
        self.model = model
        self.block_size = block_size
        layers = probe(model, max_model_len)
        self.kv_model = _kv_model(model, layers)
        """Whose scales fit."""
        for layer in layers:
            reason = Backend.supports(
                spec=layer.spec,
                dtype=model.dtype,
                device=model.device,
                kv_format=kv_format,
                block_size=block_size,
            )
            if reason is not None:
                raise Unsupported(f"{type(model).__name__} cannot be served: {reason}")
        if kv_scales is not None:
            kv_scales.check(self.kv_model, KVFormat.parse(kv_format, model.dtype))
        self.bytes_per_block = sum(
            Backend.page_layout(layer.spec, model.dtype, kv_format, block_size).page_bytes for layer in layers
        )
        if num_blocks is None:
            most = max_num_seqs * -(-max_model_len // block_size)
            budget = kv_cache_bytes
            if budget is None:
                budget = int(_free_memory(model.device) * MEMORY_SHARE[model.device.type])
            num_blocks = min(most, budget // self.bytes_per_block)
        if num_blocks < 1:
            raise ValueError(
                f"the cache holds {num_blocks} blocks; a block takes {self.bytes_per_block} bytes: "
                f"raise kv_cache_bytes ({kv_cache_bytes}) or num_blocks"
            )
        self.num_blocks = num_blocks
        self._step = CurrentStep()
        config = BuilderConfig(
            num_q_heads=max(layer.spec.num_q_heads for layer in layers),
            value_dim=max(layer.spec.v_dim for layer in layers),
            num_kv_heads=min(layer.spec.num_kv_heads for layer in layers),
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            device=model.device,
        )
        self._builder = MetadataBuilder(config)
        offsets = [None if kv_scales is None else kv_scales.offset_of_layer(i) for i in range(len(layers))]
        widths = {x.spec.head_dim for x in layers if KVFormat.parse(kv_format, model.dtype).k_scaled_by_row}
        rotations = {width: hadamard(width, model.dtype, model.device) for width in widths}
        impls = [
            Impl(
                layer.spec,
                sinks=layer.sinks,
                k_offset=None if offset is None else offset.to(model.device),
                rotation=rotations.get(layer.spec.head_dim),
            )
            for layer, offset in zip(layers, offsets, strict=True)
        ]
        try:
            caches = _make_caches(layers, model, kv_format, kv_scales, block_size, num_blocks)
        except (OSError, MemoryError, OverflowError, torch.OutOfMemoryError) as error:
            raise ValueError(
                f"{num_blocks} blocks of {self.bytes_per_block} bytes do not fit this machine's memory ({error}): "
                f"lower num_blocks or kv_cache_bytes"
            ) from error
        self.layers = {
            layer.module: PagedLayer(impl, cache, self._step)
            for layer, impl, cache in zip(layers, impls, caches, strict=True)
        }
        """Each attention module's pages, in the model's order."""
        self.activate()
        self._keeps_chosen_logits = model._supports_logits_to_keep()
        for layer, cache in {(x.spec, c.k_cache.dtype): (x, c) for x, c in zip(layers, caches, strict=True)}.values():
            self._builder.warm_up(Impl(layer.spec, sinks=layer.sinks), cache, model.dtype, max_num_seqs)
        self._graphs = None
        if use_graphs or (use_graphs is None and model.device.type == "cuda"):
            self._graphs = self._capture(config, max_num_seqs, required=use_graphs is True)

    @torch.inference_mode()
    def _capture(self, config: BuilderConfig, max_num_seqs: int, required: bool) -> DecodeGraphs | None:
        try:
            return DecodeGraphs(self._forward, config, max_num_seqs)
        except RuntimeError as error:  # a model may wait for the device in its forward, which no graph can hold
            if required:
                raise Unsupported(f"{type(self.model).__name__} cannot be captured as CUDA graphs: {error}") from error
            warnings.warn(f"decode runs without CUDA graphs, slower: {error}", RuntimeWarning, stacklevel=4)
            return None

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes of one token over all layers."""
        return self.bytes_per_block / self.block_size

    @property
    def pages_per_gib(self) -> int:
        """Pages of all layers that 2^30 bytes hold."""
        return 2**30 // self.bytes_per_block

    def activate(self) -> None:
        """Make the model read and write this runner's pages: a model serves the runner that did so last."""
        attach(self.model, self.layers)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Compute a part of the one sequence that fills the cache from its first page on, without sampling.

        Args:
            token_ids: the part.
            start: tokens of the sequence before it, which have been computed.

        Returns:
            [len(token_ids), vocab_size] in the model's dtype: the logits after each of the tokens.

        Raises:
            ValueError: the cache does not hold so many tokens.
        """
        stop, device = start + len(token_ids), self.model.device
        if stop > self.num_blocks * self.block_size:
            raise ValueError(f"a sequence of {stop} tokens does not fit {self.num_blocks} pages of {self.block_size}")
        positions = torch.arange(start, stop)
        batch = AttentionBatch.from_lengths(
            [len(token_ids)],
            [stop],
            [list(range(-(-stop // self.block_size)))],
            slot_mapping=positions,
            device=device,
        )
        ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
        return self._forward(ids, positions.to(device), self._builder.build(0, batch), None)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute the chunks' tokens, write their K and V, and return the logits of the chunks that sample.

        Args:
            chunks: what to compute; each request's block_ids cover its tokens up to the chunk's end.

        Returns:
            [number of chunks that sample, vocab_size], in the model's dtype and the chunks' order.
        """
        shared = _common_prefix_len(chunks, self.block_size)
        if not self._builder.use_cascade(shared, len(chunks)):
            shared = 0
        if self._graphs is not None and not shared and self._graphs.fit(chunks):
            return self._graphs.run(chunks)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled_rows: list[int] = []
        for chunk in chunks:
            blocks = chunk.request.block_ids
            ids += chunk.request.tokens(chunk.start, chunk.stop)
            span = range(chunk.start, chunk.stop)
            positions += span
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            if chunk.samples:
                sampled_rows.append(len(ids) - 1)
        device = self.model.device
        batch = AttentionBatch.from_lengths(
            [chunk.num_tokens for chunk in chunks],
            [chunk.stop for chunk in chunks],
            [chunk.request.block_ids for chunk in chunks],
            slot_mapping=torch.tensor(slots),
            device=device,
        )
        return self._forward(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            self._builder.build(shared, batch),
            torch.tensor(sampled_rows, dtype=torch.long, device=device),
        )

    def _forward(self, ids: Tensor, positions: Tensor, plan: Plan, rows: Tensor | None) -> Tensor:
        """Logits [n, vocab_size] of the given rows; None: of all. ids and positions are [num_tokens] int64."""
        keep = {"logits_to_keep": rows} if self._keeps_chosen_logits and rows is not None else {}
        self._step.plan = plan
        try:
            logits: Tensor = self.model(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keep
            ).logits[0]
        finally:
            self._step.plan = None
        return logits if rows is None or self._keeps_chosen_logits else logits[rows]


def _kv_model(model: PreTrainedModel, layers: Sequence[ProbedLayer]) -> KVModel:
    return KVModel(
        name=Path(model.config.name_or_path).name or type(model).__name__,
        fingerprint=fingerprint(model.config.get_text_config()),
        layers=tuple(LayerShape(x.spec.num_kv_heads, x.spec.head_dim, x.spec.v_dim) for x in layers),
    )


def _make_caches(
    layers: Sequence[ProbedLayer],
    model: PreTrainedModel,
    kv_format: str,
    kv_scales: KVScales | None,
    block_size: int,
    num_blocks: int,
) -> list[LayerCache]:
    """Every layer's pages; layers of one shape lie in one cache, and one block table serves all."""
    shapes = [(layer.spec.num_kv_heads, layer.spec.head_dim, layer.spec.v_dim) for layer in layers]
    caches = {}
    for shape in dict.fromkeys(shapes):
        caches[shape] = PagedKVCache(
            num_layers=shapes.count(shape),
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=shape[0],
            head_dim=shape[1],
            value_dim=shape[2],
            format=kv_format,
            dtype=model.dtype,
            device=model.device,
        )
    views = []
    for i, shape in enumerate(shapes):
        scales = (None, None) if kv_scales is None else kv_scales.of_layer(i)
        k_descale, v_descale = (None if x is None else x.to(model.device) for x in scales)
        views.append(caches[shape].layer(shapes[:i].count(shape), k_descale=k_descale, v_descale=v_descale))
    return views


def _common_prefix_len(chunks: Sequence[ScheduledChunk], block_size: int) -> int:
    """Tokens in the leading blocks that all requests share."""
    columns = zip(*(chunk.request.block_ids for chunk in chunks), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) * block_size


def _free_memory(device: torch.device) -> int:
    """Bytes of memory that programs can have now; where the system does not say, half of what is built in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
