"""One case on a GPU: build some layers of it, see who is right, replay their graphs in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.bench.accuracy import truth
from octavo.bench.cases import Case, build
from octavo.bench.gpu import Ceilings, Graph, capture, device_seconds, num_layers, replayed
from octavo.bench.measure import Machine, admit, blank_row, timed
from octavo.bench.providers import Provider
from octavo.bench.report import Row
from octavo.bench.timing import Call, Timer, Times, interleave
from octavo.bench.work import is_decode, work

LIMIT = "the card's limit"
"""Name of the copy or the matrix product among the calls."""


def measure_on_gpu(
    case: Case,
    providers: Sequence[Provider],
    machine: Machine,
    device: torch.device,
    ceilings: Ceilings,
    *,
    rounds: int,
    timer: Timer = device_seconds,
) -> list[Row]:
    """Measure providers on a case: one row for each of them.

    Args:
        case: what to compute.
        providers: who does, in the order of the rows.
        machine: what to write into the rows.
        device: where.
        ceilings: what is timed in the same rounds, to compare with.
        rounds: how often everything is timed.
        timer: how a replay is timed.
    """
    costs, decode = work(case), is_decode(case)
    new_bytes = sum(case.query_lens) * case.spec.num_q_heads * (case.spec.head_dim + case.spec.v_dim)
    count = num_layers(costs.kv_bytes + new_bytes * case.dtype.itemsize)
    layers = [build(case, seed=seed, device=device, draw_on=device) for seed in range(count)]
    true = truth(layers[0])
    blank = replace(blank_row(case, machine, rounds), layers=count)
    rows: list[Row] = []
    graphs: dict[str, Graph] = {}
    for provider in providers:
        row, graph = admit(provider, layers, true, replace(blank, provider=provider.name), _captured)
        rows.append(row)
        if graph is not None:
            graphs[provider.name] = graph
    calls: dict[str, Call] = {name: graph.replay for name, graph in graphs.items()}
    calls[LIMIT] = ceilings.copy if decode else ceilings.matmul
    times = interleave(calls, rounds, timer)
    rate = (ceilings.bytes_of_copy if decode else ceilings.flops_of_matmul) / times[LIMIT].median
    layer_times = {name: Times(tuple(t / count for t in times[name].seconds)) for name in graphs}
    return [_figures(row, layer_times, rate) if row.outcome == "timed" else row for row in rows]


def _captured(calls: list[Callable[[], Tensor]]) -> tuple[Graph, Tensor]:
    """A graph of the calls, and what its replay computes first."""
    graph = capture(calls)
    return graph, replayed(graph)


def _figures(row: Row, times: Mapping[str, Times], rate: float) -> Row:
    """A row with its times and its share of the card's limit, in bytes or operations a second."""
    row = timed(row, times)
    seconds = times[row.provider].median
    if row.kind == "decode":
        speed = row.kv_bytes / seconds
        return replace(row, gb_per_s=speed / 1e9, copy_gb_per_s=rate / 1e9, copy_share=speed / rate)
    speed = row.flops / seconds
    return replace(row, gflop_per_s=speed / 1e9, matmul_gflop_per_s=rate / 1e9, matmul_share=speed / rate)
