"""Decode steps as CUDA graphs: one launch from the host instead of hundreds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.backend import BuilderConfig, MetadataBuilder
from octavo.batch import AttentionBatch
from octavo.engine.scheduler import ScheduledChunk
from octavo.launch import Plan


class Forward(Protocol):
    """A model's forward over a plan."""

    def __call__(self, ids: Tensor, positions: Tensor, plan: Plan, rows: Tensor | None) -> Tensor:
        """Logits [n, vocab_size] of the given rows of ids and positions, [num_tokens] int64; None: of all."""


class DecodeGraphs:
    """Graphs of steps that compute one token of each of `size` sequences, for several sizes.

    A graph holds the making of the plan, in the builder's memory, and the forward. It reads ids, positions, lengths,
    slots and tables from buffers that a step fills, and is captured under the bounds of the longest sequence, so it
    serves every length. A step of fewer sequences is padded with ones that have no key and no slot.

    Args:
        forward: what a step computes.
        config: of the model's plans, on a CUDA device.
        max_num_seqs: sequences that run together at most.

    Raises:
        RuntimeError: the forward cannot be captured (it waits for the device, say).
    """

    def __init__(self, forward: Forward, config: BuilderConfig, max_num_seqs: int) -> None:
        self._forward = forward
        self._block_size = config.block_size
        self._sizes = graph_sizes(max_num_seqs)
        largest, width = self._sizes[-1], -(-config.max_model_len // config.block_size)
        self._facts = torch.zeros(largest, 4, dtype=torch.int64, device=config.device)
        self._staged = torch.zeros(largest, 4, dtype=torch.int64, pin_memory=True)
        self._table = torch.zeros(largest, width, dtype=torch.int32, device=config.device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=config.device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._builder = MetadataBuilder(dataclasses.replace(config, max_num_seqs=largest, max_num_tokens=largest))
        with torch.cuda.device(config.device):
            self._capture()

    def _capture(self) -> None:
        """Capture every size, the largest first: the smaller ones then fit into its memory."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # kernels compile, and workspaces grow outside the graphs' memory
                logits = self._compute(size)
            torch.cuda.current_stream().wait_stream(side)
            if not self._graphs:
                self._logits = torch.empty_like(logits)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                self._logits[:size].copy_(self._compute(size))
            self._graphs[size] = graph

    def _compute(self, size: int) -> Tensor:
        """A step of `size` sequences on the buffers: logits [size, vocab_size]."""
        ids, positions, slots, seq_lens = self._facts[:size].unbind(1)
        batch = AttentionBatch(
            query_start_loc=self._starts[: size + 1],
            seq_lens=seq_lens.to(torch.int32),
            block_table=self._table[:size],
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self._builder.config.max_model_len,
            slot_mapping=slots,
        )
        plan = self._builder.build_for_graph_capture(batch)
        logits = self._forward(ids, positions, plan, None)
        self._kept = plan.workspace.buffers()
        return logits

    def fit(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a step is one of these: one token of every sequence, each to be sampled from."""
        return len(chunks) <= self._sizes[-1] and all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks)

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Run a step that fits: logits [number of chunks, vocab_size], overwritten by the next step."""
        size = next(size for size in self._sizes if size >= len(chunks))
        facts = []
        for chunk in chunks:
            blocks, position = chunk.request.block_ids, chunk.start
            (token,) = chunk.request.tokens(position, chunk.stop)
            slot = blocks[position // self._block_size] * self._block_size + position % self._block_size
            facts.append((token, position, slot, chunk.stop))
        facts += [(0, 0, -1, 0)] * (size - len(chunks))
        self._copied.synchronize()  # the copy of the step before may still read
        self._staged[:size] = torch.tensor(facts)
        self._facts[:size].copy_(self._staged[:size], non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._facts.device))
        width = max(len(chunk.request.block_ids) for chunk in chunks)
        rows = [[*chunk.request.block_ids, *[0] * (width - len(chunk.request.block_ids))] for chunk in chunks]
        self._table[: len(chunks), :width].copy_(torch.tensor(rows, dtype=torch.int32))
        self._graphs[size].replay()
        return self._logits[: len(chunks)]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, then multiples of 8 (of 16 past 64, of 64 past 256), and the maximum."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64)]
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]
