"""One case: build it, see who is right, time those in turns, put the figures into rows."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from octavo.bench.accuracy import Truth, judge, truth
from octavo.bench.bandwidth import LinearRead
from octavo.bench.cases import DTYPES, Case, Problem, build
from octavo.bench.providers import OCTAVO, Provider
from octavo.bench.report import Row, lengths
from octavo.bench.timing import Call, Timer, Times, interleave, torch_threads, wall
from octavo.bench.work import is_decode, work
from octavo.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Machine:
    """What all rows of a run have in common.

    Args:
        device: name of the processor.
        cores: CPUs that this process may use.
        octavo, torch, numba: versions; numba None: not installed.
    """

    device: str
    cores: int
    octavo: str
    torch: str
    numba: str | None

    @classmethod
    def here(cls, octavo: str) -> Machine:
        """This one; the version of Octavo is the caller's to know."""
        return cls(cpu_name(), usable_cpus(), octavo, torch.__version__, _numba_version())


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
    case = problem.case
    costs = work(case)
    blank = Row(
        case=case.name,
        kind="decode" if is_decode(case) else "prefill",
        provider="",
        device=machine.device,
        cores=machine.cores,
        threads=threads,
        dtype=next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        lengths=lengths(case),
        rounds=rounds,
        kv_bytes=costs.kv_bytes,
        flops=costs.flops,
        octavo=machine.octavo,
        torch=machine.torch,
        numba=machine.numba,
    )
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    for provider in providers:
        row, call = _admit(provider, problem, true, replace(blank, provider=provider.name))
        rows.append(row)
        if call is not None:
            calls[provider.name] = call
    reads = _reads(memory, threads) if memory is not None and calls and blank.kind == "decode" else {}
    times = interleave(calls | {f"read on {count}": call for count, call in reads.items()}, rounds, timer)
    speeds = {count: memory.num_bytes / times[f"read on {count}"].median for count in reads} if memory else {}
    return [_figures(row, times, speeds) if row.outcome == "timed" else row for row in rows]


def _admit(provider: Provider, problem: Problem, true: Truth, row: Row) -> tuple[Row, Callable[[], Tensor] | None]:
    """Let a provider compute the problem once; the call is None unless it may be timed."""
    reason = provider.missing() or provider.unsupported(problem)
    if reason is not None:
        return replace(row, outcome="unsupported", reason=reason), None
    try:
        row = replace(row, variant=provider.variant(problem))
        call = provider.prepare(problem)
        out = call()
    except Unsupported as error:
        return replace(row, outcome="unsupported", reason=str(error)), None
    except Exception as error:  # a peer of another version may fail in any way; the others are still measured
        return replace(row, outcome="failed", reason=f"{type(error).__name__}: {error}"), None
    verdict = judge(problem, true, out)
    row = replace(row, error=verdict.error, allowed_error=verdict.allowed)
    if verdict.wrong is not None:
        return replace(row, outcome="wrong", reason=verdict.wrong), None
    return row, call


def _reads(memory: LinearRead, threads: int) -> dict[int, Call]:
    """Calls that read the memory on one thread and on all, as far as they can be made."""
    calls = {count: memory.call(count) for count in (1, threads)}
    return {count: call for count, call in calls.items() if call is not None}


def _figures(row: Row, times: Mapping[str, Times], read_speeds: Mapping[int, float]) -> Row:
    """A row with its times, and with the rate that its kind of case is judged by. Speeds are in bytes a second."""
    own = times[row.provider]
    row = replace(
        row,
        median_us=own.median * 1e6,
        min_us=min(own.seconds) * 1e6,
        max_us=max(own.seconds) * 1e6,
        times_octavo=own.median / times[OCTAVO.name].median if OCTAVO.name in times else None,
    )
    if row.kind == "prefill":
        return replace(row, gflop_per_s=row.flops / own.median / 1e9)
    speed, full = row.kv_bytes / own.median, read_speeds.get(row.threads)
    one = read_speeds.get(1)
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


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numba_version() -> str | None:
    try:
        return metadata.version("numba")
    except metadata.PackageNotFoundError:
        return None
