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
from octavo.kernels.cpu.stored import OPTIONS, load, size_of

KEYS = 64
"""Keys of a tile."""

LINE = KEYS * 4
"""Bytes of a row of scores, or of K's columns."""

STEP = WIDE * 4
"""Bytes of a vector."""


@njit(**OPTIONS)
def load_keys(rows, start, end, offset, head_dim, k, tag):
    """Rows start to end - 1 of a tile as columns of k [head_dim][KEYS] float32.

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
                k + i * LINE + t * 4,
                np.int64(LINE),
            )


@njit(**OPTIONS)
def load_values(rows, start, end, offset, value_dim, v, line, tag):
    """Rows start to end - 1 of a tile as rows of v [KEYS][line bytes] float32."""
    for t in range(start, end):
        source = load_int(rows + t * 8) + offset
        target = v + t * line
        for i in range(0, value_dim, 8):
            store(target + i * 4, load(source + i * size_of(tag), tag))


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
    """Columns start to end - 1 of k [head_dim][KEYS] times their scales [KEYS]; a few more at the edges too."""
    for c in range(start // WIDE * WIDE * 4, end * 4, STEP):
        factor = load_wide(scales + c)
        for row in range(k + c, k + c + head_dim * LINE, LINE):
            store(row, mul(factor, load_wide(row)))


@njit(**OPTIONS)
def scale_values(v, start, end, line, scales):
    """Rows start to end - 1 of v [KEYS][line bytes] times their scales [KEYS]."""
    for t in range(start, end):
        factor = load_splat_wide(scales + t * 4)
        for row in range(v + t * line, v + (t + 1) * line, STEP):
            store(row, mul(factor, load_wide(row)))
