"""Attention for few rows a sequence, straight from the pages, in Numba.

Decode is bound by reading K and V, so each is read once: tiles of keys outside, KV heads inside, and the rows that
come next asked for while these are worked on (pages lie anywhere, so the hardware does not guess them). Four query
heads of a group share each K row; their scores lie as [key][4 heads], two keys a vector. Only keys inside a row's
own interval are touched, so nothing needs a mask. The softmax runs in powers of two.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from octavo.kernels.cpu import decode_dots, decode_float, decode_int8
from octavo.kernels.cpu.decode_dots import from_words
from octavo.kernels.cpu.decode_tile import FOUND, HEADS, K_SCALES, LINE, TILE, V_SCALES, VALUES, WIDE_TILE
from octavo.kernels.cpu.native import LEAST, biased, find_rows, finish, key_position, load_query
from octavo.kernels.cpu.simd import (
    add,
    any_above,
    exp2,
    fetch_add,
    load_f32,
    load_int,
    load_one,
    load_splat,
    maximum,
    mul,
    prefetch_far,
    splat,
    splat_halves,
    store,
    store_int,
    store_one,
    sub,
    swap_halves,
    tanh,
)
from octavo.kernels.cpu.simd_base import IS_ZEN
from octavo.kernels.cpu.simd_eight_bit import store_i16
from octavo.kernels.cpu.simd_matrix import store_upper
from octavo.kernels.cpu.stored import BY_DOTS, INLINED, OPTIONS, by_dots, from_pair, is_int8, size_of, to_pair

GROUP = 4 if IS_ZEN else 8
"""KV heads, or tiles, that are asked for together, K and V: Intel's hardware follows 32 places where memory is read."""

V_AHEAD = (GROUP * TILE + 1) * 8
"""Where addresses of V that are asked for follow those of K."""


_PRODUCTS = {types.int8: decode_int8, **dict.fromkeys(BY_DOTS, decode_dots)}
"""Who computes the two products, by tag; else `decode_float`."""


def _scores(k, count, offset, ahead, num_ahead, q, head_dim, s, scale_offset, factors, tag):
    """Scores of `count` keys against four heads: s[key][head].

    Args:
        k: where the addresses of the keys' rows stand, to which `offset` is added, and K_SCALES on those of their
            scales, to which scale_offset is added. One more row may be read where `count` is odd.
        ahead, num_ahead: where the addresses of rows stand that are asked for meanwhile, and how many.
        q: four rows as `_load_queries` leaves them, head_dim * 4 bytes each; factors: what their products are
            multiplied with unless they are float32, [4, twice] float32.
    """


@overload(_scores, jit_options=OPTIONS)
def _choose_scores(k, count, offset, ahead, num_ahead, q, head_dim, s, scale_offset, factors, tag):
    return _PRODUCTS.get(tag.dtype, decode_float).scores


def _add_values(v, count, offset, ahead, num_ahead, s, acc, value_dim, tag):
    """acc[head] += s[key][head] * V[key] for four heads, in pair order; s: weights, and room behind them."""


@overload(_add_values, jit_options=OPTIONS)
def _choose_add_values(v, count, offset, ahead, num_ahead, s, acc, value_dim, tag):
    return _PRODUCTS.get(tag.dtype, decode_float).add_values


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
            x = biased(x, slope, splat_halves(near, far), transforms.bias)
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
    # Finite, so that scores of -inf get weights of 0 where a row has seen no others.
    shift = maximum(top, splat(LEAST))
    if any_above(top, before):
        rescale = exp2(sub(before, shift))
        store(state, rescale)
        for head in range(HEADS):
            factor = load_splat(state + head * 4)
            row = acc + head * value_dim * 4
            for d in range(0, value_dim * 4, 32):
                store(row + d, mul(factor, load_f32(row + d)))
        sums = mul(sums, rescale)
        store(state, top)
    for i in range(pairs):
        x = exp2(sub(load_f32(s + i * 32), shift))
        store(s + i * 32, x)
        sums = add(sums, x)
    store(state + 32, sums)


@njit(**OPTIONS)
def _load_queries(call, row, h, q, factors, tag):
    """One row's queries of KV head h, zeros past the group: q [blocks * 4][head_dim], scaled and in pair order, or as
    they are with factors [blocks][8], of four heads twice: for int8 K int16, for dot products bfloat16."""
    shape = call.shape
    zero = splat(np.float32(0))
    for i in range((shape.group + HEADS - 1) // HEADS * HEADS):
        row_q, factor = q + i * shape.head_dim * 4, np.float32(0)
        if i < shape.group:
            factor = load_query(call, call.rows.rows[row], h * shape.group + i, row_q)
        else:
            for d in range(0, shape.head_dim * 4, 32):
                store(row_q + d, zero)
        if is_int8(tag) or by_dots(tag):
            place = factors + (i // HEADS * 8 + i % HEADS) * 4
            store_one(place, factor)
            store_one(place + HEADS * 4, factor)
            for d in range(0, shape.head_dim, 8):
                if is_int8(tag):
                    store_i16(row_q + d * 2, load_f32(row_q + d * 4))
                else:
                    store_upper(row_q + d * 2, load_f32(row_q + d * 4))
        else:
            scale = splat(factor)
            for d in range(0, shape.head_dim * 4, 32):
                store(row_q + d, mul(scale, load_f32(row_q + d)))
            for target in range(row_q, row_q + (shape.head_dim - 8) * 4, 64):
                x, y = to_pair(load_f32(target), load_f32(target + 32), tag)
                store(target, x)
                store(target + 32, y)


@njit(**OPTIONS)
def _store_results(call, row, h, split, sees, state, acc, tag):
    """One row's results of KV head h. sees: whether it sees keys; state: [blocks, 16] maximum and sum; acc:
    [blocks * 4][value_dim]."""
    width = call.shape.value_dim
    for i in range(call.shape.group):
        values = acc + i * width * 4
        if by_dots(tag):
            from_words(values, width)
        else:
            for d in range(0, width - 8, 16):
                target = values + d * 4
                x, y = from_pair(load_f32(target), load_f32(target + 32), tag)
                store(target, x)
                store(target + 32, y)
        block, lane, head = i // HEADS, i % HEADS, h * call.shape.group + i
        m, l = state[block, lane], state[block, 8 + lane] + state[block, 12 + lane]
        if sees and l == 0 and len(call.sinks) == 0:
            # All scores are -inf: no number here, and no weight among other parts.
            for d in range(0, width * 4, 32):
                store(values + d, splat(np.float32(np.nan)))
        finish(call, head, call.rows.rows[row], split, m, l, values)


@njit(**OPTIONS)
def _find(call, table, first, count, base, strides, addresses):
    """`find_rows`, the last row twice."""
    if base != 0 and count > 0:
        find_rows(table, call.shape.block_size, first, count, base, strides, addresses)
        store_int(addresses + count * 8, load_int(addresses + (count - 1) * 8))


@njit(**OPTIONS)
def _find_tile(call, table, first, count, addresses):
    """Where the rows of keys first, first + 1, ... lie, and their scales: [4][ROOM] int64 at `addresses`."""
    tensors, scales = call.tensors, call.scales
    _find(call, table, first, count, tensors.k, tensors.k_strides, addresses)
    _find(call, table, first, count, tensors.v, tensors.v_strides, addresses + VALUES)
    _find(call, table, first, count, scales.k, scales.k_strides, addresses + K_SCALES)
    _find(call, table, first, count, scales.v, scales.v_strides, addresses + V_SCALES)


@njit(**OPTIONS)
def _find_tiles(call, table, first, last, num_tiles, size, addresses):
    """`_find_tile` of the tiles of `size` keys from key `first` on, each FOUND bytes further on. Returns the end of
    their keys."""
    end = min(first + num_tiles * size, last)
    while first < end:
        _find_tile(call, table, first, min(size, end - first), addresses)
        first += size
        addresses += FOUND
    return end


@njit(**OPTIONS)
def _order(call, tiles, count, size, head_start, head_end, ahead):
    """In which order rows of some heads are asked for: their addresses at `ahead`, and V's V_AHEAD further on. Returns
    how many of K, and of V.

    Intel's hardware brings more by itself within 4 KiB that are read in order and not all at once, and few requests of
    ours are open at a time. So every 4 KiB is asked for a piece now and then, row by row for all heads and tiles. On
    Zen enough are open (see `prefetch_far`), and heads come one after another; tiles of one head as on Intel's.

    Args:
        tiles, count, size: see `_find_tiles`; keys of all, and of a tile.
    """
    k_head, v_head, target = call.tensors.k_strides[2], call.tensors.v_strides[2], ahead
    heads = 1 if IS_ZEN else head_end - head_start
    for first in range(head_start, head_end, heads):
        for t in range(min(size, count)):
            rows = tiles + t * 8
            for _ in range(t, count, size):
                k_row, v_row = load_int(rows), load_int(rows + VALUES)
                for h in range(first, first + heads):
                    store_int(target, k_row + h * k_head)
                    store_int(target + V_AHEAD, v_row + h * v_head)
                    target += 8
                rows += FOUND
    return (target - ahead) // 8


@njit(**OPTIONS)
def _ask_for_rows(rows, count, num_bytes):
    """Bring rows nearer, whose addresses stand at `rows`."""
    for t in range(count):
        row = load_int(rows + t * 8)
        for line in range(0, num_bytes, LINE):
            prefetch_far(row + line)


@njit(**OPTIONS)
def _ask(addresses, count, offset):
    """Bring scales nearer while other work goes on; those of four keys mostly share a line."""
    for t in range(0, count, 4):
        prefetch_far(load_int(addresses + t * 8) + offset)


@njit(**INLINED)
def _meet(call, item, scratch, tile, h, asked, num_asked, k_tag, v_tag):
    """An item's rows of KV head h meet a tile.

    Args:
        tile: its first key, the end, and where their addresses stand.
        asked, num_asked: rows that are asked for meanwhile, see `_order`.
    """
    seq, split, row_start, row_end, head_start, head_end = item
    q, acc, state, s, slopes, _, factors, _ = scratch
    shape, tensors, transforms, rows, scales = call.shape, call.tensors, call.transforms, call.rows, call.scales
    s_base, slopes_base = np.int64(s.ctypes.data), np.int64(slopes.ctypes.data)
    start, blocks = np.int64(rows.kv_splits[seq, split]), (shape.group + HEADS - 1) // HEADS
    for row in range(row_start, row_end):
        lo = max(tile[0], start, np.int64(rows.lo[row]))
        count = min(tile[1], np.int64(rows.hi[row])) - lo
        if count <= 0:
            continue
        keys = tile[2] + (lo - tile[0]) * 8
        for b in range(blocks):
            block = (h - head_start) * blocks + b
            i = (row - row_start) * (head_end - head_start) * blocks + block
            row_acc = np.int64(acc.ctypes.data) + i * HEADS * shape.value_dim * 4
            _scores(
                keys,
                count,
                h * tensors.k_strides[2],
                asked,
                num_asked,
                np.int64(q.ctypes.data) + i * HEADS * shape.head_dim * 4,
                shape.head_dim,
                s_base,
                h * scales.k_strides[2],
                np.int64(factors.ctypes.data) + i * 32,
                k_tag,
            )
            if transforms.after != 0 or transforms.bias != 0:
                lanes = slopes_base + block * 32
                _transform(s_base, count, lo, np.int64(rows.positions[row]), lanes, transforms, shape)
            if count % 2 == 1:
                s[count] = -np.inf  # what the pair's second key gave
            _softmax(s_base, count, np.int64(state.ctypes.data) + i * 64, row_acc, shape.value_dim)
            if scales.v != 0:
                _scale(s_base, count, keys + V_SCALES, h * scales.v_strides[2])
            _add_values(
                keys + VALUES,
                count,
                h * tensors.v_strides[2],
                asked + V_AHEAD,
                num_asked,
                s_base,
                row_acc,
                shape.value_dim,
                v_tag,
            )
            num_asked = 0


@njit(**INLINED)
def _attend(call, item, scratch, k_tag, v_tag):
    """One item (sequence, split, first launch row, end, first KV head, end)."""
    seq, split, row_start, row_end, head_start, head_end = item
    q, acc, state, _, slopes, addresses, factors, ahead = scratch
    shape, tensors, rows, scales = call.shape, call.tensors, call.rows, call.scales
    blocks = (shape.group + HEADS - 1) // HEADS  # of four query heads, per KV head
    per_row = (head_end - head_start) * blocks
    q_base, acc_base = np.int64(q.ctypes.data), np.int64(acc.ctypes.data)
    asked = np.int64(ahead.ctypes.data)
    q_size, acc_size = HEADS * shape.head_dim * 4, HEADS * shape.value_dim * 4  # of a block
    here, factors_base = np.int64(addresses.ctypes.data), np.int64(factors.ctypes.data)
    there = here + GROUP * FOUND
    table = rows.block_table[seq]
    if call.transforms.bias != 0:
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
            _load_queries(call, row, h, q_base + unit * q_size, factors_base + unit * 32, k_tag)
    units = (row_end - row_start) * per_row
    acc[: units * HEADS] = 0
    state[:units, :8] = -np.inf
    state[:units, 8:] = 0

    # Heads and tiles are asked for together; one by one where a page's heads lie together: a head's rows are far apart.
    num_heads = head_end - head_start
    together = GROUP if num_heads == 1 or tensors.k_strides[2] > tensors.k_strides[1] else 1
    num_groups, num_tiles = (num_heads + together - 1) // together, max(together // num_heads, 1)
    edge = head_start + num_heads // num_groups
    # Tiles begin at multiples from the split's start: where a row's sums are cut must not depend on its neighbours.
    size = WIDE_TILE if size_of(k_tag) > 2 else TILE
    end = first - (first - start) % size
    next_end = _find_tiles(call, table, end, last, num_tiles, size, there)
    num_asked = _order(call, there, next_end - end, size, head_start, edge, asked)
    _ask_for_rows(asked, num_asked, shape.head_dim * size_of(k_tag))
    _ask_for_rows(asked + V_AHEAD, num_asked, shape.value_dim * size_of(v_tag))
    while end < last:
        set_start, end = end, next_end
        here, there = there, here
        next_end = _find_tiles(call, table, end, last, num_tiles, size, there)
        for group in range(num_groups):
            # While a group of heads is worked on, the next one is asked for.
            group_start = head_start + num_heads * group // num_groups
            group_end = head_start + num_heads * (group + 1) // num_groups
            if group_end < head_end:
                last_head = head_start + num_heads * (group + 2) // num_groups
                num_asked = _order(call, here, end - set_start, size, group_end, last_head, asked)
            else:
                num_asked = _order(call, there, next_end - end, size, head_start, edge, asked)
            steps, step, todo = (end - set_start + size - 1) // size * (group_end - group_start), 0, 0
            for tile in range(set_start, end, size):
                place = (tile - set_start) // size * FOUND
                after, num_after = there + place, min(size, next_end - end - (tile - set_start))
                for h in range(group_start, group_end):
                    step += 1
                    done, todo = todo, num_asked * step // steps
                    if scales.k != 0:
                        _ask(after + K_SCALES, num_after, h * scales.k_strides[2])
                    if scales.v != 0:
                        _ask(after + V_SCALES, num_after, h * scales.v_strides[2])
                    keys = (tile, min(tile + size, end), here + place)
                    _meet(call, item, scratch, keys, h, asked + done * 8, todo - done, k_tag, v_tag)

    for row in range(row_start, row_end):
        sees = max(start, np.int64(rows.lo[row])) < min(stop, np.int64(rows.hi[row]))
        for h in range(head_start, head_end):
            unit = (row - row_start) * per_row + (h - head_start) * blocks
            _store_results(call, row, h, split, sees, state[unit : unit + blocks], acc_base + unit * acc_size, v_tag)


@njit(**INLINED)
def work(call, k_tag, v_tag):
    """Take decode items until none is left; several threads may run this on one call.

    An item is (launch sequence, split, launch rows from and to, KV heads from and to); the largest is measured in
    blocks of four query heads, over its rows and KV heads.
    """
    items, units, counter = call.decode
    shape = call.shape
    scratch = (
        np.empty((units * HEADS, shape.head_dim), np.float32),
        np.empty((units * HEADS, shape.value_dim), np.float32),
        np.empty((units, 16), np.float32),
        np.empty((2 * TILE, HEADS), np.float32),
        np.empty((units, 8), np.float32),
        np.empty((2, GROUP * FOUND // 8), np.int64),
        np.empty((units, 8), np.float32),
        np.empty((2, GROUP * TILE + 1), np.int64),
    )
    while True:
        index = fetch_add(counter, 1)
        if index >= len(items):
            break
        item = items[index]
        _attend(call, (item[0], item[1], item[2], item[3], item[4], item[5]), scratch, k_tag, v_tag)
