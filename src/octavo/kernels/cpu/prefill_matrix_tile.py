"""What prefill on matrix units multiplies, as the units read it: a tile of keys and values, and queries."""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import load_query, query_factor
from octavo.kernels.cpu.prefill_item import ask
from octavo.kernels.cpu.simd import load_bf16, load_f32, load_int, mul, splat, store, store_one, store_transposed
from octavo.kernels.cpu.simd_matrix import BLOCK, TILE_BYTES, store_upper, words_of
from octavo.kernels.cpu.stored import INLINED, OPTIONS, load, size_of

KEYS = 192
"""Keys of a tile of keys and values, a multiple of BLOCK."""

LINE = BLOCK * 4
"""Bytes of one key's scores, of a block of rows; of two keys' weights; of one number of the rows' outputs."""

SQUARE = BLOCK * TILE_BYTES
"""Bytes of a square of K or of turned V, [BLOCK][BLOCK] bfloat16: they lie one after another, as they are read."""


@njit(**OPTIONS)
def turn(source, line, target, target_line):
    """Eight rows of eight 32-bit numbers or words, `line` bytes apart, as columns."""
    store_transposed(
        load_f32(source),
        load_f32(source + line),
        load_f32(source + 2 * line),
        load_f32(source + 3 * line),
        load_f32(source + 4 * line),
        load_f32(source + 5 * line),
        load_f32(source + 6 * line),
        load_f32(source + 7 * line),
        target,
        target_line,
    )


@njit(**OPTIONS)
def load_keys(rows, start, end, offset, head_dim, k, depth, tag):
    """Rows start to end - 1 of a tile as k [KEYS / BLOCK][depth / BLOCK] squares of (key, number).

    rows: where their addresses stand, to which the head's offset is added.
    """
    for t in range(start, end):
        source, target = load_int(rows + t * 8) + offset, k + t // BLOCK * BLOCK * depth * 2 + t % BLOCK * TILE_BYTES
        for i in range(0, head_dim, 8):
            store_upper(target + i // BLOCK * SQUARE + i % BLOCK * 2, load(source + i * size_of(tag), tag))


@njit(**OPTIONS)
def load_values(rows, start, end, offset, value_dim, v, tag):
    """Rows start to end - 1 of a tile, multiples of 16, as v [width / BLOCK][KEYS / BLOCK] squares of (number, key)."""
    for t in range(start, end, 16):
        # Sixteen rows make words of two, which make eight columns.
        row = rows + t * 8
        a, a_ = load_int(row) + offset, load_int(row + 8) + offset
        b, b_ = load_int(row + 16) + offset, load_int(row + 24) + offset
        c, c_ = load_int(row + 32) + offset, load_int(row + 40) + offset
        d, d_ = load_int(row + 48) + offset, load_int(row + 56) + offset
        e, e_ = load_int(row + 64) + offset, load_int(row + 72) + offset
        f, f_ = load_int(row + 80) + offset, load_int(row + 88) + offset
        g, g_ = load_int(row + 96) + offset, load_int(row + 104) + offset
        h, h_ = load_int(row + 112) + offset, load_int(row + 120) + offset
        column = v + t // BLOCK * SQUARE + t % BLOCK * 2
        for i in range(0, value_dim, 8):
            o = i * size_of(tag)
            store_transposed(
                words_of(load(a + o, tag), load(a_ + o, tag)),
                words_of(load(b + o, tag), load(b_ + o, tag)),
                words_of(load(c + o, tag), load(c_ + o, tag)),
                words_of(load(d + o, tag), load(d_ + o, tag)),
                words_of(load(e + o, tag), load(e_ + o, tag)),
                words_of(load(f + o, tag), load(f_ + o, tag)),
                words_of(load(g + o, tag), load(g_ + o, tag)),
                words_of(load(h + o, tag), load(h_ + o, tag)),
                column + i // BLOCK * (KEYS // BLOCK) * SQUARE + i % BLOCK * TILE_BYTES,
                np.int64(TILE_BYTES),
            )


@njit(**INLINED)
def _load_query(call, row, head, target, room, tag):
    """One head's query to `target` [head_dim] bfloat16. Returns what its scores are multiplied with, >= 0.

    Args:
        room: for [head_dim] float32.
        tag: of K.
    """
    tensors, width = call.tensors, call.shape.head_dim
    factor = query_factor(call, row, head, tag)
    if call.scales.k == 0 and factor >= 0:
        source = tensors.q + row * tensors.q_strides[0] + head * tensors.q_strides[1]
        # As they will be read again, 32 bytes at a time: two halves of that would be waited for.
        for d in range(0, width * 2 - 16, 32):
            store(target + d, load_f32(source + d))
        if width % 16 != 0:
            store_upper(target + width * 2 - 16, load_bf16(source + width * 2 - 16))
        return factor
    factor = load_query(call, row, head, room, tag)
    sign = splat(np.float32(-1 if factor < 0 else 1))
    for d in range(0, width, 8):
        store_upper(target + d * 2, mul(sign, load_f32(room + d * 4)))
    return abs(factor)


@njit(**OPTIONS)
def load_queries(call, row_start, num_rows, head, q, depth, factors, room, tag):
    """Rows of one KV head as words: q [blocks][depth / 2][BLOCK], what is past the last row is undefined.

    Args:
        factors: of each row's scores, [rows of BLOCK] float32, >= 0.
        room: for a row of float32 and eight of bfloat16, `depth` numbers each; zeros past head_dim.
        tag: of K.
    """
    group, rows, line = call.shape.group, room + depth * 4, depth * 2
    for r in range(num_rows):
        row, q_head = call.rows.rows[row_start + r // group], head * group + r % group
        ask(call.tensors.q + row * call.tensors.q_strides[0] + q_head * call.tensors.q_strides[1], line)
    for first in range(0, num_rows, 8):
        for r in range(first, min(first + 8, num_rows)):
            row, q_head = call.rows.rows[row_start + r // group], head * group + r % group
            factor = _load_query(call, row, q_head, rows + (r - first) * line, room, tag)
            store_one(factors + r * 4, factor)
        target = q + first // BLOCK * BLOCK * line + first % BLOCK * 4
        for d in range(0, line, 32):
            turn(rows + d, line, target + d // 4 * LINE, np.int64(LINE))
