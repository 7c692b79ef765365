"""`octavo bench attention`: Octavo's attention beside that of others, on this machine."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import octavo
from octavo.bench import plot as drawing
from octavo.bench.bandwidth import LinearRead
from octavo.bench.cases import CASES, CPU_CASES, DTYPES, Case
from octavo.bench.measure import Machine, measure, usable_cpus
from octavo.bench.providers import PROVIDERS, Provider
from octavo.bench.report import Row, append_csv, check_csv, lengths, tables
from octavo.bench.work import is_decode
from octavo.cli.errors import CommandError, print_error

WIDE = 190
"""Columns of a table that no terminal limits."""

app = typer.Typer(help="Measure Octavo beside others.", add_completion=False)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def attention(
    case: Annotated[
        list[str] | None,
        typer.Option(help="A case to measure; may be given again. None: those for a CPU.", show_default=False),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="Who computes it; may be given again. None: all that are installed.", show_default=False),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Instead of the cases' own: {', '.join(DTYPES)}.")] = None,
    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads, such as 1,2. None: torch's own number.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed, in turns.")] = 9,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this PNG file.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print cases and providers, and end.")] = False,
) -> int:
    """Time attention on a CPU, after checking that every output is right.

    The exit code is 1 if an output was wrong or a provider failed.
    """
    cases = [_case(name, dtype) for name in case or CPU_CASES]
    providers = [_provider(name) for name in dict.fromkeys(provider or ())]
    counts = _threads(threads)
    if show_list:
        _print_list(as_json)
        return 0
    _check_files(csv, plot)
    progress = Console(stderr=True, highlight=False)
    if not providers:
        providers = [each for each in PROVIDERS if each.missing() is None]
        for each in PROVIDERS:
            if each not in providers:
                progress.print(Text(f"{each.name} is left out: {each.missing()}"), soft_wrap=True)
    rows: list[Row] = []
    with ExitStack() as stack:
        memory = stack.enter_context(closing(LinearRead())) if any(map(is_decode, cases)) else None
        machine = Machine.here(octavo.__version__)
        for i, what in enumerate(cases):
            progress.print(Text(f"[{i + 1}/{len(cases)}] {what.name}"), soft_wrap=True)
            new = measure(what, providers, machine, threads=counts, rounds=rounds, memory=memory)
            if csv is not None:
                append_csv(csv, new)
            rows += new
    if plot is not None:
        drawing.plot(rows, plot)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False))
    else:
        _print_tables(tables(rows))
    bad = [row for row in rows if row.outcome in ("wrong", "failed")]
    for row in bad:
        print_error(f"{row.provider} on {row.case} with {row.threads} threads {row.outcome}: {row.reason}")
    return int(bool(bad))


def _case(name: str, dtype: str | None) -> Case:
    known = {each.name: each for each in CASES}
    if name not in known:
        raise CommandError(f"unknown case {name!r}; known cases: {', '.join(known)}")
    if dtype is None:
        return known[name]
    if dtype not in DTYPES:
        raise CommandError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
    return replace(known[name], dtype=DTYPES[dtype], cache_dtype=None)


def _provider(name: str) -> Provider:
    known = {each.name: each for each in PROVIDERS}
    if name not in known:
        raise CommandError(f"unknown provider {name!r}; known providers: {', '.join(known)}")
    return known[name]


def _threads(text: str | None) -> list[int]:
    """Numbers of threads from text such as 1,2."""
    if text is None:
        return [torch.get_num_threads()]
    most = usable_cpus()
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= count <= most for count in counts):
        raise CommandError(
            f"--threads takes numbers from 1 to {most} (the CPUs that may be used here), such as 1,{most}, got {text!r}"
        )
    return list(dict.fromkeys(counts))


def _check_files(csv: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written before minutes are spent."""
    if csv is not None:
        try:
            check_csv(csv)
        except (ValueError, OSError) as error:
            raise CommandError(f"--csv: {error}") from error
    if plot is not None:
        reason = drawing.missing()
        if reason is not None:
            raise CommandError(f"--plot: {reason}")
        if plot.suffix.lower() != ".png" or not plot.absolute().parent.is_dir():
            raise CommandError(f"--plot takes the name of a .png file in a folder that exists, got {plot}")


def _print_list(as_json: bool) -> None:
    cases = {each.name: lengths(each) for each in CASES}
    providers = {each.name: each.missing() for each in PROVIDERS}
    if as_json:
        print(json.dumps({"cases": cases, "default_cases": CPU_CASES, "providers": providers}, indent=2))
        return
    names = Table("case", "new tokens of keys", "measured by default", title="Cases", title_justify="left")
    for name, words in cases.items():
        names.add_row(name, words, "yes" if name in CPU_CASES else "")
    who = Table("provider", "state", title="Providers", title_justify="left")
    for name, reason in providers.items():
        who.add_row(name, Text(reason or "available"))
    _print_tables([names, who])


def _print_tables(made: list[Table]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for table in made:
        console.print(table)
