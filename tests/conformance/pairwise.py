"""A covering array: few rows in which every pair of values of every two factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering_array(factors: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy rows, each the best of a few random completions of a pair that is still uncovered."""
    draw = random.Random(seed)
    names = sorted(factors)
    open_pairs: set[Pair] = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows: list[dict[str, Any]] = []
    while open_pairs:
        first = min(open_pairs)
        best: dict[str, int] = {}
        most: set[Pair] = set()
        for _ in range(40):
            row = {name: draw.randrange(len(factors[name])) for name in names} | dict(first)
            covered = open_pairs.intersection(itertools.combinations(sorted(row.items()), 2))
            if len(covered) > len(most):
                best, most = row, covered
        open_pairs -= most
        rows.append({name: factors[name][i] for name, i in best.items()})
    return rows
