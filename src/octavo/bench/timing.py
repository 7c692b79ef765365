"""The timing protocol: all that is compared runs in one process and takes turns.

First everything is called a few times, so that compilers, caches and thread pools are ready. Then come rounds: in
each one everything is called and timed once, and another one begins each time, so that a machine that becomes
slower or faster does so for all. A call finds the caches as the others left them, as a layer of a model does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

WARM_UP = 2
"""Calls before the rounds."""

QUIET = 0.01
"""Seconds before a call is timed: OpenMP's threads wait for more work in a loop, on a core that the next call needs."""

Call = Callable[[], object]
Timer = Callable[[Call], float]
"""Seconds that one call takes. On a GPU this is where graphs and events belong."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call, one figure a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def wall(call: Call) -> float:
    """Seconds on the clock: right for calls that return when they are done."""
    time.sleep(QUIET)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleave(calls: Mapping[str, Call], rounds: int, timer: Timer = wall) -> dict[str, Times]:
    """Time calls in turns.

    Args:
        calls: what to time, by name.
        rounds: how often each one is timed.
        timer: how.

    Raises:
        ValueError: there are no rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    names = list(calls)
    for name in names:
        for _ in range(WARM_UP):
            calls[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % max(1, len(names))
        for name in names[first:] + names[:first]:
            seconds[name].append(timer(calls[name]))
    return {name: Times(tuple(figures)) for name, figures in seconds.items()}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give torch so many threads, and afterwards as many as it had.

    Octavo and vLLM's kernel take their number of threads from the same setting.

    Raises:
        RuntimeError: something changed the setting meanwhile, so the figures are not of `count` threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        if torch.get_num_threads() != count:
            raise RuntimeError(
                f"torch had {count} threads before the measurement and {torch.get_num_threads()} after it: a "
                f"provider changed the setting, and its figures are worth nothing"
            )
    finally:
        torch.set_num_threads(before)
