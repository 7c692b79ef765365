"""`octavo calibrate`: find the static scales that a cache format needs, from a text."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

import octavo
from octavo.cli.checks import check_early
from octavo.cli.errors import CommandError
from octavo.cli.texts import context_of, load_model, read_text, token_bar
from octavo.formats import EIGHT_BIT_FORMATS, KVFormat
from octavo.scales import Provenance

STATIC = tuple(
    name
    for name in EIGHT_BIT_FORMATS
    if KVFormat.parse(name, torch.float32).is_fp8 or KVFormat.parse(name, torch.float32).v_scaled_by_channel
)
"""Formats with static scales."""


def calibrate(
    model: Annotated[str, typer.Argument(help="A folder, GGUF file or hub name, or smollm2, gemma3-270m.")],
    text: Annotated[
        Path | None, typer.Option(help="A file of text like what will be served; none: a short one that ships.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the scales go.")] = Path("scales.safetensors"),
    kv_format: Annotated[str, typer.Option(help=f"What the scales are for: {', '.join(STATIC)}.")] = "int8_kv",
    percentile: Annotated[
        float, typer.Option(min=50, max=100, help="Of |V| in each channel that a scale reaches; 100: the largest.")
    ] = 100.0,
    smooth_k: Annotated[
        bool, typer.Option("--smooth-k", help="int8 formats: store K less its mean, for models with outlier channels.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; none: 2048, or what the model allows.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Read only so many tokens of the text.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float16, bfloat16, float32.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where the model runs, cpu or cuda; none: a GPU if there is one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Find the static scales of a cache format and keep them in a file.

    The text runs through the model with pages of its own dtype; give the file to --kv-scales.
    """
    check_early(dtype, "auto", device)
    try:
        wanted = KVFormat.parse(kv_format, torch.float32).name
    except ValueError as error:
        raise CommandError(str(error)) from error
    if wanted not in STATIC and not smooth_k:
        raise CommandError(f"{wanted} needs no scales; --kv-format is one of {', '.join(STATIC)}")
    if not out.absolute().parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.absolute().parent}")
    source = read_text(text)
    console = Console(stderr=True, highlight=False)
    loaded = load_model(console, model, dtype, device)
    from octavo.engine.scoring import cut, record, tokenise

    try:
        opening, tokens = tokenise(loaded.tokenizer, source.text)
        windows = cut(opening, tokens[:max_tokens], context_of(loaded, context))
        with token_bar(console, "calibrating", windows.num_tokens) as progress:
            recorder, runner = record(loaded.model, windows, progress)
        provenance = Provenance(int(recorder.num_tokens), source.sha256, percentile, octavo.__version__)
        made_for = replace(runner.kv_model, name=model)
        format = KVFormat.parse(wanted, loaded.model.dtype)
        recorder.scales(format, made_for, provenance, smooth_k=smooth_k).save(out)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if as_json:
        facts = {"file": str(out), "format": wanted, "model": model, "layers": len(made_for.layers)}
        print(json.dumps({**facts, **asdict(provenance)}, indent=2))
        return 0
    console.print(
        Text(f"{out}: {wanted} scales of {len(made_for.layers)} layers, from {provenance.num_tokens} tokens"),
        soft_wrap=True,
    )
    use = f"octavo generate --model {model} --kv-format {wanted} --kv-scales {out} PROMPT"
    console.print(Text(f"use them: {use}"), soft_wrap=True)
    return 0
