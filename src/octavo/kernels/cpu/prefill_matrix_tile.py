"""What prefill multiplies in bfloat16, as the instructions read it: a tile of keys and values, and queries."""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import load_query, query_factor
from octavo.kernels.cpu.prefill_item import ask
from octavo.kernels.cpu.simd import load_bf16, load_f32, load_int, mul, splat, store, store_one, store_transposed
from octavo.kernels.cpu.simd_matrix import BLOCK, TILE_BYTES, rest_of, store_upper, words_of
from octavo.kernels.cpu.stored import BFLOAT16, INLINED, OPTIONS, bytes_of, load, parts_of, size_of

KEYS = 128
"""Keys of a tile of keys and values, a multiple of BLOCK."""

HALF = BLOCK // 2
"""Keys of a block whose weights are the lower halves of words: key i stands with key HALF + i."""

LINE = BLOCK * 4
"""Bytes of one key's scores, of a block of rows; of two keys' weights; of one number of the rows' outputs."""

SQUARE = BLOCK * TILE_BYTES
"""Bytes of a part of a square of Q, K, turned V or weights, [BLOCK][BLOCK] bfloat16: squares, and the parts of each,
lie one after another, as they are read."""


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
def _words(low, high):
    """Words of four vectors and four more."""
    a, b, c, d = low
    e, f, g, h = high
    return words_of(a, e), words_of(b, f), words_of(c, g), words_of(d, h)


@njit(**OPTIONS)
def _rests(vectors):
    """What is left of four vectors beyond a bfloat16."""
    a, b, c, d = vectors
    return rest_of(a), rest_of(b), rest_of(c), rest_of(d)


@njit(**INLINED)
def load_keys(rows, start, end, offset, head_dim, k, depth, tag):
    """Rows start to end - 1 of a tile as k [KEYS / BLOCK][depth / BLOCK] squares of (key, number), in parts.

    rows: where their addresses stand, to which the head's offset is added.
    """
    square = parts_of(tag) * SQUARE
    for t in range(start, end):
        source = load_int(rows + t * 8) + offset
        target = k + t // BLOCK * (depth // BLOCK) * square + t % BLOCK * TILE_BYTES
        for i in range(0, head_dim, 8):
            x, at = load(source + i * size_of(tag), tag), target + i // BLOCK * square + i % BLOCK * 2
            for _ in range(parts_of(tag)):
                store_upper(at, x)
                x = rest_of(x)
                at += SQUARE


@njit(**INLINED)
def load_values(rows, start, end, offset, value_dim, v, tag):
    """Rows start to end - 1 of a tile, multiples of BLOCK, as v [width / BLOCK][KEYS / BLOCK] squares of (number, key),
    in parts; two keys to a word as weights stand."""
    square, line = parts_of(tag) * SQUARE, np.int64(TILE_BYTES)
    for t in range(start, end, HALF):
        # Eight rows and those that share their words make eight columns.
        word = t % BLOCK // 2
        row = rows + (t // BLOCK * BLOCK + word) * 8
        pair = row + HALF * 8
        a, a_ = load_int(row) + offset, load_int(pair) + offset
        b, b_ = load_int(row + 8) + offset, load_int(pair + 8) + offset
        c, c_ = load_int(row + 16) + offset, load_int(pair + 16) + offset
        d, d_ = load_int(row + 24) + offset, load_int(pair + 24) + offset
        e, e_ = load_int(row + 32) + offset, load_int(pair + 32) + offset
        f, f_ = load_int(row + 40) + offset, load_int(pair + 40) + offset
        g, g_ = load_int(row + 48) + offset, load_int(pair + 48) + offset
        h, h_ = load_int(row + 56) + offset, load_int(pair + 56) + offset
        column = v + t // BLOCK * square + word * 4
        for i in range(0, value_dim, 8):
            o = i * size_of(tag)
            x = (load(a + o, tag), load(b + o, tag), load(c + o, tag), load(d + o, tag))
            y = (load(e + o, tag), load(f + o, tag), load(g + o, tag), load(h + o, tag))
            x_ = (load(a_ + o, tag), load(b_ + o, tag), load(c_ + o, tag), load(d_ + o, tag))
            y_ = (load(e_ + o, tag), load(f_ + o, tag), load(g_ + o, tag), load(h_ + o, tag))
            at = column + i // BLOCK * (KEYS // BLOCK) * square + i % BLOCK * TILE_BYTES
            for _ in range(parts_of(tag)):
                m, n, p, q = _words(x, x_)
                r, s, u, w = _words(y, y_)
                store_transposed(m, n, p, q, r, s, u, w, at, line)
                x, y, x_, y_ = _rests(x), _rests(y), _rests(x_), _rests(y_)
                at += SQUARE


@njit(**INLINED)
def _load_query(call, row, head, target, line, room, parts):
    """One head's query to `target`, parts [head_dim] bfloat16 `line` bytes apart. Returns what its scores are
    multiplied with, >= 0.

    Args:
        room: for [head_dim] float32.
    """
    tensors, width = call.tensors, call.shape.head_dim
    factor = query_factor(call, row, head)
    if tensors.q_kind == BFLOAT16 and call.scales.k == 0 and factor >= 0:
        source = tensors.q + row * tensors.q_strides[0] + head * tensors.q_strides[1]
        # As they will be read again, 32 bytes at a time: two halves of that would be waited for.
        for d in range(0, width * 2 - 16, 32):
            store(target + d, load_f32(source + d))
        if width % 16 != 0:
            store_upper(target + width * 2 - 16, load_bf16(source + width * 2 - 16))
        return factor
    factor = load_query(call, row, head, room)
    sign = splat(np.float32(-1 if factor < 0 else 1))
    for d in range(0, width, 8):
        x = mul(sign, load_f32(room + d * 4))
        for part in range(parts):
            store_upper(target + part * line + d * 2, x)
            x = rest_of(x)
    return abs(factor)


@njit(**OPTIONS)
def load_queries(call, row_start, num_rows, head, q, depth, parts, factors, room):
    """Rows of one KV head as words: q [blocks][depth / BLOCK] squares of (word, row), in parts; what is past the last
    row is undefined.

    Args:
        factors: of each row's scores, [rows of BLOCK] float32, >= 0.
        room: for a row of float32 and eight of bfloat16 in three parts, `depth` numbers each; zeros past head_dim.
    """
    group, rows, line = call.shape.group, room + depth * 4, depth * 2
    size = bytes_of(call.tensors.q_kind)
    for r in range(num_rows):
        row, q_head = call.rows.rows[row_start + r // group], head * group + r % group
        ask(call.tensors.q + row * call.tensors.q_strides[0] + q_head * call.tensors.q_strides[1], depth * size)
    for first in range(0, num_rows, 8):
        for r in range(first, min(first + 8, num_rows)):
            row, q_head = call.rows.rows[row_start + r // group], head * group + r % group
            factor = _load_query(call, row, q_head, rows + (r - first) * line, 8 * line, room, parts)
            store_one(factors + r * 4, factor)
        for part in range(parts):
            target = q + first // BLOCK * BLOCK * line * parts + part * SQUARE + first % BLOCK * 4
            for d in range(0, line, 32):
                square = d // TILE_BYTES * parts * SQUARE
                turn(rows + d, line, target + square + d % TILE_BYTES // 4 * LINE, np.int64(LINE))
            rows += 8 * line
        rows -= parts * 8 * line
