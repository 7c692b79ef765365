"""`octavo eval`: what each cache format costs a model, in bytes and in accuracy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import octavo
from octavo.bench import plot as drawing
from octavo.cli.checks import check_early
from octavo.cli.errors import CommandError
from octavo.cli.eval_plot import plot_scores
from octavo.cli.texts import Source, context_of, load_model, read_text, token_bar
from octavo.formats import EIGHT_BIT_FORMATS, FLOAT_FORMATS, KVFormat
from octavo.scales import KVScales, Provenance

if TYPE_CHECKING:
    from octavo.engine.evaluate import FormatScore
    from octavo.engine.models import LoadedModel
    from octavo.engine.scoring import Windows

WIDE = 160
"""Columns of a table that no terminal limits."""

CALIBRATION_SHARE = 4
"""One token of so many, from the front of the text, calibrates what needs it and is not scored."""


def evaluate(
    model: Annotated[str, typer.Argument(help="A folder, GGUF file or hub name, or smollm2, gemma3-270m.")],
    text: Annotated[Path | None, typer.Option(help="A file of text; none: a short one that ships.")] = None,
    kv_format: Annotated[
        list[str] | None,
        typer.Option(help="A format to score; may be given again. None: all that are smaller.", show_default=False),
    ] = None,
    kv_scales: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of `octavo calibrate`; may be given again, one a format. None: int8_kv is calibrated on the "
            "text's first quarter, fp8 has scale 1.",
            show_default=False,
        ),
    ] = None,
    smooth_k: Annotated[
        bool,
        typer.Option("--smooth-k", help="int8 formats without a file: K less its mean over the text's first quarter."),
    ] = False,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence; none: 2048, or what the model allows.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Read only so many tokens of the text.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    layers: Annotated[
        str | None, typer.Option(help="Also the KL with one layer alone in this format, layer by layer; takes long.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float16, bfloat16, float32.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where the model runs, cpu or cuda; none: a GPU if there is one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw bytes against KL into this PNG file.")] = None,
) -> int:
    """Score cache formats side by side: bytes, perplexity, KL divergence, top-1 agreement.

    The text is read token by token against a model whose cache really stores the format.
    """
    check_early(dtype, "auto", device)
    asked = [_parse(name).name for name in kv_format or ()]
    one_layer = None if layers is None else _parse(layers).name
    if smooth_k and asked and not any(_parse(name).k_scaled_by_row for name in asked):
        raise CommandError(f"--smooth-k is for the int8 formats, --kv-format names none of them: {', '.join(asked)}")
    _check_plot(plot)
    given = _load_scales(kv_scales or ())
    source = read_text(text)
    console = Console(stderr=True, highlight=False)
    loaded = load_model(console, model, dtype, device)
    from octavo.engine.evaluate import evaluate as score
    from octavo.engine.evaluate import evaluate_layers
    from octavo.engine.scoring import cut, tokenise

    names = list(dict.fromkeys(asked or _smaller(loaded.model.dtype)))
    try:
        opening, tokens = tokenise(loaded.tokenizer, source.text)
        tokens = tokens[:max_tokens]
        size = context_of(loaded, context)
        wanted = dict.fromkeys([*names, *([one_layer] if one_layer else [])])
        missing = [n for n in wanted if n not in given and _is_calibrated(n, smooth_k)]
        num_calibration = len(tokens) // CALIBRATION_SHARE if missing else 0
        scales, origins = dict(given), dict.fromkeys(given, "from a file")
        if missing:
            scales |= _calibrated(
                loaded, cut(opening, tokens[:num_calibration], size), missing, source, console, smooth_k
            )
            origins |= dict.fromkeys(missing, "the text's first quarter")
        windows = cut(opening, tokens[num_calibration:], size)
        with token_bar(console, "evaluating", windows.num_tokens * (1 + len(names))) as progress:
            scores = score(
                loaded.model, windows, names, scales=scales, origins=origins, block_size=block_size, progress=progress
            )
        by_layer = None
        if one_layer is not None:
            chosen = scales.get(one_layer)
            by_layer = evaluate_layers(loaded.model, windows, one_layer, scales=chosen, block_size=block_size)
    except ValueError as error:
        raise CommandError(str(error)) from error
    facts = {
        "model": model,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "octavo": octavo.__version__,
        "text": source.name,
        "text_sha256": source.sha256,
        "num_calibration_tokens": num_calibration,
        "num_evaluated_tokens": windows.num_tokens,
        "context": size,
        "block_size": block_size,
    }
    if plot is not None:
        plot_scores(scores, f"{model} ({facts['dtype']}, {facts['device']})", plot)
    if as_json:
        per_layer = None if by_layer is None else {"kv_format": one_layer, "mean_kl": by_layer}
        document = {**facts, "formats": [asdict(score) for score in scores], "layers": per_layer}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        _print(facts, scores, by_layer, one_layer)
    return 0


def _calibrated(
    loaded: LoadedModel, part: Windows, names: Sequence[str], source: Source, console: Console, smooth_k: bool
) -> dict[str, KVScales]:
    """Scales of these formats from a part of the text."""
    from octavo.engine.scoring import record

    with token_bar(console, "calibrating", part.num_tokens) as progress:
        recorder, runner = record(loaded.model, part, progress)
    provenance = Provenance(int(recorder.num_tokens), source.sha256, 100.0, octavo.__version__)
    formats = [KVFormat.parse(name, loaded.model.dtype) for name in names]
    return {x.name: recorder.scales(x, runner.kv_model, provenance, smooth_k=smooth_k) for x in formats}


def _print(
    facts: Mapping[str, Any], scores: Sequence[FormatScore], by_layer: Sequence[float] | None, one_layer: str | None
) -> None:
    """Tables on standard output, and what was read."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    out.print(score_table(scores, f"{facts['model']} ({facts['dtype']}, {facts['device']})", facts["block_size"]))
    count = facts["num_calibration_tokens"]
    used = f"the first {count} tokens calibrated, the next " if count else ""
    read = f"{used}{facts['num_evaluated_tokens']} evaluated in sequences of up to {facts['context']}"
    out.print(Text(f"text: {facts['text']}; {read}"), soft_wrap=True)
    if by_layer is not None:
        out.print(f"\nMean KL with one layer alone in {one_layer}:")
        out.print(_layer_table(by_layer))


def score_table(scores: Sequence[FormatScore], title: str, block_size: int) -> Table:
    """The scores for people; the first row is the reference."""
    table = Table(title=title, title_justify="left")
    for column in (
        "cache",
        "bytes a token",
        f"pages of {block_size} per GiB",
        "perplexity",
        "change %",
        "mean KL",
        "max KL",
        "top-1 %",
        "longest",
        "scales",
    ):
        table.add_column(column, justify="left" if column in ("cache", "scales") else "right")
    for i, score in enumerate(scores):
        differs = i > 0
        table.add_row(
            Text(score.kv_format),
            f"{score.bytes_per_token:,.0f}",
            f"{score.pages_per_gib:,}",
            f"{score.perplexity:.4f}",
            f"{100 * score.perplexity_change:+.3f}" if differs else "",
            f"{score.mean_kl:.2e}" if differs else "",
            f"{score.max_kl:.2e}" if differs else "",
            f"{100 * score.top1_agreement:.2f}" if differs else "",
            str(score.longest_context),
            Text(score.scales or ""),
        )
    return table


def _layer_table(by_layer: Sequence[float]) -> Table:
    table = Table()
    table.add_column("layer", justify="right")
    table.add_column("mean KL", justify="right")
    for i, kl in enumerate(by_layer):
        table.add_row(str(i), f"{kl:.2e}")
    return table


def _parse(name: str) -> KVFormat:
    try:
        return KVFormat.parse(name, torch.float32)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _is_calibrated(name: str, smooth_k: bool) -> bool:
    """Whether the format cannot do without static scales, or is to have an offset of K."""
    format = _parse(name)
    return format.v_scaled_by_channel or (smooth_k and format.k_scaled_by_row)


def _smaller(dtype: torch.dtype) -> list[str]:
    """Formats that take fewer bytes than pages of that dtype."""
    return [*(name for name, other in FLOAT_FORMATS.items() if other.itemsize < dtype.itemsize), *EIGHT_BIT_FORMATS]


def _load_scales(paths: Sequence[Path]) -> dict[str, KVScales]:
    """By the format that each file is for."""
    found: dict[str, KVScales] = {}
    for path in paths:
        try:
            scales = KVScales.load(path)
        except ValueError as error:
            raise CommandError(str(error)) from error
        if scales.format in found:
            raise CommandError(f"two files of --kv-scales are for {scales.format}; give one of them")
        found[scales.format] = scales
    return found


def _check_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be drawn before minutes are spent."""
    if plot is None:
        return
    reason = drawing.missing()
    if reason is not None:
        raise CommandError(f"--plot: {reason}")
    if plot.suffix.lower() != ".png" or not plot.absolute().parent.is_dir():
        raise CommandError(f"--plot takes the name of a .png file in a folder that exists, got {plot}")
