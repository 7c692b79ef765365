"""What a step costs before its first kernel: building the plan, and calling one layer, by number of requests.

Host figures are the mean of a few calls in a row, as long as nobody waits for the device; the device's share of a plan
is that of the plan's kernels in a CUDA graph. Everything takes turns, as in the other benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from octavo.batch import AttentionBatch
from octavo.bench import flash_infer
from octavo.bench.cases import LLAMA, Case, Problem
from octavo.bench.gpu import capture, device_seconds
from octavo.bench.measure import Machine
from octavo.bench.providers import octavo_layer, octavo_planner
from octavo.bench.timing import Call, interleave
from octavo.cache import PagedKVCache
from octavo.launch import Plan
from octavo.spec import KVShard

KEYS = 1024
"""Keys of each request. Requests share their pages, so that a thousand of them need little memory."""

IN_A_ROW = 20
"""Calls that are timed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What a step costs the host. The fields are the columns of the CSV file; what does not exist is None.

    Args:
        provider: "octavo", whose plans lie on a GPU in memory that is kept, as engines have it and FlashInfer's
            wrapper too; "octavo-own-memory", whose plans have memory of their own; or "flashinfer".
        device: name of the processor or of the GPU.
        requests: sequences with one new token each.
        keys: of each sequence.
        rounds: how often it was timed.
        plan_host_us: building the plan, host time, median of the rounds.
        plan_device_us: what the plan's kernels take on a GPU; None: there are none.
        run_host_us: calling one layer on a GPU, host time; None on a CPU, where the call computes it.
        octavo, torch, numba, triton, flashinfer: versions.
    """

    provider: str
    device: str
    requests: int
    keys: int
    rounds: int
    plan_host_us: float
    plan_device_us: float | None
    run_host_us: float | None
    octavo: str
    torch: str
    numba: str | None
    triton: str | None
    flashinfer: str | None


PLAN_HEADER = tuple(field.name for field in fields(PlanRow))


@dataclass(frozen=True, slots=True)
class Step:
    """What one library does in a step.

    Args:
        provider: who it is.
        plan: builds the plan.
        plan_graph: replays IN_A_ROW builds on the device; None: the plan has no kernels.
        run: calls one layer; None: the problem is on a CPU.
    """

    provider: str
    plan: Call
    plan_graph: Call | None
    run: Call | None


def measure_plans(
    requests: Sequence[int], device: torch.device, machine: Machine, flashinfer: str | None, *, rounds: int
) -> list[PlanRow]:
    """Measure steps of so many requests each, in the order of `requests`.

    Args:
        requests: numbers of sequences.
        device: where the batches live.
        machine: what to write into the rows.
        flashinfer: its version, if it is to be measured too; None: it is not.
        rounds: how often everything is timed.
    """
    rows: list[PlanRow] = []
    for count in requests:
        problem = decode_step(count, device)
        steps = _octavo(problem) if flashinfer is None else [*_octavo(problem), _flash_infer(problem)]
        host: dict[str, Call] = {}
        graphs: dict[str, Call] = {}
        for step in steps:
            host[f"{step.provider} plan"] = step.plan
            if step.run is not None:
                host[f"{step.provider} run"] = step.run
            if step.plan_graph is not None:
                graphs[step.provider] = step.plan_graph
        host_times = interleave(host, rounds, _host_seconds)
        device_times = interleave(graphs, rounds, lambda call: device_seconds(call) / IN_A_ROW)
        for step in steps:
            on_device, run = device_times.get(step.provider), host_times.get(f"{step.provider} run")
            rows.append(
                PlanRow(
                    provider=step.provider,
                    device=machine.device,
                    requests=count,
                    keys=KEYS,
                    rounds=rounds,
                    plan_host_us=host_times[f"{step.provider} plan"].median * 1e6,
                    plan_device_us=None if on_device is None else on_device.median * 1e6,
                    run_host_us=None if run is None else run.median * 1e6,
                    octavo=machine.octavo,
                    torch=machine.torch,
                    numba=machine.numba,
                    triton=machine.triton,
                    flashinfer=flashinfer,
                )
            )
    return rows


def decode_step(requests: int, device: torch.device) -> Problem:
    """So many sequences with one new token over the same KEYS keys, without dense K and V."""
    case = Case(f"decode-{requests}x1k-shared", LLAMA, (1,) * requests, (KEYS,) * requests)
    blocks = KEYS // case.block_size
    cache = PagedKVCache(
        num_layers=1,
        num_blocks=blocks,
        block_size=case.block_size,
        num_kv_heads=LLAMA.num_kv_heads,
        head_dim=LLAMA.head_dim,
        value_dim=LLAMA.v_dim,
        dtype=case.dtype,
        device=device,
        layout=case.order,
    ).layer(0)
    cache.k_cache.normal_()
    cache.v_cache.normal_()
    table = torch.arange(blocks, dtype=torch.int32).expand(requests, -1).contiguous()
    return Problem(
        case=case,
        shard=KVShard(),
        batch=AttentionBatch.from_lengths(case.query_lens, case.seq_lens, table, device=device),
        q=torch.randn(requests, LLAMA.num_q_heads, LLAMA.head_dim, device=device).to(case.dtype),
        cache=cache,
        keys=(),
        values=(),
        alibi_slopes=None,
        sinks=None,
    )


def _octavo(problem: Problem) -> list[Step]:
    planner, batch = octavo_planner(problem), problem.batch
    if problem.q.device.type == "cpu":
        return [Step("octavo", lambda: planner.plan(batch), None, None)]
    kept = planner.buffers(batch.num_tokens, batch.num_seqs, batch.max_seq_len)
    return [
        _octavo_step("octavo", problem, lambda: planner.plan(batch, buffers=kept)),
        _octavo_step("octavo-own-memory", problem, lambda: planner.plan(batch)),
    ]


def _octavo_step(provider: str, problem: Problem, build: Callable[[], Plan]) -> Step:
    graph = capture([lambda: build().positions] * IN_A_ROW)
    return Step(provider, build, graph.replay, octavo_layer(build(), problem))


def _flash_infer(problem: Problem) -> Step:
    """It plans on the host and copies the plan to the device."""
    form: flash_infer.Form = "tensor-cores"
    pages = flash_infer.pages_of(problem)
    wrapper = flash_infer.make(form, problem)
    flash_infer.plan(form, wrapper, problem, pages)
    return Step(
        "flashinfer",
        lambda: flash_infer.plan(form, wrapper, problem, pages),
        None,
        flash_infer.layer(wrapper, problem),
    )


def _host_seconds(call: Callable[[], object]) -> float:
    """Seconds of one call out of a few in a row, until they return; the device is idle at the beginning."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        call()
    return (time.perf_counter() - begin) / IN_A_ROW
