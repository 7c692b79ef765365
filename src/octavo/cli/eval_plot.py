"""The picture of `octavo eval`: bytes a token against KL divergence."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.evaluate import FormatScore


def plot_scores(scores: Sequence[FormatScore], title: str, path: Path) -> None:
    """Draw the scores into a PNG file: mean KL as a point, the largest above it.

    Formats whose KL is 0 (the reference, first of the scores) have no place on a logarithmic axis; the reference's
    bytes are a line.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    # A figure of its own: pyplot would keep it, and choose a window system.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    reference = scores[0]
    axes.axvline(reference.bytes_per_token, color="grey", linestyle=":", label=f"{reference.kv_format} (reference)")
    for i, score in enumerate(score for score in scores[1:] if score.mean_kl > 0):
        axes.plot([score.bytes_per_token] * 2, [score.mean_kl, score.max_kl], color=f"C{i}", alpha=0.35)
        axes.plot(score.bytes_per_token, score.max_kl, "_", color=f"C{i}", alpha=0.6)
        label = f"{score.kv_format}: perplexity {100 * score.perplexity_change:+.2f} %"
        axes.plot(score.bytes_per_token, score.mean_kl, "o", color=f"C{i}", label=label)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("cache bytes a token, all layers")
    axes.set_ylabel("KL divergence to the reference, nats: mean (point), largest (line)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(f"Cache formats: {title}, {reference.num_scored} tokens")
    figure.savefig(path, dpi=150, format="png")
