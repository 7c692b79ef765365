"""What `octavo generate` prints. Text of users and models is written as it is: never as rich's markup."""

from __future__ import annotations

import json
import logging
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from octavo.cli.outcome import Outcome
from octavo.engine.results import Delta, Result
from octavo.formats import KVFormat

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of a run.

    Prompt tokens a second: up to the moment at which every prompt had its first token. Generated tokens a
    second: of the whole run.
    """

    model: str
    dtype: str
    kv_format: str
    device: str
    num_prompts: int
    num_failed: int
    interrupted: bool
    load_seconds: float
    seconds: float
    num_prompt_tokens: int  # computed ones
    num_cached_tokens: int  # found in the prefix cache
    num_generated_tokens: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    time_to_first_token: float | None
    start_to_first_token: float | None
    cache_bytes_per_token: float
    pages_per_gib: int  # pages of all layers
    block_size: int
    num_blocks: int
    peak_blocks: int
    num_preemptions: int

    @classmethod
    def of(cls, llm: LLM, model: str, kv_format: str, outcome: Outcome, load_seconds: float) -> Summary:
        """The numbers of the engine's first run."""
        stats = llm.stats
        waits = [result.time_to_first_token for result in outcome.results if result.error is None]
        prefill = max((wait for wait in waits if wait is not None), default=outcome.seconds)
        return cls(
            model=model,
            dtype=str(llm.model.dtype).removeprefix("torch."),
            kv_format=KVFormat.parse(kv_format, llm.model.dtype).name,
            device=str(llm.model.device),
            num_prompts=len(outcome.results),
            num_failed=outcome.num_failed,
            interrupted=outcome.interrupted,
            load_seconds=load_seconds,
            seconds=outcome.seconds,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            prompt_tokens_per_second=stats.num_prompt_tokens / prefill,
            generated_tokens_per_second=stats.num_generated_tokens / outcome.seconds,
            time_to_first_token=outcome.time_to_first_token,
            start_to_first_token=outcome.start_to_first_token,
            cache_bytes_per_token=llm.runner.bytes_per_token,
            pages_per_gib=llm.runner.pages_per_gib,
            block_size=llm.runner.block_size,
            num_blocks=llm.runner.num_blocks,
            peak_blocks=stats.peak_blocks,
            num_preemptions=stats.num_preemptions,
        )


def stream(delta: Delta) -> None:
    """Write the only prompt's new text to standard output at once."""
    sys.stdout.write(delta.text)
    sys.stdout.flush()


def end_stream(result: Result) -> None:
    """End the line that the only prompt's text left open."""
    if result.text and not result.text.endswith("\n"):
        _write_line("")


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def quieten_transformers() -> None:
    """Keep the progress bars and warnings of Transformers and the hub out of ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # the hub's as well
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@contextmanager
def loading(console: Console, model: str) -> Iterator[None]:
    """A sign of life while a model loads: it takes seconds, and minutes where it is downloaded."""
    message = Text(f"loading {model} ...")
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        console.print(message, soft_wrap=True)
        yield


@contextmanager
def progress(console: Console, num_prompts: int) -> Iterator[Callable[[Delta], None]]:
    """A bar over prompts and a count of tokens, on a terminal; to be fed with all news."""
    bar = Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=num_prompts, tokens=0)
    tokens = 0

    def feed(delta: Delta) -> None:
        nonlocal tokens
        tokens += len(delta.token_ids)
        bar.update(task, advance=int(delta.result is not None), tokens=tokens)

    with bar:
        yield feed


def print_many(texts: Sequence[str], results: Sequence[Result], console: Console) -> None:
    """Each prompt (standard error) with its text (standard output), if it has any."""
    for i, (prompt, result) in enumerate(zip(texts, results, strict=True)):
        title = f"[{i + 1}/{len(texts)}] {textwrap.shorten(prompt, 100, placeholder=' ...')}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        if result.error is None or result.text:
            _write_line(result.text)


def print_summary(summary: Summary, console: Console) -> None:
    """The numbers for people."""
    s = summary
    first = [
        f"{seconds:.2f} s after the {since}"
        for seconds, since in ((s.time_to_first_token, "call"), (s.start_to_first_token, "program's start"))
        if seconds is not None
    ]
    cached = f", {s.num_cached_tokens} more found in the prefix cache"
    rows = {
        "prompt": f"{s.num_prompt_tokens} tokens, {s.prompt_tokens_per_second:.1f} a second{cached}",
        "generated": f"{s.num_generated_tokens} tokens, {s.generated_tokens_per_second:.1f} a second",
        "first token": ", ".join(first) or "none",
        "cache": f"{s.cache_bytes_per_token:,.0f} bytes a token ({s.kv_format}), {s.pages_per_gib:,} pages per GiB",
        "pages": f"{s.peak_blocks} of {s.num_blocks} used, {s.block_size} tokens each",
        "preemptions": str(s.num_preemptions),
    }
    console.print()
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<13}", "dim"), value), soft_wrap=True)


def print_json(texts: Sequence[str], results: Sequence[Result], summary: Summary) -> None:
    """Results and summary as one document on standard output."""
    document = {
        "results": [_entry(prompt, result) for prompt, result in zip(texts, results, strict=True)],
        "summary": asdict(summary),
    }
    _write_line(json.dumps(document, indent=2, allow_nan=False))


def _entry(prompt: str, result: Result) -> dict[str, Any]:
    logprobs = result.logprobs and [
        {
            "token_id": entry.token_id,
            "logprob": _number(entry.logprob),
            "top": [{"token_id": token, "logprob": _number(logprob)} for token, logprob in entry.top],
        }
        for entry in result.logprobs
    ]
    return {
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "logprobs": logprobs,
        "error": result.error,
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
        "time_to_first_token": result.time_to_first_token,
    }


def _number(value: float) -> float | None:
    """JSON has no infinity; an impossible token's log-probability is null."""
    return value if math.isfinite(value) else None
