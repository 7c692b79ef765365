"""Runs prompts through the engine and keeps what came out, also where the user ends it early."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.engine.errors import RequestError
from octavo.engine.request import SamplingParams
from octavo.engine.results import Delta, Result

if TYPE_CHECKING:
    from octavo.engine.llm import LLM, Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Args:
        results: one per prompt, in order; "aborted" with the text so far where the run was interrupted.
        seconds: of the run.
        time_to_first_token: seconds from the call to the first token of any prompt; None: there was none.
        start_to_first_token: the same from the start of the process; None: unknown.
        interrupted: the user ended it.
    """

    results: tuple[Result, ...]
    seconds: float
    time_to_first_token: float | None
    start_to_first_token: float | None
    interrupted: bool

    @property
    def num_failed(self) -> int:
        return sum(result.error is not None for result in self.results)


def collect(
    llm: LLM, prompts: Sequence[Prompt | RequestError], params: SamplingParams, show: Callable[[Delta], None]
) -> Outcome:
    """Generate for all prompts.

    Args:
        prompts: what the engine reads, or why there is nothing to read.
        show: called with all news; its index counts all prompts.
    """
    results: dict[int, Result] = {}
    texts = [""] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    readable: list[int] = []
    batch: list[Prompt] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, RequestError):
            results[i] = Result("", (), "error", error=str(prompt))
            show(Delta(i, "", (), results[i]))
        else:
            readable.append(i)
            batch.append(prompt)
    waits: dict[int, float] = {}
    first_age: float | None = None
    interrupted = False
    started = time.perf_counter()
    try:
        for delta in llm.stream(batch, params):
            i = readable[delta.index]
            if delta.token_ids and i not in waits:
                first_age = process_age() if not waits else first_age
                waits[i] = time.perf_counter() - started
            texts[i] += delta.text
            tokens[i] += delta.token_ids
            if delta.result is not None:
                results[i] = delta.result
            show(Delta(i, delta.text, delta.token_ids, delta.result))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - started
    for i in range(len(prompts)):
        results.setdefault(i, Result(texts[i], tuple(tokens[i]), "aborted", time_to_first_token=waits.get(i)))
    return Outcome(
        tuple(results[i] for i in range(len(prompts))),
        seconds,
        min(waits.values(), default=None),
        first_age,
        interrupted,
    )


def process_age() -> float | None:
    """Seconds since this process started, Python's own start and all imports included; None where the system
    does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError):
        return None
