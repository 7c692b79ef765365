"""A tile of keys and values for prefill: widened to float32 once, keys as columns, scaled where rows have scales."""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import find_rows
from octavo.kernels.cpu.simd import (
    load_int,
    load_one,
    load_splat_wide,
    load_wide,
    mul,
    store,
    store_one,
    store_transposed,
)
from octavo.kernels.cpu.simd_base import WIDE
from octavo.kernels.cpu.stored import INLINED, OPTIONS, load, size_of

KEYS = 128
"""Keys of a tile."""

STEP = WIDE * 4
"""Bytes of a vector."""

PANEL = 2 * WIDE
"""Keys, or numbers of a value, that lie side by side: what six rows meet at once."""

SPAN = PANEL * 4
"""Bytes of a row of a panel."""


@njit(**INLINED)
def load_keys(rows, start, end, offset, head_dim, k, _depth, tag):
    """Rows start to end - 1 of a tile as columns of k [KEYS / PANEL][head_dim][PANEL] float32.

    rows: where their addresses stand, to which the head's offset is added.
    """
    for t in range(start // 8 * 8, end, 8):
        # Eight rows make eight columns; at the edges a neighbour stands in for a row that must not be read.
        a = load_int(rows + max(t, start) * 8) + offset
        b = load_int(rows + min(max(t + 1, start), end - 1) * 8) + offset
        c = load_int(rows + min(max(t + 2, start), end - 1) * 8) + offset
        d = load_int(rows + min(max(t + 3, start), end - 1) * 8) + offset
        e = load_int(rows + min(max(t + 4, start), end - 1) * 8) + offset
        f = load_int(rows + min(max(t + 5, start), end - 1) * 8) + offset
        g = load_int(rows + min(max(t + 6, start), end - 1) * 8) + offset
        h = load_int(rows + min(max(t + 7, start), end - 1) * 8) + offset
        target = k + t // PANEL * head_dim * SPAN + t % PANEL * 4
        for i in range(0, head_dim, 8):
            o = i * size_of(tag)
            store_transposed(
                load(a + o, tag),
                load(b + o, tag),
                load(c + o, tag),
                load(d + o, tag),
                load(e + o, tag),
                load(f + o, tag),
                load(g + o, tag),
                load(h + o, tag),
                target + i * SPAN,
                np.int64(SPAN),
            )


@njit(**INLINED)
def load_values(rows, start, end, offset, value_dim, v, tag):
    """Rows start to end - 1 of a tile as rows of v [width / PANEL][KEYS][PANEL] float32. The width is value_dim up to
    the next multiple of PANEL; the rest is left as it is."""
    for t in range(start, end):
        source = load_int(rows + t * 8) + offset
        target = v + t * SPAN
        for i in range(0, value_dim, 8):
            store(target + i // PANEL * KEYS * SPAN + i % PANEL * 4, load(source + i * size_of(tag), tag))


@njit(**OPTIONS)
def find_scales(table, block_size, first, count, base, strides, offset, found, scales):
    """Scales of keys first, first + 1, ... of one head: scales [count] float32.

    Args:
        base, strides: of the scales, in bytes; offset: the head's.
        found: room for [count] int64.
    """
    find_rows(table, block_size, first, count, base, strides, found)
    for t in range(count):
        store_one(scales + t * 4, load_one(load_int(found + t * 8) + offset))


@njit(**OPTIONS)
def scale_keys(k, start, end, head_dim, scales):
    """Columns start to end - 1 of k (see `load_keys`) times their scales [KEYS]; a few more at the edges too."""
    for c in range(start // WIDE * WIDE, end, WIDE):
        factor = load_wide(scales + c * 4)
        column = k + c // PANEL * head_dim * SPAN + c % PANEL * 4
        for row in range(column, column + head_dim * SPAN, SPAN):
            store(row, mul(factor, load_wide(row)))


@njit(**OPTIONS)
def scale_values(v, start, end, width, scales):
    """Rows start to end - 1 of v (see `load_values`; width numbers, a multiple of PANEL) times their scales [KEYS]."""
    for t in range(start, end):
        factor = load_splat_wide(scales + t * 4)
        for row in range(v + t * SPAN, v + t * SPAN + width * KEYS * 4, KEYS * SPAN):
            store(row, mul(factor, load_wide(row)))
            store(row + STEP, mul(factor, load_wide(row + STEP)))
