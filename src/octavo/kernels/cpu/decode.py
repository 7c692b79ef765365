"""Attention for few rows a sequence, straight from the pages, in Numba.

Decode is bound by reading K and V, so each is read once: tiles of keys outside, KV heads inside, and the next
head's rows asked for while this head's are worked on (pages lie anywhere, so the hardware does not guess them).
Four query heads of a group share each K row; their scores lie as [key][4 heads], two keys a vector. Only keys
inside a row's own interval are touched, so nothing needs a mask. The softmax runs in powers of two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import overload

from octavo.kernels.cpu.simd import (
    add,
    any_above,
    exp2,
    fetch_add,
    fma,
    load_bf16,
    load_f16,
    load_f32,
    load_splat,
    maximum,
    mul,
    prefetch,
    splat,
    store,
    store_one,
    sub,
    swap_halves,
    totals,
)

TILE = 64
"""Keys of a tile."""

HEADS = 4
"""Query heads that share a K row; smaller groups compute the missing heads for nothing."""

LINE = 64
"""Bytes of a cache line."""

_LOG2_E, _LN_2 = math.log2(math.e), math.log(2.0)
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "cache": True}


class Shape(NamedTuple):
    """Sizes of a layer, and the shard whose keys are here."""

    group: int
    head_dim: int
    value_dim: int
    block_size: int
    dcp_world: int
    dcp_rank: int
    interleave: int


class Tensors(NamedTuple):
    """Addresses, and strides in bytes: (row, head) of q, (block, row, head) of pages, (split, row, head) of
    out and lse. An lse of 0 is not wanted."""

    q: int
    q_strides: tuple[int, int]
    k: int
    k_strides: tuple[int, int, int]
    v: int
    v_strides: tuple[int, int, int]
    out: int
    out_strides: tuple[int, int, int]
    lse: int
    lse_strides: tuple[int, int, int]


class Scores(NamedTuple):
    """Score transforms: the scale, the soft cap (0: off), the position bias (0: none, 1: slope * (j - p), 2:
    -slope * |p - j|, 3: -slope * sqrt(|p - j|))."""

    scale: float
    cap: float
    bias: int


class Rows(NamedTuple):
    """A step's rows, by launch row, and its tables, by launch sequence."""

    rows: np.ndarray  # [num_rows] int64 query row
    lo: np.ndarray  # [num_rows] int32 first local key seen
    hi: np.ndarray  # [num_rows] int32 end of the local keys seen
    positions: np.ndarray  # [num_rows] int32
    kv_splits: np.ndarray  # [n, num_splits + 1] int32
    block_table: np.ndarray  # [n, max_blocks] int32


def _load(address: int, tag: np.ndarray) -> Any:
    """Eight stored numbers as float32; the tag's dtype says how they are stored."""


@overload(_load, inline="always")
def _load_by_tag(address: Any, tag: Any) -> Any:
    loads = {types.float32: load_f32, types.int16: load_f16, types.uint16: load_bf16}
    load = loads[tag.dtype]

    def implementation(address: Any, tag: Any) -> Any:
        return load(address)

    return implementation


@njit(**_OPTIONS)
def _scores(k, count, head_offset, q, q_stride, num_bytes, step, s, ahead, tag):
    """Scores of `count` keys against four heads: s[key][head]. k: addresses of the rows; ahead: distance in bytes
    to the rows that come next (0: none)."""
    for t in range(0, count, 2):
        ka = k[t] + head_offset
        kb = k[min(t + 1, count - 1)] + head_offset
        if ahead != 0:
            for offset in range(0, num_bytes, LINE):
                prefetch(ka + ahead + offset)
                prefetch(kb + ahead + offset)
        a0 = splat(np.float32(0))
        a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
        qa = q
        for offset in range(0, num_bytes, step):
            x = _load(ka + offset, tag)
            y = _load(kb + offset, tag)
            z = load_f32(qa)
            a0, b0 = fma(z, x, a0), fma(z, y, b0)
            z = load_f32(qa + q_stride)
            a1, b1 = fma(z, x, a1), fma(z, y, b1)
            z = load_f32(qa + 2 * q_stride)
            a2, b2 = fma(z, x, a2), fma(z, y, b2)
            z = load_f32(qa + 3 * q_stride)
            a3, b3 = fma(z, x, a3), fma(z, y, b3)
            qa += 32
        store(s + t * 16, totals(a0, a1, a2, a3, b0, b1, b2, b3))


@njit(**_OPTIONS)
def _add_values(v, count, head_offset, p, acc, acc_stride, value_dim, size, ahead, tag):
    """acc[head] += p[key][head] * V[key] for four heads; sixteen numbers of V's width at a time."""
    if ahead != 0:
        for t in range(count):
            for offset in range(0, value_dim * size, LINE):
                prefetch(v[t] + head_offset + ahead + offset)
    for d in range(0, value_dim - 8, 16):
        r = acc + d * 4
        a0, a1 = load_f32(r), load_f32(r + 32)
        b0, b1 = load_f32(r + acc_stride), load_f32(r + acc_stride + 32)
        c0, c1 = load_f32(r + 2 * acc_stride), load_f32(r + 2 * acc_stride + 32)
        d0, d1 = load_f32(r + 3 * acc_stride), load_f32(r + 3 * acc_stride + 32)
        for t in range(count):
            va = v[t] + head_offset + d * size
            x, y = _load(va, tag), _load(va + 8 * size, tag)
            w = load_splat(p + t * 16)
            a0, a1 = fma(w, x, a0), fma(w, y, a1)
            w = load_splat(p + t * 16 + 4)
            b0, b1 = fma(w, x, b0), fma(w, y, b1)
            w = load_splat(p + t * 16 + 8)
            c0, c1 = fma(w, x, c0), fma(w, y, c1)
            w = load_splat(p + t * 16 + 12)
            d0, d1 = fma(w, x, d0), fma(w, y, d1)
        store(r, a0)
        store(r + 32, a1)
        store(r + acc_stride, b0)
        store(r + acc_stride + 32, b1)
        store(r + 2 * acc_stride, c0)
        store(r + 2 * acc_stride + 32, c1)
        store(r + 3 * acc_stride, d0)
        store(r + 3 * acc_stride + 32, d1)
    if value_dim % 16:
        d = value_dim - 8
        for head in range(HEADS):
            r = acc + head * acc_stride + d * 4
            a0 = load_f32(r)
            for t in range(count):
                a0 = fma(load_splat(p + t * 16 + head * 4), _load(v[t] + head_offset + d * size, tag), a0)
            store(r, a0)


@njit(**_OPTIONS)
def _transform(s, count, first, position, slopes, head, num_heads, shape, transforms):
    """Soft cap and position bias on s [>= count, 4] of local keys first, first + 1, ..., in natural units."""
    for t in range(count):
        j = first + t
        run = j // shape.interleave
        key = (run * shape.dcp_world + shape.dcp_rank) * shape.interleave + j - run * shape.interleave
        distance = np.float32(key - position)
        if transforms.bias == 2:
            distance = -abs(distance)
        elif transforms.bias == 3:
            distance = -np.sqrt(abs(distance))
        for i in range(num_heads):
            x = s[t, i]
            if transforms.cap > 0:
                x = np.float32(transforms.cap) * np.float32(math.tanh(x / np.float32(transforms.cap)))
            if transforms.bias != 0:
                x += slopes[head + i] * distance
            s[t, i] = x


@njit(**_OPTIONS)
def _softmax(s, count, state, acc, acc_stride, value_dim):
    """Scores [key][4] in natural units to weights, in place; state holds the running maximum (in powers of two)
    and sum, eight lanes each: four heads, twice. Returns nothing; rescales acc where the maximum rises."""
    pairs = (count + 1) // 2
    unit = splat(np.float32(_LOG2_E))
    before = load_f32(state)
    peak = before
    for i in range(pairs):
        x = mul(load_f32(s + i * 32), unit)
        store(s + i * 32, x)
        peak = maximum(x, peak)
    peak = maximum(swap_halves(peak), peak)
    sums = load_f32(state + 32)
    if any_above(peak, before):
        rescale = exp2(sub(before, peak))
        store(state, rescale)
        for head in range(HEADS):
            factor = load_splat(state + head * 4)
            row = acc + head * acc_stride
            for d in range(0, value_dim * 4, 32):
                store(row + d, mul(factor, load_f32(row + d)))
        sums = mul(sums, rescale)
        store(state, peak)
    for i in range(pairs):
        x = exp2(sub(load_f32(s + i * 32), peak))
        store(s + i * 32, x)
        sums = add(sums, x)
    store(state + 32, sums)


@njit(**_OPTIONS)
def _finish(state, acc, lane, head, row, split, tensors, value_dim, sinks):
    """Write one head's output and LSE. state: [16] maximum and sum of its four heads, acc: address of its row."""
    m, l = state[lane], state[8 + lane] + state[12 + lane]
    scale = np.float32(1)
    if len(sinks) > 0:
        sink = sinks[head] * np.float32(_LOG2_E)
        top = max(m, sink)
        if top > -np.inf:
            scale = np.float32(2.0 ** (m - top))
            l = l * scale + np.float32(2.0 ** (sink - top))
            m = top
    factor = scale / l if l != 0 else np.float32(0)
    out = tensors.out + split * tensors.out_strides[0] + row * tensors.out_strides[1] + head * tensors.out_strides[2]
    for d in range(0, value_dim * 4, 32):
        store(out + d, mul(splat(factor), load_f32(acc + d)))
    if tensors.lse != 0:
        lse = (
            tensors.lse + split * tensors.lse_strides[0] + row * tensors.lse_strides[1] + head * tensors.lse_strides[2]
        )
        value = (m + math.log2(l)) * _LN_2 if l != 0 else -np.inf
        store_one(lse, np.float32(value))


@njit(**_OPTIONS)
def _attend(item, scratch, tensors, shape, transforms, step, slopes, sinks, tag):
    """One item (sequence, split, first launch row, end, first KV head, end)."""
    seq, split, row_start, row_end, head_start, head_end = item
    q, acc, state, s, ka, va = scratch
    blocks = (shape.group + HEADS - 1) // HEADS  # of four query heads, per KV head
    per_row = (head_end - head_start) * blocks
    size = tag.itemsize
    q_width, acc_width = shape.head_dim * 4, shape.value_dim * 4
    q_base, acc_base = np.int64(q.ctypes.data), np.int64(acc.ctypes.data)
    state_base, s_base = np.int64(state.ctypes.data), np.int64(s.ctypes.data)
    start, stop = np.int64(step.kv_splits[seq, split]), np.int64(step.kv_splits[seq, split + 1])
    first, last = stop, start
    scale = splat(np.float32(transforms.scale))
    for row in range(row_start, row_end):
        if step.lo[row] < step.hi[row]:
            first = min(first, max(start, np.int64(step.lo[row])))
            last = max(last, min(stop, np.int64(step.hi[row])))
        for h in range(head_start, head_end):
            for i in range(blocks * HEADS):
                unit = ((row - row_start) * per_row + (h - head_start) * blocks) * HEADS + i
                acc[unit] = 0
                q[unit] = 0
                if i < shape.group:
                    source = tensors.q + step.rows[row] * tensors.q_strides[0]
                    source += (h * shape.group + i) * tensors.q_strides[1]
                    for d in range(0, q_width, 32):
                        store(q_base + unit * q_width + d, mul(scale, load_f32(source + d)))
    for i in range((row_end - row_start) * per_row):
        state[i, :8] = -np.inf
        state[i, 8:] = 0

    # Tiles begin at multiples from the split's start: where a row's sums are cut must not depend on its neighbours.
    tile = first - (first - start) % TILE
    while tile < last:
        end = min(tile + TILE, last)
        for t in range(end - tile):
            block = np.int64(step.block_table[seq, (tile + t) // shape.block_size])
            offset = (tile + t) % shape.block_size
            ka[t] = tensors.k + block * tensors.k_strides[0] + offset * tensors.k_strides[1]
            va[t] = tensors.v + block * tensors.v_strides[0] + offset * tensors.v_strides[1]
        for h in range(head_start, head_end):
            k_ahead = tensors.k_strides[2] if h + 1 < head_end else np.int64(0)
            v_ahead = tensors.v_strides[2] if h + 1 < head_end else np.int64(0)
            for row in range(row_start, row_end):
                lo = max(tile, start, np.int64(step.lo[row]))
                count = min(end, np.int64(step.hi[row])) - lo
                if count <= 0:
                    continue
                for b in range(blocks):
                    i = (row - row_start) * per_row + (h - head_start) * blocks + b
                    qa, oa = q_base + i * HEADS * q_width, acc_base + i * HEADS * acc_width
                    ahead = b == 0 and row == row_start
                    keys, values = ka[lo - tile :], va[lo - tile :]
                    _scores(
                        keys,
                        count,
                        h * tensors.k_strides[2],
                        qa,
                        q_width,
                        shape.head_dim * size,
                        8 * size,
                        s_base,
                        k_ahead if ahead else np.int64(0),
                        tag,
                    )
                    head = h * shape.group + b * HEADS
                    if transforms.cap > 0 or transforms.bias != 0:
                        _transform(
                            s,
                            count,
                            lo,
                            step.positions[row],
                            slopes,
                            head,
                            min(HEADS, shape.group - b * HEADS),
                            shape,
                            transforms,
                        )
                    if count % 2 == 1:
                        s[count] = -np.inf  # the pair's second key repeats the first
                    _softmax(s_base, count, state_base + i * 64, oa, acc_width, shape.value_dim)
                    _add_values(
                        values,
                        count,
                        h * tensors.v_strides[2],
                        s_base,
                        oa,
                        acc_width,
                        shape.value_dim,
                        size,
                        v_ahead if ahead else np.int64(0),
                        tag,
                    )
        tile = end

    for row in range(row_start, row_end):
        for h in range(head_start, head_end):
            for i in range(shape.group):
                block = (row - row_start) * per_row + (h - head_start) * blocks + i // HEADS
                unit = block * HEADS + i % HEADS
                _finish(
                    state[block],
                    acc_base + unit * acc_width,
                    i % HEADS,
                    h * shape.group + i,
                    step.rows[row],
                    split,
                    tensors,
                    shape.value_dim,
                    sinks,
                )


@njit(**_OPTIONS)
def work(items, counter, max_rows, max_heads, tensors, shape, transforms, step, slopes, sinks, tag):
    """Take items until none is left; several threads may run this on one counter.

    Args:
        items: [num_items, 6] int64.
        counter: address of an int64, 0 at the start.
        max_rows, max_heads: rows and KV heads of an item, at most.
    """
    units = max_rows * max_heads * ((shape.group + HEADS - 1) // HEADS)
    scratch = (
        np.empty((units * HEADS, shape.head_dim), np.float32),
        np.empty((units * HEADS, shape.value_dim), np.float32),
        np.empty((units, 16), np.float32),
        np.empty((TILE + 2, HEADS), np.float32),
        np.empty(TILE, np.int64),
        np.empty(TILE, np.int64),
    )
    while True:
        index = fetch_add(counter, 1)
        if index >= items.shape[0]:
            break
        item = items[index]
        _attend(
            (item[0], item[1], item[2], item[3], item[4], item[5]),
            scratch,
            tensors,
            shape,
            transforms,
            step,
            slopes,
            sinks,
            tag,
        )
