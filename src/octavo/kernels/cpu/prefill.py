"""Attention for many rows a sequence, in Numba: tiles of query rows against tiles of keys.

An item is one KV head's query rows of some tokens: rows of a tile are tokens x group, so that a group shares each
key. A tile of keys is widened to float32 once, K as columns, and met by six rows at a time, two vectors of keys
(or of value numbers) wide: twelve accumulators, the two vectors and a broadcast fill sixteen registers. Six rows
meet only the keys that one of them sees.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import LEAST, array_at, biased, find_rows, finish, key_position, load_query
from octavo.kernels.cpu.prefill_item import ask, find_bounds, find_terms
from octavo.kernels.cpu.prefill_tile import (
    KEYS,
    PANEL,
    SPAN,
    STEP,
    find_scales,
    scale_keys,
    scale_values,
)
from octavo.kernels.cpu.simd import (
    add,
    call_load_keys,
    call_load_values,
    exp2,
    fetch_add,
    first_lane,
    fma,
    keep_lanes,
    load_f32,
    load_int,
    load_one,
    load_splat_wide,
    load_wide,
    maximum,
    mul,
    peak,
    splat,
    splat_wide,
    store,
    store_one,
    sub,
    tanh,
    total,
)
from octavo.kernels.cpu.simd_base import WIDE
from octavo.kernels.cpu.stored import INLINED, OPTIONS, bytes_of

GROUP = 6
"""Rows that meet keys together."""

UNROLLED = 4
"""Steps of a sum that are written out: fewer jumps to foretell."""

LINE = KEYS * 4
"""Bytes of a row of scores."""


@njit(**OPTIONS)
def _step(panel, weight, line, sums):
    """One row of a panel, times six weights, added to [6][2] vectors."""
    a, a_, b, b_, c, c_, d, d_, e, e_, f, f_ = sums
    x, y = load_wide(panel), load_wide(panel + STEP)
    w = load_splat_wide(weight)
    a, a_ = fma(w, x, a), fma(w, y, a_)
    w = load_splat_wide(weight + line)
    b, b_ = fma(w, x, b), fma(w, y, b_)
    w = load_splat_wide(weight + 2 * line)
    c, c_ = fma(w, x, c), fma(w, y, c_)
    w = load_splat_wide(weight + 3 * line)
    d, d_ = fma(w, x, d), fma(w, y, d_)
    w = load_splat_wide(weight + 4 * line)
    e, e_ = fma(w, x, e), fma(w, y, e_)
    w = load_splat_wide(weight + 5 * line)
    f, f_ = fma(w, x, f), fma(w, y, f_)
    return a, a_, b, b_, c, c_, d, d_, e, e_, f, f_


@njit(**OPTIONS)
def _meet(weights, line, panel, count, out, out_line, fresh):
    """out[row] = (0 if fresh else out[row]) + sum over i < count of weights[row][i] * panel[i], for six rows.

    Args:
        weights: six rows of float32, `line` bytes apart; panel: [count][PANEL] float32.
        out: six rows [PANEL] float32, `out_line` bytes apart.
    """
    none = splat_wide(np.float32(0))
    if fresh:
        sums = (none, none, none, none, none, none, none, none, none, none, none, none)
    else:
        b, c, d, e, f = out + out_line, out + 2 * out_line, out + 3 * out_line, out + 4 * out_line, out + 5 * out_line
        sums = (
            load_wide(out),
            load_wide(out + STEP),
            load_wide(b),
            load_wide(b + STEP),
            load_wide(c),
            load_wide(c + STEP),
            load_wide(d),
            load_wide(d + STEP),
            load_wide(e),
            load_wide(e + STEP),
            load_wide(f),
            load_wide(f + STEP),
        )
    for _ in range(count // UNROLLED):
        for _ in range(UNROLLED):
            sums = _step(panel, weights, line, sums)
            panel += SPAN
            weights += 4
    for _ in range(count % UNROLLED):
        sums = _step(panel, weights, line, sums)
        panel += SPAN
        weights += 4
    for i in range(6):
        store(out, sums[2 * i])
        store(out + STEP, sums[2 * i + 1])
        out += out_line


@njit(**OPTIONS)
def _scores(q, k, s, start, end, head_dim):
    """s[row][key] = q[row] . k[key] for six rows and keys start to end - 1, multiples of PANEL.

    Args:
        q: six rows [head_dim] float32; k: see `load_keys`; s: six rows [KEYS] float32.
    """
    for c in range(start * 4, end * 4, SPAN):
        _meet(q, head_dim * 4, k + c * head_dim, head_dim, s + c, LINE, True)


@njit(**OPTIONS)
def _add_values(p, v, acc, start, end, width):
    """acc[row] += sum over keys start to end - 1 of p[row][key] * v[key], for six rows.

    Args:
        p: six rows [KEYS] float32; v: see `load_values`; acc: six rows [width] float32, width a multiple of PANEL.
    """
    for c in range(0, width * 4, SPAN):
        _meet(p + start * 4, LINE, v + c * KEYS + start * SPAN, end - start, acc + c, width * 4, False)


@njit(**OPTIONS)
def _transform(s, start, end, distances, shift, slope, transforms):
    """Soft cap and position bias on one row's scores s[start:end].

    Args:
        distances: address of [KEYS] float32, of the keys from an origin that lies `shift` before the row.
        slope: of the row's head.
    """
    after, slopes = splat_wide(np.float32(transforms.after)), splat_wide(slope)
    away = splat_wide(np.float32(shift))
    for c in range(start * 4, end * 4, STEP):
        x = load_wide(s + c)
        if transforms.after != 0:
            x = mul(after, tanh(x))
        if transforms.bias != 0:
            x = biased(x, slopes, sub(load_wide(distances + c), away), transforms.bias)
        store(s + c, x)


@njit(**OPTIONS)
def _find_tops(s, start, end, bounds, tile, tops):
    """The largest score of each of six rows s[:, start:end] to tops [6] float32; -inf takes the place of scores of
    keys that the row does not see.

    bounds: address of the keys that each row sees, [6][2] int64; the tile begins at key `tile`.
    """
    for _ in range(GROUP):
        lo, hi = load_int(bounds) - tile, load_int(bounds + 8) - tile
        top = splat_wide(np.float32(-np.inf))
        more = top
        if lo <= start and end <= hi:
            for c in range(s + start * 4, s + end * 4, SPAN):
                top, more = maximum(load_wide(c), top), maximum(load_wide(c + STEP), more)
        else:
            for c in range(start, end, WIDE):
                x = keep_lanes(load_wide(s + c * 4), lo - c, hi - c)
                store(s + c * 4, x)
                top = maximum(x, top)
        store_one(tops, peak(maximum(top, more)))
        s += LINE
        bounds += 16
        tops += 4


@njit(**OPTIONS)
def _softmax(s, start, end, tops, state, acc, width):
    """Scores of six rows s[:, start:end] to weights, in place; 0 where a row does not see the key.

    Args:
        tops: address of the rows' largest scores here, [6] float32, found before: so no row waits for the last one's.
        state: of each row's largest score and sum so far, [6][2] float32; acc: of [6][width] float32, rescaled where
            the largest score rises.
    """
    for _ in range(GROUP):
        top, before, sum_before = load_one(tops), load_one(state), load_one(state + 4)
        if top > before:
            factor = exp2(splat_wide(before - top))
            sum_before *= first_lane(factor)
            for d in range(0, width * 4, STEP):
                store(acc + d, mul(factor, load_wide(acc + d)))
        else:
            top = before
        # Finite, so that a row that has seen no key gets weights of 0.
        shift = splat_wide(max(top, LEAST))
        sums = splat_wide(np.float32(0))
        rest = sums
        for c in range(s + start * 4, s + end * 4, SPAN):
            x, y = exp2(sub(load_wide(c), shift)), exp2(sub(load_wide(c + STEP), shift))
            store(c, x)
            store(c + STEP, y)
            sums, rest = add(sums, x), add(rest, y)
        store_one(state, top)
        store_one(state + 4, sum_before + total(add(sums, rest)))
        s += LINE
        tops += 4
        state += 8
        acc += width * 4


@njit(**OPTIONS)
def _load_queries(call, row_start, num_rows, head, q):
    """Rows of one KV head, scaled: q [rows of six][head_dim], zeros past the last."""
    shape = call.shape
    q[num_rows:] = 0
    for r in range(num_rows):
        row, q_head = call.rows.rows[row_start + r // shape.group], head * shape.group + r % shape.group
        target = np.int64(q.ctypes.data) + r * shape.head_dim * 4
        factor = splat(load_query(call, row, q_head, target))
        for d in range(0, shape.head_dim * 4, 32):
            store(target + d, mul(factor, load_f32(target + d)))


@njit(**INLINED)
def _attend(call, item, scratch):
    """One item (sequence, split, first launch row, end, KV head); whether its output is finite."""
    seq, split, row_start, row_end, head = item
    q, acc, state, s, k, v, distances, found, bounds, terms, factors, tops = scratch
    shape, tensors, transforms, scales, pages = call.shape, call.tensors, call.transforms, call.scales, call.pages
    k_bytes, v_bytes = shape.head_dim * bytes_of(pages.k_kind), shape.value_dim * bytes_of(pages.v_kind)
    table = call.rows.block_table[seq]
    num_rows, width = (row_end - row_start) * shape.group, acc.shape[1]
    q_base, acc_base, state_base = np.int64(q.ctypes.data), np.int64(acc.ctypes.data), np.int64(state.ctypes.data)
    s_base, k_base, v_base = np.int64(s.ctypes.data), np.int64(k.ctypes.data), np.int64(v.ctypes.data)
    start, first, last = find_bounds(call, item, bounds)
    bounds_base, tops_base = np.int64(bounds.ctypes.data), np.int64(tops.ctypes.data)
    if transforms.bias != 0:
        find_terms(call, item, terms)
    _load_queries(call, row_start, num_rows, head, q)
    acc[:] = 0
    state[:, 0] = -np.inf
    state[:, 1] = 0

    keys = np.int64(found.ctypes.data)
    next_keys, values, next_values = keys + KEYS * 8, keys + KEYS * 16, keys + KEYS * 24
    room, factors_base = keys + KEYS * 32, np.int64(factors.ctypes.data)
    k_head, v_head = head * tensors.k_strides[2], head * tensors.v_strides[2]
    first_tile = first - (first - start) % KEYS
    begin, end = first - first_tile, min(last - first_tile, KEYS)
    find_rows(table, shape.block_size, first, end - begin, tensors.k, tensors.k_strides, next_keys + begin * 8)
    find_rows(table, shape.block_size, first, end - begin, tensors.v, tensors.v_strides, next_values + begin * 8)
    per_step = (KEYS * GROUP + num_rows - 1) // num_rows  # rows of the next tile to ask for at each six rows
    for tile in range(first_tile, last, KEYS):
        begin, end = max(first - tile, 0), min(last - tile, KEYS)
        keys, next_keys, values, next_values = next_keys, keys, next_values, values
        num_next = max(min(last - tile - KEYS, KEYS), 0)
        find_rows(table, shape.block_size, tile + KEYS, num_next, tensors.k, tensors.k_strides, next_keys)
        find_rows(table, shape.block_size, tile + KEYS, num_next, tensors.v, tensors.v_strides, next_values)
        call_load_keys(pages.load_keys, keys, begin, end, k_head, shape.head_dim, k_base, 0)
        call_load_values(pages.load_values, values, begin, end, v_head, shape.value_dim, v_base)
        if scales.k != 0:
            offset, into = head * scales.k_strides[2], factors_base + begin * 4
            find_scales(
                table, shape.block_size, tile + begin, end - begin, scales.k, scales.k_strides, offset, room, into
            )
            scale_keys(k_base, begin, end, shape.head_dim, factors_base)
        if scales.v != 0:
            offset, into = head * scales.v_strides[2], factors_base + begin * 4
            find_scales(
                table, shape.block_size, tile + begin, end - begin, scales.v, scales.v_strides, offset, room, into
            )
            scale_values(v_base, begin, end, width, factors_base)
        if transforms.bias != 0:
            origin = np.int64(call.rows.positions[row_start])
            for t in range(KEYS):
                distances[t] = key_position(tile + t, shape) - origin
        asked = 0
        for r in range(0, num_rows, GROUP):
            for t in range(asked, min(asked + per_step, num_next)):
                ask(load_int(next_keys + t * 8) + k_head, k_bytes)
                ask(load_int(next_values + t * 8) + v_head, v_bytes)
            asked += per_step
            # The keys that one of the six rows sees, and all panels that hold them.
            lo, hi = np.int64(KEYS), np.int64(0)
            for i in range(r, r + GROUP):
                row_lo, row_hi = max(bounds[i, 0] - tile, 0), min(bounds[i, 1] - tile, KEYS)
                if row_lo < row_hi:
                    lo, hi = min(lo, row_lo), max(hi, row_hi)
            if lo >= hi:
                continue
            begin, end = lo // PANEL * PANEL, (hi + PANEL - 1) // PANEL * PANEL
            _scores(q_base + r * shape.head_dim * 4, k_base, s_base, begin, end, shape.head_dim)
            if transforms.after != 0 or transforms.bias != 0:
                distances_base = np.int64(distances.ctypes.data)
                for i in range(r, r + GROUP):
                    row_s = s_base + (i - r) * LINE
                    _transform(row_s, begin, end, distances_base, terms[i, 0], terms[i, 1], transforms)
            row_acc = acc_base + r * width * 4
            _find_tops(s_base, begin, end, bounds_base + r * 16, tile, tops_base)
            _softmax(s_base, begin, end, tops_base, state_base + r * 8, row_acc, width)
            _add_values(s_base, v_base, row_acc, lo, hi, width)

    finite = True
    for r in range(num_rows):
        row_acc = acc_base + r * width * 4
        sums = load_f32(row_acc)
        for d in range(8, shape.value_dim, 8):
            sums = add(sums, load_f32(row_acc + d * 4))
        # Keys were seen, and no weight came of them: all scores are -inf.
        lost = state[r, 1] == 0 and bounds[r, 0] < bounds[r, 1]
        finite = finite and not lost and np.isfinite(total(sums))
        q_head, q_row = head * shape.group + r % shape.group, call.rows.rows[row_start + r // shape.group]
        finish(call, q_head, q_row, split, state[r, 0], state[r, 1], row_acc)
    return finite


@njit(**INLINED)
def work(call):
    """Take prefill items until none is left; several threads may run this on one call.

    An item is (launch sequence, split, launch rows from and to, KV head); the largest is measured in launch rows. The
    byte `call.redo` of an item becomes 1 where an output is not finite: a value that is not finite may have reached
    rows that do not see its key (0 * NaN is NaN).
    """
    items, max_rows, counter = call.prefill
    shape, redo = call.shape, array_at(call.redo, len(items), np.uint8)
    num_rows = (max_rows * shape.group + GROUP - 1) // GROUP * GROUP
    width = (shape.value_dim + PANEL - 1) // PANEL * PANEL
    scratch = (
        np.empty((num_rows, shape.head_dim), np.float32),
        np.empty((num_rows, width), np.float32),
        np.empty((num_rows, 2), np.float32),
        np.empty((GROUP, KEYS), np.float32),
        np.zeros((KEYS // PANEL, shape.head_dim, PANEL), np.float32),
        np.zeros((width // PANEL, KEYS, PANEL), np.float32),
        np.empty(KEYS, np.float32),
        np.empty((5, KEYS), np.int64),
        np.empty((num_rows, 2), np.int64),
        np.zeros((num_rows, 2), np.float32),
        np.zeros(KEYS, np.float32),
        np.empty(GROUP, np.float32),
    )
    while True:
        index = fetch_add(counter, 1)
        if index >= len(items):
            break
        item = items[index]
        finite = _attend(call, (item[0], item[1], item[2], item[3], item[4]), scratch)
        redo[index] = 0 if finite else 1
