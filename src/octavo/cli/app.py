"""The commands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

import octavo
from octavo.cli import bench
from octavo.cli.calibrate import calibrate
from octavo.cli.doctor import doctor
from octavo.cli.evaluate import evaluate
from octavo.cli.generate import generate
from octavo.cli.warmup import warmup

app = typer.Typer(
    name="octavo",
    help="Paged attention for LLM serving.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(doctor)
app.command()(warmup)
app.command()(calibrate)
app.command("eval")(evaluate)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"octavo {octavo.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
