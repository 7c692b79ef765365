"""Runs a step of the scheduler through the model: tensors in, logits out."""

from __future__ import annotations

import os
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
from octavo.engine.probe import ProbedLayer, probe
from octavo.engine.scheduler import ScheduledChunk
from octavo.errors import Unsupported

MEMORY_SHARE = 0.25
"""Share of the free memory that the cache takes when no budget is given."""


class ModelRunner:
    """A model over a paged cache.

    Args:
        model: a Transformers causal language model; its attention is replaced.
        kv_format: how the cache stores K and V.
        block_size: tokens of a page.
        num_blocks: pages; None: as many as `kv_cache_bytes` holds.
        kv_cache_bytes: memory budget of the cache; None: a quarter of the free memory.
        max_num_seqs, max_model_len: what the cache must hold at most.

    Raises:
        ModelError: the model's attention cannot be replaced, with the reason.
        Unsupported: no kernels serve it on this device or in this format, with the reason.
        ValueError: the budget holds no page, or the machine does not hold the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_format: str,
        block_size: int,
        num_blocks: int | None,
        kv_cache_bytes: int | None,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.block_size = block_size
        layers = probe(model, max_model_len)
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
        self.bytes_per_block = sum(
            Backend.page_layout(layer.spec, model.dtype, kv_format, block_size).page_bytes for layer in layers
        )
        if num_blocks is None:
            most = max_num_seqs * -(-max_model_len // block_size)
            budget = int(_free_memory() * MEMORY_SHARE) if kv_cache_bytes is None else kv_cache_bytes
            num_blocks = min(most, budget // self.bytes_per_block)
        if num_blocks < 1:
            raise ValueError(
                f"the cache holds {num_blocks} blocks; a block takes {self.bytes_per_block} bytes: "
                f"raise kv_cache_bytes ({kv_cache_bytes}) or num_blocks"
            )
        self.num_blocks = num_blocks
        self._step = CurrentStep()
        self._builder = MetadataBuilder(
            BuilderConfig(
                num_q_heads=max(layer.spec.num_q_heads for layer in layers),
                value_dim=max(layer.spec.v_dim for layer in layers),
                block_size=block_size,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                device=model.device,
            )
        )
        try:
            caches = _make_caches(layers, model, kv_format, block_size, num_blocks)
        except (OSError, MemoryError, OverflowError) as error:
            raise ValueError(
                f"{num_blocks} blocks of {self.bytes_per_block} bytes do not fit this machine's memory ({error}): "
                f"lower num_blocks or kv_cache_bytes"
            ) from error
        attach(
            model,
            {
                layer.module: PagedLayer(Impl(layer.spec, sinks=layer.sinks), cache, self._step)
                for layer, cache in zip(layers, caches, strict=True)
            },
        )
        self._keeps_chosen_logits = model._supports_logits_to_keep()
        for layer, cache in {(x.spec, c.k_cache.dtype): (x, c) for x, c in zip(layers, caches, strict=True)}.values():
            self._warm_up(layer, cache)

    def _warm_up(self, layer: ProbedLayer, cache: LayerCache) -> None:
        """Let kernels compile before the first request: one row against one key of an empty cache."""
        plan = self._builder.build(0, AttentionBatch.from_lengths([1], [1], [[0]], device=self.model.device))
        like = {"dtype": self.model.dtype, "device": self.model.device}
        q = torch.zeros(1, layer.spec.num_q_heads, layer.spec.head_dim, **like)
        out = torch.zeros(1, layer.spec.num_q_heads, layer.spec.v_dim, **like)
        Impl(layer.spec, sinks=layer.sinks).forward(q, None, None, cache, plan, out)

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes of one token over all layers."""
        return self.bytes_per_block / self.block_size

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute the chunks' tokens, write their K and V, and return the logits of the chunks that sample.

        Args:
            chunks: what to compute; each request's block_ids cover its tokens up to the chunk's end.

        Returns:
            [number of chunks that sample, vocab_size], in the model's dtype and the chunks' order.
        """
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
        shared = _common_prefix_len(chunks, self.block_size)
        if not self._builder.use_cascade(shared, len(chunks)):
            shared = 0
        rows = torch.tensor(sampled_rows, dtype=torch.long, device=device)
        keep = {"logits_to_keep": rows} if self._keeps_chosen_logits else {}
        self._step.plan = self._builder.build(shared, batch)
        try:
            logits: Tensor = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                **keep,
            ).logits[0]
        finally:
            self._step.plan = None
        return logits if self._keeps_chosen_logits else logits[rows]


def _make_caches(
    layers: Sequence[ProbedLayer], model: PreTrainedModel, kv_format: str, block_size: int, num_blocks: int
) -> list[LayerCache]:
    """Every layer's pages; layers of one shape lie in one cache, and one block table serves all."""
    shapes = [(layer.spec.num_kv_heads, layer.spec.head_dim, layer.spec.v_dim) for layer in layers]
    views = {}
    for shape in dict.fromkeys(shapes):
        cache = PagedKVCache(
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
        views[shape] = iter([cache.layer(i) for i in range(cache.num_layers)])
    return [next(views[shape]) for shape in shapes]


def _common_prefix_len(chunks: Sequence[ScheduledChunk], block_size: int) -> int:
    """Tokens in the leading blocks that all requests share."""
    columns = zip(*(chunk.request.block_ids for chunk in chunks), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) * block_size


def _free_memory() -> int:
    """Bytes of memory that programs can have now; where the system does not say, half of what is built in."""
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
