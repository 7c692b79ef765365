"""One case on a CPU: build it, see who is right, time those in turns, put the figures into rows."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch import device as Device

from octavo.bench.accuracy import Truth, judge, truth
from octavo.bench.bandwidth import LinearRead
from octavo.bench.cases import DTYPES, Case, Problem, build
from octavo.bench.installed import version
from octavo.bench.providers import OCTAVO, Provider
from octavo.bench.report import Row, lengths
from octavo.bench.timing import Call, Timer, Times, interleave, torch_threads, wall
from octavo.bench.work import is_decode, work
from octavo.cpus import usable_cpus
from octavo.errors import Unsupported

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What all rows of a run have in common.

    Args:
        device: name of the processor or of the GPU.
        cores: CPUs that this process may use.
        octavo, torch, numba, triton: versions; None: not installed.
    """

    device: str
    cores: int
    octavo: str
    torch: str
    numba: str | None
    triton: str | None = None

    @classmethod
    def here(cls, octavo: str, gpu: Device | None = None) -> Machine:
        """This one, with that GPU if one is measured; the version of Octavo is the caller's to know."""
        name = cpu_name() if gpu is None else torch.cuda.get_device_name(gpu)
        return cls(name, usable_cpus(), octavo, torch.__version__, version("numba"), version("triton"))


def measure(
    case: Case,
    providers: Sequence[Provider],
    machine: Machine,
    *,
    threads: Sequence[int],
    rounds: int,
    memory: LinearRead | None = None,
    timer: Timer = wall,
) -> list[Row]:
    """Measure providers on a case: one row for each of them and each number of threads.

    Args:
        case: what to compute.
        providers: who does, in the order of the rows.
        machine: what to write into the rows.
        threads: numbers of threads to measure with.
        rounds: how often each provider is timed.
        memory: what is read in the same rounds, to compare with; None: nothing.
        timer: how a call is timed.
    """
    problem = build(case)
    true = truth(problem)
    rows: list[Row] = []
    for count in threads:
        with torch_threads(count):
            rows += _with_threads(problem, true, providers, machine, count, rounds, memory, timer)
    return rows


def _with_threads(
    problem: Problem,
    true: Truth,
    providers: Sequence[Provider],
    machine: Machine,
    threads: int,
    rounds: int,
    memory: LinearRead | None,
    timer: Timer,
) -> list[Row]:
    blank = replace(blank_row(problem.case, machine, rounds), threads=threads)
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    for provider in providers:
        row, call = admit(provider, [problem], true, replace(blank, provider=provider.name), _once)
        rows.append(row)
        if call is not None:
            calls[provider.name] = call
    reads = _reads(memory, threads) if memory is not None and calls and blank.kind == "decode" else {}
    times = interleave(calls | {f"read on {count}": call for count, call in reads.items()}, rounds, timer)
    speeds = {count: memory.num_bytes / times[f"read on {count}"].median for count in reads} if memory else {}
    return [_figures(row, times, speeds) if row.outcome == "timed" else row for row in rows]


def blank_row(case: Case, machine: Machine, rounds: int) -> Row:
    """What all rows of a case have in common."""
    costs = work(case)
    return Row(
        case=case.name,
        kind="decode" if is_decode(case) else "prefill",
        provider="",
        device=machine.device,
        cores=machine.cores,
        dtype=next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        lengths=lengths(case),
        rounds=rounds,
        kv_bytes=costs.kv_bytes,
        flops=costs.flops,
        octavo=machine.octavo,
        torch=machine.torch,
        numba=machine.numba,
        triton=machine.triton,
    )


def admit(
    provider: Provider,
    layers: Sequence[Problem],
    true: Truth,
    row: Row,
    compute: Callable[[list[Callable[[], Tensor]]], tuple[T, Tensor]],
) -> tuple[Row, T | None]:
    """Let a provider compute a step.

    Args:
        provider: who computes.
        layers: of the step.
        true: what the first layer's output must be.
        row: what is known already.
        compute: makes out of the calls of the layers what will be timed, and the first layer's output with it.

    Returns:
        The row, and what may be timed; None: nothing.
    """
    reason = provider.missing() or provider.unsupported(layers[0])
    if reason is not None:
        return replace(row, outcome="unsupported", reason=reason), None
    try:
        row = replace(row, variant=provider.variant(layers[0]))
        made, out = compute(provider.calls(layers))
    except Unsupported as error:
        return replace(row, outcome="unsupported", reason=str(error)), None
    except Exception as error:  # a peer of another version may fail in any way; the others are still measured
        return replace(row, outcome="failed", reason=f"{type(error).__name__}: {error}"), None
    verdict = judge(layers[0], true, out)
    row = replace(row, error=verdict.error, allowed_error=verdict.allowed)
    if verdict.wrong is not None:
        return replace(row, outcome="wrong", reason=verdict.wrong), None
    return row, made


def _once(calls: list[Callable[[], Tensor]]) -> tuple[Callable[[], Tensor], Tensor]:
    """The only call there is, and what it computes."""
    (call,) = calls
    return call, call()


def timed(row: Row, times: Mapping[str, Times]) -> Row:
    """A row with its times, which stand in the order of the providers' names."""
    own = times[row.provider]
    return replace(
        row,
        median_us=own.median * 1e6,
        min_us=min(own.seconds) * 1e6,
        max_us=max(own.seconds) * 1e6,
        times_octavo=own.median / times[OCTAVO.name].median if OCTAVO.name in times else None,
    )


def _reads(memory: LinearRead, threads: int) -> dict[int, Call]:
    """Calls that read the memory on one thread and on all, as far as they can be made."""
    calls = {count: memory.call(count) for count in (1, threads)}
    return {count: call for count, call in calls.items() if call is not None}


def _figures(row: Row, times: Mapping[str, Times], read_speeds: Mapping[int, float]) -> Row:
    """A row with its times, and with the rate that its kind of case is judged by. Speeds are in bytes a second."""
    seconds, threads = times[row.provider].median, row.threads
    row = timed(row, times)
    if row.kind == "prefill":
        return replace(row, gflop_per_s=row.flops / seconds / 1e9)
    speed, one = row.kv_bytes / seconds, read_speeds.get(1)
    full = None if threads is None else read_speeds.get(threads)
    return replace(
        row,
        gb_per_s=speed / 1e9,
        read_gb_per_s=None if full is None else full / 1e9,
        read_one_gb_per_s=None if one is None else one / 1e9,
        read_share=None if full is None else speed / full,
    )


def cpu_name() -> str:
    """The processor as its maker calls it, where the system knows."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
