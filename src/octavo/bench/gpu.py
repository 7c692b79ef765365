"""Timing on a GPU: CUDA graphs of a few layers with more inputs than the L2 cache holds, and the card's limits.

A graph's replay is as quick as the device: nobody's launches from Python count, and everybody's kernels follow each
other as they do in an engine that decodes under graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROTATED_BYTES = 512 << 20
"""What the layers of a replay read and write together at least; an H100's L2 holds 50 MB."""

MIN_LAYERS, MAX_LAYERS = 2, 32

COPY_BYTES = 1 << 30
"""What the copy reads; it writes as much."""

LEAD = 2
"""Replays before the one that is timed: while the device is busy with them, the host queues all that is timed."""

MATMUL_SIZE = 8192
"""Rows and columns of the factors of the matrix product."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Captured calls.

    Args:
        graph: replays all of them.
        calls: what was captured; a graph does not keep the memory that they hold.
        outs: what they return; a replay writes it anew.
    """

    graph: torch.cuda.CUDAGraph
    calls: tuple[Callable[[], Tensor], ...]
    outs: tuple[Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


def num_layers(bytes_of_one: int) -> int:
    """How many layers of so many bytes make a replay that finds nothing in the cache."""
    return min(MAX_LAYERS, max(MIN_LAYERS, -(-ROTATED_BYTES // max(1, bytes_of_one))))


def capture(calls: Sequence[Callable[[], Tensor]]) -> Graph:
    """Capture calls, one after the other, after each has run once."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = tuple(call() for call in calls)
    return Graph(graph, tuple(calls), outs)


def replayed(graph: Graph) -> Tensor:
    """What the first of a graph's calls computes in a replay, which must write all of it."""
    for out in graph.outs:
        out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return graph.outs[0]


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds that a call takes on the device, behind the same work, untimed, so that nothing waits for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(LEAD):
        call()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class Ceilings:
    """What the card can do: a copy within its memory, and a bf16 matrix product, of random numbers."""

    def __init__(self, device: torch.device, copy_bytes: int = COPY_BYTES, size: int = MATMUL_SIZE) -> None:
        self._source = torch.randn(copy_bytes // 2, dtype=torch.bfloat16, device=device)
        self._target = torch.empty_like(self._source)
        self._factors = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
        self._product = torch.empty_like(self._factors[0])

    @property
    def bytes_of_copy(self) -> int:
        """What a copy moves: it reads as much as it writes."""
        return 2 * self._source.nbytes

    @property
    def flops_of_matmul(self) -> int:
        return 2 * len(self._product) ** 3

    def copy(self) -> None:
        self._target.copy_(self._source)

    def matmul(self) -> None:
        torch.mm(self._factors[0], self._factors[1], out=self._product)
