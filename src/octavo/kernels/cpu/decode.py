"""Attention for few rows a sequence, straight from the pages, in Numba.

Decode is bound by reading K and V, so each is read once: tiles of keys outside, KV heads inside, and the rows that
come next asked for while these are worked on (pages lie anywhere, so the hardware does not guess them). Four query
heads of a group share each K row; their scores lie as [key][4 heads], two keys a vector. Only keys inside a row's
own interval are touched, so nothing needs a mask. The softmax runs in powers of two.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import find_rows, finish, key_position, load_query
from octavo.kernels.cpu.simd import (
    absolute,
    add,
    any_above,
    exp2,
    fetch_add,
    fma,
    load_f32,
    load_int,
    load_one,
    load_splat,
    maximum,
    mul,
    prefetch,
    root,
    splat,
    splat_halves,
    store,
    sub,
    swap_halves,
    tanh,
    totals,
)
from octavo.kernels.cpu.stored import OPTIONS, from_pair, load, load_pair, size_of, to_pair

TILE = 16
"""Keys of a tile."""

HEADS = 4
"""Query heads that share a K row; smaller groups compute the missing heads for nothing."""

LINE = 64
"""Bytes of a cache line."""


@njit(**OPTIONS)
def _scores(k, count, offset, ahead, num_ahead, ahead_offset, q, head_dim, s, tag):
    """Scores of `count` keys against four heads: s[key][head].

    Args:
        k: where the addresses of the keys' rows stand, to which the head's offset is added; ahead: those of the
            rows that come next.
        q: four rows [head_dim] float32, in pair order.
    """
    size, stride = size_of(tag), head_dim * 4
    zero = splat(np.float32(0))
    for t in range(0, count, 2):
        ka = load_int(k + t * 8) + offset
        kb = load_int(k + min(t + 1, count - 1) * 8) + offset
        pa, pb = ka, kb
        if t < num_ahead:
            pa = load_int(ahead + t * 8) + ahead_offset
            pb = load_int(ahead + min(t + 1, num_ahead - 1) * 8) + ahead_offset
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        qa = q
        for _ in range(head_dim // 16):
            prefetch(pa)
            prefetch(pb)
            pa += 16 * size
            pb += 16 * size
            x, x_ = load_pair(ka, tag)
            y, y_ = load_pair(kb, tag)
            z = load_f32(qa)
            a0, b0 = fma(z, x, a0), fma(z, y, b0)
            z = load_f32(qa + stride)
            a1, b1 = fma(z, x, a1), fma(z, y, b1)
            z = load_f32(qa + 2 * stride)
            a2, b2 = fma(z, x, a2), fma(z, y, b2)
            z = load_f32(qa + 3 * stride)
            a3, b3 = fma(z, x, a3), fma(z, y, b3)
            z = load_f32(qa + 32)
            a0, b0 = fma(z, x_, a0), fma(z, y_, b0)
            z = load_f32(qa + 32 + stride)
            a1, b1 = fma(z, x_, a1), fma(z, y_, b1)
            z = load_f32(qa + 32 + 2 * stride)
            a2, b2 = fma(z, x_, a2), fma(z, y_, b2)
            z = load_f32(qa + 32 + 3 * stride)
            a3, b3 = fma(z, x_, a3), fma(z, y_, b3)
            ka += 16 * size
            kb += 16 * size
            qa += 64
        if head_dim % 16:
            x, y = load(ka, tag), load(kb, tag)
            z = load_f32(qa)
            a0, b0 = fma(z, x, a0), fma(z, y, b0)
            z = load_f32(qa + stride)
            a1, b1 = fma(z, x, a1), fma(z, y, b1)
            z = load_f32(qa + 2 * stride)
            a2, b2 = fma(z, x, a2), fma(z, y, b2)
            z = load_f32(qa + 3 * stride)
            a3, b3 = fma(z, x, a3), fma(z, y, b3)
        store(s + t * 16, totals(a0, a1, a2, a3, b0, b1, b2, b3))


@njit(**OPTIONS)
def _add_values(v, count, offset, ahead, num_ahead, ahead_offset, p, acc, value_dim, tag):
    """acc[head] += p[key][head] * V[key] for four heads; sixteen numbers of V's width at a time, in pair order."""
    size, stride = size_of(tag), value_dim * 4
    per_pass = (num_ahead * 16 + value_dim - 1) // value_dim  # spread over the passes: few fetches fit at a time
    asked = 0
    for d in range(0, value_dim - 8, 16):
        r = acc + d * 4
        for i in range(asked, min(asked + per_pass, num_ahead)):
            row = load_int(ahead + i * 8) + ahead_offset
            for line in range(0, value_dim * size, LINE):
                prefetch(row + line)
        asked += per_pass
        a0, a1 = load_f32(r), load_f32(r + 32)
        b0, b1 = load_f32(r + stride), load_f32(r + stride + 32)
        c0, c1 = load_f32(r + 2 * stride), load_f32(r + 2 * stride + 32)
        d0, d1 = load_f32(r + 3 * stride), load_f32(r + 3 * stride + 32)
        base = offset + d * size
        for t in range(count):
            x, y = load_pair(load_int(v + t * 8) + base, tag)
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
        store(r + stride, b0)
        store(r + stride + 32, b1)
        store(r + 2 * stride, c0)
        store(r + 2 * stride + 32, c1)
        store(r + 3 * stride, d0)
        store(r + 3 * stride + 32, d1)
    if value_dim % 16:
        d = value_dim - 8
        for head in range(HEADS):
            r = acc + head * stride + d * 4
            a0 = load_f32(r)
            for t in range(count):
                row = load_int(v + t * 8) + offset + d * size
                a0 = fma(load_splat(p + t * 16 + head * 4), load(row, tag), a0)
            store(r, a0)


@njit(**OPTIONS)
def _scale(s, count, scales, offset):
    """s[key] *= the key's scale, for four heads.

    scales: where the addresses of the keys' scales stand, to which the head's offset is added.
    """
    for t in range(0, count, 2):
        a = load_one(load_int(scales + t * 8) + offset)
        b = load_one(load_int(scales + min(t + 1, count - 1) * 8) + offset)
        store(s + t * 16, mul(splat_halves(a, b), load_f32(s + t * 16)))


@njit(**OPTIONS)
def _load_slopes(call, h, slopes):
    """Position-bias slopes of KV head h, as the lanes of its scores: slopes [blocks][8], zeros past the group."""
    group = call.shape.group
    for block in range((group + HEADS - 1) // HEADS):
        for lane in range(8):
            i = block * HEADS + lane % HEADS
            slopes[block, lane] = call.slopes[h * group + i] if i < group else np.float32(0)


@njit(**OPTIONS)
def _transform(s, count, first, position, slopes, transforms, shape):
    """Soft cap and position bias on s [count][4] of local keys first, first + 1, ...; slopes: their lanes."""
    slope = load_f32(slopes)
    after = splat(np.float32(transforms.after))
    for t in range(0, count, 2):
        x = load_f32(s + t * 16)
        if transforms.after != 0:
            x = mul(after, tanh(x))
        if transforms.bias != 0:
            near = np.float32(key_position(first + t, shape) - position)
            far = np.float32(key_position(first + t + 1, shape) - position)
            distance = splat_halves(near, far)
            if transforms.bias >= 2:
                distance = absolute(distance)
                if transforms.bias == 3:
                    distance = root(distance)
                distance = sub(splat(np.float32(0)), distance)
            x = fma(slope, distance, x)
        store(s + t * 16, x)


@njit(**OPTIONS)
def _softmax(s, count, state, acc, value_dim):
    """Scores [key][4] to weights, in place; state holds the running maximum and sum, eight lanes each: four heads,
    twice. Rescales acc where the maximum rises."""
    pairs = (count + 1) // 2
    before = load_f32(state)
    top = before
    for i in range(pairs):
        top = maximum(load_f32(s + i * 32), top)
    top = maximum(swap_halves(top), top)
    sums = load_f32(state + 32)
    if any_above(top, before):
        rescale = exp2(sub(before, top))
        store(state, rescale)
        for head in range(HEADS):
            factor = load_splat(state + head * 4)
            row = acc + head * value_dim * 4
            for d in range(0, value_dim * 4, 32):
                store(row + d, mul(factor, load_f32(row + d)))
        sums = mul(sums, rescale)
        store(state, top)
    for i in range(pairs):
        x = exp2(sub(load_f32(s + i * 32), top))
        store(s + i * 32, x)
        sums = add(sums, x)
    store(state + 32, sums)


@njit(**OPTIONS)
def _load_queries(call, row, h, q, tag):
    """One row's queries of KV head h, scaled, in pair order, zeros past the group: q [blocks * 4][head_dim]."""
    shape = call.shape
    zero = splat(np.float32(0))
    for i in range((shape.group + HEADS - 1) // HEADS * HEADS):
        if i < shape.group:
            load_query(call, call.rows.rows[row], h * shape.group + i, q + i * shape.head_dim * 4, tag)
        else:
            for d in range(0, shape.head_dim, 8):
                store(q + (i * shape.head_dim + d) * 4, zero)
        for d in range(0, shape.head_dim - 8, 16):
            target = q + (i * shape.head_dim + d) * 4
            x, y = to_pair(load_f32(target), load_f32(target + 32), tag)
            store(target, x)
            store(target + 32, y)


@njit(**OPTIONS)
def _store_results(call, row, h, split, state, acc, tag):
    """One row's results of KV head h. state: [blocks, 16] maximum and sum; acc: [blocks * 4][value_dim]."""
    width = call.shape.value_dim
    for i in range(call.shape.group):
        values = acc + i * width * 4
        for d in range(0, width - 8, 16):
            target = values + d * 4
            x, y = from_pair(load_f32(target), load_f32(target + 32), tag)
            store(target, x)
            store(target + 32, y)
        block, lane, head = i // HEADS, i % HEADS, h * call.shape.group + i
        m, l = state[block, lane], state[block, 8 + lane] + state[block, 12 + lane]
        finish(call, head, call.rows.rows[row], split, m, l, values, tag)


@njit(**OPTIONS)
def _attend(call, item, scratch, k_tag, v_tag):
    """One item (sequence, split, first launch row, end, first KV head, end)."""
    seq, split, row_start, row_end, head_start, head_end = item
    q, acc, state, s, slopes, addresses = scratch
    shape, tensors, rows, scales = call.shape, call.tensors, call.rows, call.scales
    blocks = (shape.group + HEADS - 1) // HEADS  # of four query heads, per KV head
    per_row = (head_end - head_start) * blocks
    q_base, acc_base = np.int64(q.ctypes.data), np.int64(acc.ctypes.data)
    state_base, s_base = np.int64(state.ctypes.data), np.int64(s.ctypes.data)
    q_size, acc_size = HEADS * shape.head_dim * 4, HEADS * shape.value_dim * 4  # of a block
    keys = np.int64(addresses.ctypes.data)
    next_keys, values, next_values = keys + TILE * 8, keys + TILE * 16, keys + TILE * 24
    k_scales, v_scales = keys + TILE * 32, keys + TILE * 40
    k_head, v_head, table = tensors.k_strides[2], tensors.v_strides[2], rows.block_table[seq]
    transforms, slopes_base = call.transforms, np.int64(slopes.ctypes.data)
    if transforms.bias != 0:
        for h in range(head_start, head_end):
            _load_slopes(call, h, slopes[(h - head_start) * blocks :])
    start, stop = np.int64(rows.kv_splits[seq, split]), np.int64(rows.kv_splits[seq, split + 1])
    first, last = stop, start
    for row in range(row_start, row_end):
        if rows.lo[row] < rows.hi[row]:
            first = min(first, max(start, np.int64(rows.lo[row])))
            last = max(last, min(stop, np.int64(rows.hi[row])))
        for h in range(head_start, head_end):
            unit = (row - row_start) * per_row + (h - head_start) * blocks
            _load_queries(call, row, h, q_base + unit * q_size, k_tag)
    units = (row_end - row_start) * per_row
    acc[: units * HEADS] = 0
    state[:units, :8] = -np.inf
    state[:units, 8:] = 0

    # Tiles begin at multiples from the split's start: where a row's sums are cut must not depend on its neighbours.
    tile = first - (first - start) % TILE
    num_next = min(TILE, last - tile)
    find_rows(table, shape.block_size, tile, num_next, tensors.k, tensors.k_strides, next_keys)
    find_rows(table, shape.block_size, tile, num_next, tensors.v, tensors.v_strides, next_values)
    while tile < last:
        end = tile + num_next
        keys, next_keys, values, next_values = next_keys, keys, next_values, values
        if scales.k != 0:
            find_rows(table, shape.block_size, tile, end - tile, scales.k, scales.k_strides, k_scales)
        if scales.v != 0:
            find_rows(table, shape.block_size, tile, end - tile, scales.v, scales.v_strides, v_scales)
        num_next = min(TILE, last - end)
        find_rows(table, shape.block_size, end, num_next, tensors.k, tensors.k_strides, next_keys)
        find_rows(table, shape.block_size, end, num_next, tensors.v, tensors.v_strides, next_values)
        for h in range(head_start, head_end):
            for row in range(row_start, row_end):
                lo = max(tile, start, np.int64(rows.lo[row]))
                count = min(end, np.int64(rows.hi[row])) - lo
                if count <= 0:
                    continue
                here = (lo - tile) * 8
                ahead_head, ahead_keys, ahead_values, num_ahead = h + 1, keys + here, values + here, count
                if h + 1 == head_end:
                    ahead_head, ahead_keys, ahead_values, num_ahead = head_start, next_keys, next_values, num_next
                if row > row_start:
                    num_ahead = 0
                for b in range(blocks):
                    i = (row - row_start) * per_row + (h - head_start) * blocks + b
                    if b > 0:
                        num_ahead = 0
                    _scores(
                        keys + here,
                        count,
                        h * k_head,
                        ahead_keys,
                        num_ahead,
                        ahead_head * k_head,
                        q_base + i * q_size,
                        shape.head_dim,
                        s_base,
                        k_tag,
                    )
                    if scales.k != 0:
                        _scale(s_base, count, k_scales + here, h * scales.k_strides[2])
                    if transforms.after != 0 or transforms.bias != 0:
                        lanes = slopes_base + ((h - head_start) * blocks + b) * 32
                        _transform(s_base, count, lo, np.int64(rows.positions[row]), lanes, transforms, shape)
                    if count % 2 == 1:
                        s[count] = -np.inf  # the pair's second key repeats the first
                    _softmax(s_base, count, state_base + i * 64, acc_base + i * acc_size, shape.value_dim)
                    if scales.v != 0:
                        _scale(s_base, count, v_scales + here, h * scales.v_strides[2])
                    _add_values(
                        values + here,
                        count,
                        h * v_head,
                        ahead_values,
                        num_ahead,
                        ahead_head * v_head,
                        s_base,
                        acc_base + i * acc_size,
                        shape.value_dim,
                        v_tag,
                    )
        tile = end

    for row in range(row_start, row_end):
        for h in range(head_start, head_end):
            unit = (row - row_start) * per_row + (h - head_start) * blocks
            _store_results(call, row, h, split, state[unit : unit + blocks], acc_base + unit * acc_size, v_tag)


@njit(**OPTIONS)
def work(call, k_tag, v_tag):
    """Take decode items until none is left; several threads may run this on one call.

    An item is (launch sequence, split, launch rows from and to, KV heads from and to); the largest is measured in
    blocks of four query heads, over its rows and KV heads.
    """
    items, units, counter = call.decode
    if len(items) == 0:
        return
    shape = call.shape
    scratch = (
        np.empty((units * HEADS, shape.head_dim), np.float32),
        np.empty((units * HEADS, shape.value_dim), np.float32),
        np.empty((units, 16), np.float32),
        np.empty((TILE + 2, HEADS), np.float32),
        np.empty((units, 8), np.float32),
        np.empty((6, TILE), np.int64),
    )
    while True:
        index = fetch_add(counter, 1)
        if index >= len(items):
            break
        item = items[index]
        _attend(call, (item[0], item[1], item[2], item[3], item[4], item[5]), scratch, k_tag, v_tag)
