"""A picture of a measurement: grouped bars, decode beside the rest."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.report import Kind, Row

Panels = dict[Kind, tuple[str, str, Callable[[Row], float | None]]]
"""Title, label of the axis, and what a bar shows."""

CPU_PANELS: Panels = {
    "decode": ("Decode", "share of linear read bandwidth", lambda row: row.read_share),
    "prefill": ("Prefill", "useful GFLOP/s", lambda row: row.gflop_per_s),
}

GPU_PANELS: Panels = {
    "decode": ("Decode", "share of copy bandwidth", lambda row: row.copy_share),
    "prefill": ("Prefill", "useful operations, share of a bf16 matrix product's rate", lambda row: row.matmul_share),
}


def missing() -> str | None:
    """Why nothing can be drawn; None: it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "drawing needs matplotlib; install it with: pip install 'octavo[plot]'"
    return None


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the timed rows of one machine into a PNG file: two panels of cases, a bar for each provider (on a CPU: and
    number of threads).

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    # A figure of its own: pyplot would keep it, and choose a window system.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(14, 6.5), layout="constrained")
    timed = [row for row in rows if row.outcome == "timed"]
    series = _series(timed)
    panels = GPU_PANELS if timed and timed[0].threads is None else CPU_PANELS
    for axes, (kind, (title, label, value)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        axes.set_title(title)
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        _bars(axes, series, [(row, bar) for row in timed if row.kind == kind and (bar := value(row)) is not None])
    legend = {
        label: bars for axes in figure.axes for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if legend:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(6, len(legend)))
        figure.suptitle(f"Attention on {timed[0].device}: Octavo {timed[0].octavo}, torch {timed[0].torch}")
    figure.savefig(path, dpi=150, format="png")


def _series(rows: Sequence[Row]) -> dict[tuple[str, int | None], dict[str, Any]]:
    """(provider, threads) of the bars of a case, in order, with their looks: a colour a provider, paler with fewer
    threads."""
    providers = list(dict.fromkeys(row.provider for row in rows))
    threads = sorted({row.threads for row in rows}, key=lambda count: count or 0)
    return {
        (provider, count): {"color": f"C{i}", "alpha": (1 + j) / len(threads)}
        for i, provider in enumerate(providers)
        for j, count in enumerate(threads)
    }


def _bars(
    axes: Any, series: Mapping[tuple[str, int | None], dict[str, Any]], bars: Sequence[tuple[Row, float]]
) -> None:
    """A group of bars for each case."""
    cases = list(dict.fromkeys((row.case, row.dtype) for row, _ in bars))
    width = 0.8 / max(1, len(series))
    for i, (key, looks) in enumerate(series.items()):
        mine = [(row, bar) for row, bar in bars if (row.provider, row.threads) == key]
        left = [cases.index((row.case, row.dtype)) + (i - (len(series) - 1) / 2) * width for row, _ in mine]
        provider, threads = key
        label = provider if threads is None else f"{provider}, {threads} {'thread' if threads == 1 else 'threads'}"
        if mine:
            axes.bar(left, [bar for _, bar in mine], width, label=label, **looks)
    axes.set_xticks(range(len(cases)), [f"{case}\n{dtype}" for case, dtype in cases], rotation=30, ha="right")
