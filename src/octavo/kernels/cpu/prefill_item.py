"""An item of prefill, one KV head's rows of some tokens: what they see, where they stand, what they will read next."""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.simd import prefetch
from octavo.kernels.cpu.stored import OPTIONS


@njit(**OPTIONS)
def ask(row, num_bytes):
    """Bring a row nearer while other work goes on."""
    for line in range(0, num_bytes, 64):
        prefetch(row + line)


@njit(**OPTIONS)
def find_bounds(call, item, bounds):
    """The keys that each row of an item sees in its split, [rows and more][2]; none past the last row. Returns the
    ends of what they see together."""
    seq, split, row_start, row_end, _ = item
    rows, group = call.rows, call.shape.group
    start, stop = np.int64(rows.kv_splits[seq, split]), np.int64(rows.kv_splits[seq, split + 1])
    first, last = stop, start
    bounds[:] = 0
    for row in range(row_start, row_end):
        lo, hi = max(start, np.int64(rows.lo[row])), min(stop, np.int64(rows.hi[row]))
        if lo < hi:
            first, last = min(first, lo), max(last, hi)
            for r in range((row - row_start) * group, (row - row_start + 1) * group):
                bounds[r, 0], bounds[r, 1] = lo, hi
    return start, first, last


@njit(**OPTIONS)
def find_terms(call, item, terms):
    """Distance from the item's first row, and slope, of each row: terms [rows][2] float32."""
    _, _, row_start, row_end, head = item
    group, positions = call.shape.group, call.rows.positions
    for r in range((row_end - row_start) * group):
        terms[r, 0] = positions[row_start + r // group] - positions[row_start]
        terms[r, 1] = call.slopes[head * group + r % group]
