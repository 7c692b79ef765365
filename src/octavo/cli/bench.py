"""`octavo bench`: Octavo beside others, on this machine."""

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
from octavo.bench import flash_infer
from octavo.bench import plot as drawing
from octavo.bench.bandwidth import LinearRead
from octavo.bench.cases import CASES, CPU_CASES, DTYPES, GPU_CASES, Case
from octavo.bench.gpu import Ceilings
from octavo.bench.installed import version
from octavo.bench.measure import Machine, measure
from octavo.bench.measure_gpu import measure_on_gpu
from octavo.bench.plans import PLAN_HEADER, PlanRow, measure_plans
from octavo.bench.providers import PROVIDERS, Provider
from octavo.bench.report import HEADER, Row, append_csv, check_csv, lengths, tables
from octavo.bench.work import is_decode
from octavo.cli.checks import check_early
from octavo.cli.errors import CommandError, print_error
from octavo.cpus import usable_cpus
from octavo.engine.device import best_device

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
        typer.Option(help="A case to measure; may be given again. None: those for the device.", show_default=False),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="Who computes it; may be given again. None: all that are installed.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda. None: the GPU if there is one that can be served.", show_default=False),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"Instead of the cases' own: {', '.join(DTYPES)}.")] = None,
    threads: Annotated[
        str | None, typer.Option(help="Numbers of threads of a CPU, such as 1,2. None: torch's own number.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed, in turns.")] = 9,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this PNG file.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print cases and providers, and end.")] = False,
) -> int:
    """Time attention, after checking that every output is right.

    The exit code is 1 if an output was wrong or a provider failed.
    """
    if show_list:
        _print_list(as_json)
        return 0
    where = _device(device)
    cases = [_case(name, dtype) for name in case or (CPU_CASES if where.type == "cpu" else GPU_CASES)]
    providers = [_provider(name) for name in dict.fromkeys(provider or ())]
    if threads is not None and where.type != "cpu":
        raise CommandError(f"--threads is for a CPU, the device is {where}; give --device cpu or leave it out")
    counts = _threads(threads)
    _check_files(csv, HEADER, plot)
    progress = Console(stderr=True, highlight=False)
    if not providers:
        possible = [each for each in PROVIDERS if where.type in each.devices]
        providers = [each for each in possible if each.missing() is None]
        for each in possible:
            if each not in providers:
                progress.print(Text(f"{each.name} is left out: {each.missing()}"), soft_wrap=True)
    rows: list[Row] = []
    with ExitStack() as stack:
        on_cpu = where.type == "cpu"
        memory = stack.enter_context(closing(LinearRead())) if on_cpu and any(map(is_decode, cases)) else None
        ceilings = None if on_cpu else Ceilings(where)
        machine = Machine.here(octavo.__version__, where if where.type == "cuda" else None)
        for i, what in enumerate(cases):
            progress.print(Text(f"[{i + 1}/{len(cases)}] {what.name}"), soft_wrap=True)
            if ceilings is None:
                new = measure(what, providers, machine, threads=counts, rounds=rounds, memory=memory)
            else:
                new = measure_on_gpu(what, providers, machine, where, ceilings, rounds=rounds)
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
        how = "" if row.threads is None else f" with {row.threads} threads"
        print_error(f"{row.provider} on {row.case}{how} {row.outcome}: {row.reason}")
    return int(bool(bad))


@app.command()
def plan(
    requests: Annotated[str, typer.Option(help="Numbers of requests, such as 32,256.")] = "32,256,1024",
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda. None: the GPU if there is one that can be served.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed, in turns.")] = 9,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")] = False,
) -> int:
    """Time the building of a decode step's plan, and on a GPU the call of one layer.

    FlashInfer is measured too where it is installed and the device is a GPU.
    """
    where, counts = _device(device), _requests(requests)
    _check_files(csv, PLAN_HEADER, None)
    flashinfer = version("flashinfer-python") if where.type == "cuda" and flash_infer.missing() is None else None
    rows = measure_plans(
        counts,
        where,
        Machine.here(octavo.__version__, where if where.type == "cuda" else None),
        flashinfer,
        rounds=rounds,
    )
    if csv is not None:
        append_csv(csv, rows, PLAN_HEADER)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False))
    else:
        _print_tables([_plan_table(rows)])
    return 0


def _device(name: str | None) -> torch.device:
    """The device of that name, if it can be measured; None: the best one."""
    check_early("auto", "auto", name)
    return best_device() if name is None else torch.device(name)


def _requests(text: str) -> list[int]:
    """Numbers of requests from text such as 32,256."""
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(counts):
        raise CommandError(f"--requests takes numbers from 1, such as 32,256, got {text!r}")
    return list(dict.fromkeys(counts))


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


def _check_files(csv: Path | None, columns: tuple[str, ...], plot: Path | None) -> None:
    """Refuse files that cannot be written before minutes are spent."""
    if csv is not None:
        try:
            check_csv(csv, columns)
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
        print(
            json.dumps(
                {"cases": cases, "default_cases": CPU_CASES, "gpu_cases": GPU_CASES, "providers": providers}, indent=2
            )
        )
        return
    names = Table("case", "new tokens of keys", "measured by default on", title="Cases", title_justify="left")
    for name, words in cases.items():
        defaults = {"a CPU": CPU_CASES, "a GPU": GPU_CASES}
        names.add_row(name, words, ", ".join(device for device, some in defaults.items() if name in some))
    who = Table("provider", "state", title="Providers", title_justify="left")
    for name, reason in providers.items():
        who.add_row(name, Text(reason or "available"))
    _print_tables([names, who])


def _plan_table(rows: list[PlanRow]) -> Table:
    table = Table(title=f"A decode step on {rows[0].device}", title_justify="left")
    for column in ("requests", "provider", "plan, host us", "plan, device us", "one layer, host us"):
        table.add_column(column, justify="left" if column == "provider" else "right")
    for row in rows:
        figures = (row.plan_host_us, row.plan_device_us, row.run_host_us)
        cells = ["" if figure is None else f"{figure:,.1f}" for figure in figures]
        table.add_row(str(row.requests), row.provider, *cells)
    return table


def _print_tables(made: list[Table]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for table in made:
        console.print(table)
