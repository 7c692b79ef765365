"""Attention for many rows a sequence by products of bfloat16, where this machine has instructions for them, in Numba.

As `prefill`, but with sums in float32 of products of bfloat16. Scores stand as columns, [key][row]: then K is
multiplied as it lies, a vector holds one key's scores of many rows, so that a softmax needs no sums across lanes,
and two keys' weights make the words that are read. Values are turned once a tile. Q, K and V are not rounded: wider
numbers are sums of several bfloat16, 8-bit codes are bfloat16 too, and scales stay outside of the products. Weights
are as exact as q: of bfloat16 queries they are rounded.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import (
    LEAST,
    array_at,
    biased,
    find_output,
    find_rows,
    finish,
    key_position,
    settle,
)
from octavo.kernels.cpu.prefill_item import ask, find_bounds, find_terms
from octavo.kernels.cpu.prefill_matrix_products import give_back, multiply, take
from octavo.kernels.cpu.prefill_matrix_tile import (
    HALF,
    KEYS,
    LINE,
    SQUARE,
    load_queries,
    turn,
)
from octavo.kernels.cpu.prefill_tile import find_scales
from octavo.kernels.cpu.simd import (
    add,
    any_above,
    call_load_keys,
    call_load_values,
    exp2,
    fetch_add,
    inverse,
    load_bf16,
    load_f32,
    load_int,
    load_one,
    load_splat_wide,
    load_wide,
    maximum,
    mul,
    prefetch,
    splat,
    splat_wide,
    store,
    store_int,
    store_one,
    store_transposed,
    sub,
    tanh,
    total,
)
from octavo.kernels.cpu.simd_base import WIDE
from octavo.kernels.cpu.simd_matrix import (
    BLOCK,
    CONFIG_BYTES,
    keep_between,
    rest_of,
    rounded,
    rounded_even,
    store_upper,
    words_of,
)
from octavo.kernels.cpu.stored import BFLOAT16, INLINED, OPTIONS, bytes_of, parts_of_kind, unit_of

STEP = WIDE * 4
"""Bytes of a vector."""


@njit(**OPTIONS)
def _scores(k, k_parts, q, q_parts, s, start, end, depth):
    """s[key][row] = k[key] . q[row] for a block of rows and keys start to end - 1, multiples of BLOCK."""
    count, step = depth // BLOCK, q_parts * SQUARE
    for t in range(start, end, BLOCK):
        square = k + t // BLOCK * count * k_parts * SQUARE
        multiply(square, k_parts, q, q_parts, step, q + 2 * SQUARE, step, count, s + t * LINE, True, 0)


@njit(**OPTIONS)
def _add_values(v, v_parts, p, p_parts, third, acc, start, end, width, fresh, room):
    """acc[number][row] = (0 if fresh else acc[number][row]) + sum over keys start to end - 1 of v[number][key] *
    p[key][row], for a block of rows.

    p, third: weights as `_softmax` leaves them; room: for [BLOCK][BLOCK] float32.
    """
    p, third, count = p + start * LINE, third + start // 2 * LINE, (end - start) // BLOCK
    for d in range(0, width, BLOCK):
        square = v + (d // BLOCK * (KEYS // BLOCK) + start // BLOCK) * v_parts * SQUARE
        multiply(square, v_parts, p, p_parts, 2 * SQUARE, third, SQUARE, count, acc + d * LINE, fresh, room)


@njit(**OPTIONS)
def _transform(s, start, end, rows, k_scales, distances, transforms, has_edges):
    """Scores s[start:end] of a block of rows times their factors, with soft cap and position bias; -inf where a row
    does not see the key, if has_edges.

    Args:
        rows: addresses of facts of the block's rows, [BLOCK] float32 each: factor, shift and slope of the bias, first
            key seen and end.
        k_scales: of the keys, [KEYS] float32; 0: none.
        distances: of the keys from an origin that lies the row's shift before it, [KEYS] float32.
    """
    factors, shifts, slopes, starts, ends = rows
    after = splat_wide(np.float32(transforms.after))
    for c in range(0, LINE, STEP):
        factor, lo, hi = load_wide(factors + c), load_wide(starts + c), load_wide(ends + c)
        shift, slope = load_wide(shifts + c), load_wide(slopes + c)
        for t in range(start, end):
            x = mul(factor, load_wide(s + t * LINE + c))
            if k_scales != 0:
                x = mul(x, load_splat_wide(k_scales + t * 4))
            if transforms.after != 0:
                x = mul(after, tanh(x))
            if transforms.bias != 0:
                x = biased(x, slope, sub(load_splat_wide(distances + t * 4), shift), transforms.bias)
            if has_edges:
                x = keep_between(x, splat_wide(np.float32(t)), lo, hi)
            store(s + t * LINE + c, x)


@njit(**OPTIONS)
def _softmax(s, start, end, factors, v_scales, tops, sums, acc, width, fresh, parts, third):
    """Scores s[start:end] times factors to weights, as words of keys i and HALF + i of each block: the first part where
    key i's scores were, the second where key HALF + i's were.

    Args:
        parts: of the weights, which are rounded where it is 1; third: where the third parts belong, as the others, in
            blocks of their own.
        v_scales: of the keys, [KEYS] float32, which the weights are multiplied with; 0: none.
        tops, sums: each row's largest score and sum of weights so far, [BLOCK] float32.
        acc: [width][BLOCK] float32, rescaled where the largest score rises, and asked for; not if fresh.
    """
    ahead = acc
    for c in range(0, LINE, STEP):
        factor, before, total_sums = load_wide(factors + c), load_wide(tops + c), load_wide(sums + c)
        top = splat_wide(np.float32(-np.inf))
        more = top
        for x in range(s + start * LINE + c, s + end * LINE + c, 2 * LINE):
            top, more = maximum(load_wide(x), top), maximum(load_wide(x + LINE), more)
        top = maximum(mul(factor, maximum(top, more)), before)
        # Finite, so that a row that has seen no key gets weights of 0.
        shift = maximum(top, splat_wide(LEAST))
        if any_above(top, before):
            rescale = exp2(sub(before, shift))
            if not fresh:
                for x in range(acc + c, acc + c + width * LINE, LINE):
                    store(x, mul(rescale, load_wide(x)))
            total_sums = mul(rescale, total_sums)
            store(tops + c, top)
        rest = splat_wide(np.float32(0))
        for block in range(start, end, BLOCK):
            by_key, small = v_scales + block * 4, third + block // 2 * LINE + c
            at = s + block * LINE + c
            for x_at in range(at, at + HALF * LINE, LINE):
                prefetch(ahead)
                prefetch(ahead + 64)
                ahead += 128
                # Rounded as the largest was: of scores in the billions a fused step would leave more than 0.
                y_at = x_at + HALF * LINE
                x = exp2(sub(mul(factor, load_wide(x_at)), shift))
                y = exp2(sub(mul(factor, load_wide(y_at)), shift))
                total_sums, rest = add(total_sums, x), add(rest, y)
                if v_scales != 0:
                    x, y = mul(x, load_splat_wide(by_key)), mul(y, load_splat_wide(by_key + HALF * 4))
                    by_key += 4
                if parts > 1:
                    store(x_at, words_of(x, y))
                    x, y = rest_of(x), rest_of(y)
                    store(y_at, words_of(x, y))
                    if parts > 2:
                        store(small, words_of(rest_of(x), rest_of(y)))
                        small += LINE
                elif v_scales != 0:
                    store(x_at, words_of(rounded_even(x), rounded_even(y)))  # a scale may be any NaN
                else:
                    store(x_at, words_of(rounded(x), rounded(y)))
        store(sums + c, add(total_sums, rest))


@njit(**OPTIONS)
def _fill(addresses, start, end, value):
    """`value` in place of addresses start to end - 1."""
    for t in range(start, end):
        store_int(addresses + t * 8, value)


@njit(**OPTIONS)
def _word(acc, factor):
    """Eight rows' results at two neighbouring numbers, in bfloat16."""
    return words_of(rounded_even(mul(factor, load_f32(acc))), rounded_even(mul(factor, load_f32(acc + LINE))))


@njit(**OPTIONS)
def _store_results(call, item, num_rows, tops, sums, acc, width, bounds, room):
    """Write the outputs of an item's rows; whether they are finite.

    Args:
        room: for [8][width] float32, and eight more.
    """
    _, split, row_start, _, head = item
    shape, finite, factors = call.shape, True, room + 8 * width * 4
    in_words = call.tensors.out_kind == BFLOAT16 and call.scales.out == 0
    # Otherwise a factor comes of a sum alone.
    settled = call.tensors.lse != 0 or len(call.sinks) > 0
    for first in range(0, num_rows, 8):
        block = acc + first // BLOCK * width * LINE + first % BLOCK * 4
        count = min(8, num_rows - first)
        together = splat(np.float32(0))
        more = together
        if in_words:
            factor = mul(inverse(load_f32(sums + first * 4)), splat(unit_of(call.pages.v_kind)))
            if settled:
                for i in range(count):
                    r = first + i
                    q_head, q_row = head * shape.group + r % shape.group, call.rows.rows[row_start + r // shape.group]
                    m, l = load_one(tops + r * 4), load_one(sums + r * 4)
                    store_one(factors + i * 4, settle(call, q_head, q_row, split, m, l))
                factor = load_f32(factors)
            for d in range(0, shape.value_dim, 16):
                at = block + d * LINE
                for x in range(at, at + 16 * LINE, 2 * LINE):
                    together, more = add(together, load_f32(x)), add(more, load_f32(x + LINE))
                store_transposed(
                    _word(at, factor),
                    _word(at + 2 * LINE, factor),
                    _word(at + 4 * LINE, factor),
                    _word(at + 6 * LINE, factor),
                    _word(at + 8 * LINE, factor),
                    _word(at + 10 * LINE, factor),
                    _word(at + 12 * LINE, factor),
                    _word(at + 14 * LINE, factor),
                    room + d * 2,
                    width * 2,
                )
        else:
            for d in range(0, shape.value_dim, 8):
                at = block + d * LINE
                for x in range(at, at + 8 * LINE, 2 * LINE):
                    together, more = add(together, load_f32(x)), add(more, load_f32(x + LINE))
                turn(at, np.int64(LINE), room + d * 4, width * 4)
        finite = finite and np.isfinite(total(add(together, more)))
        for i in range(count):
            r = first + i
            q_head, q_row = head * shape.group + r % shape.group, call.rows.rows[row_start + r // shape.group]
            m, l = load_one(tops + r * 4), load_one(sums + r * 4)
            # Keys were seen, and no weight came of them: all scores are -inf.
            finite = finite and not (l == 0 and bounds[r, 0] < bounds[r, 1])
            if in_words:
                target, source = find_output(call, q_head, q_row, split), room + i * width * 2
                for d in range(0, shape.value_dim * 2, 16):
                    store_upper(target + d, load_bf16(source + d))
            else:
                finish(call, q_head, q_row, split, m, l, room + i * width * 4)
    return finite


@njit(**INLINED)
def _attend(call, item, scratch, in_one):
    """One item (sequence, split, first launch row, end, KV head); whether its output is finite."""
    seq, _, row_start, row_end, head = item
    operands, rooms, facts, facts_line, bounds, terms, fresh, found, numbers = scratch
    q, acc, k, v, s, third, room = operands
    query_room, result_room, zeros = rooms
    shape, tensors, transforms, scales, pages = call.shape, call.tensors, call.transforms, call.scales, call.pages
    k_bytes, v_bytes = shape.head_dim * bytes_of(pages.k_kind), shape.value_dim * bytes_of(pages.v_kind)
    k_parts, v_parts = (1, 1) if in_one else (parts_of_kind(pages.k_kind), parts_of_kind(pages.v_kind))
    table = call.rows.block_table[seq]
    num_rows = (row_end - row_start) * shape.group
    all_rows = (num_rows + BLOCK - 1) // BLOCK * BLOCK
    depth = (shape.head_dim + BLOCK - 1) // BLOCK * BLOCK
    width = (shape.value_dim + BLOCK - 1) // BLOCK * BLOCK
    p_parts = parts_of_kind(tensors.q_kind)
    q_parts = p_parts if scales.k == 0 else 1
    start, first, last = find_bounds(call, item, bounds)
    # Of each row: factor of its scores, largest score, sum, shift and slope of its bias; keys seen of the tile.
    factors, tops, sums, shifts = facts, facts + facts_line, facts + 2 * facts_line, facts + 3 * facts_line
    slopes, starts, ends, ones = (
        shifts + facts_line,
        shifts + 2 * facts_line,
        shifts + 3 * facts_line,
        facts + 7 * facts_line,
    )
    if transforms.bias != 0:
        find_terms(call, item, terms)
        for r in range(num_rows):
            store_one(shifts + r * 4, terms[r, 0])
            store_one(slopes + r * 4, terms[r, 1])
    load_queries(call, row_start, num_rows, head, q, depth, q_parts, factors, query_room)
    for r in range(0, all_rows * 4, STEP):
        store(tops + r, splat_wide(np.float32(-np.inf)))
        store(sums + r, splat_wide(np.float32(0)))
        store(ones + r, splat_wide(np.float32(1)))
    fresh[: all_rows // BLOCK] = 1

    keys = found
    next_keys, values, next_values, places = keys + KEYS * 8, keys + KEYS * 16, keys + KEYS * 24, keys + KEYS * 32
    distances, k_scales, v_scales = numbers, numbers + KEYS * 4, numbers + KEYS * 8
    k_head, v_head = head * tensors.k_strides[2], head * tensors.v_strides[2]
    first_tile = first - (first - start) % KEYS
    begin, end = first - first_tile, min(last - first_tile, KEYS)
    find_rows(table, shape.block_size, first, end - begin, tensors.k, tensors.k_strides, next_keys + begin * 8)
    find_rows(table, shape.block_size, first, end - begin, tensors.v, tensors.v_strides, next_values + begin * 8)
    per_step = (KEYS * BLOCK + num_rows - 1) // num_rows  # rows of the next tile to ask for at each block
    must_transform = scales.k != 0 or transforms.after != 0 or transforms.bias != 0
    for tile in range(first_tile, last, KEYS):
        begin, end = max(first - tile, 0), min(last - tile, KEYS)
        keys, next_keys, values, next_values = next_keys, keys, next_values, values
        num_next = max(min(last - tile - KEYS, KEYS), 0)
        find_rows(table, shape.block_size, tile + KEYS, num_next, tensors.k, tensors.k_strides, next_keys)
        find_rows(table, shape.block_size, tile + KEYS, num_next, tensors.v, tensors.v_strides, next_values)
        # Blocks of keys are met whole: zeros stand in for rows that must not be read.
        block_begin, block_end = begin // BLOCK * BLOCK, (end + BLOCK - 1) // BLOCK * BLOCK
        _fill(keys, block_begin, begin, zeros - k_head)
        _fill(keys, end, block_end, zeros - k_head)
        _fill(values, block_begin, begin, zeros - v_head)
        _fill(values, end, block_end, zeros - v_head)
        call_load_keys(pages.load_keys, keys, block_begin, block_end, k_head, shape.head_dim, k, depth)
        call_load_values(pages.load_values, values, block_begin, block_end, v_head, shape.value_dim, v)
        if scales.k != 0:
            offset, into = head * scales.k_strides[2], k_scales + begin * 4
            find_scales(
                table, shape.block_size, tile + begin, end - begin, scales.k, scales.k_strides, offset, places, into
            )
        if scales.v != 0:
            offset, into = head * scales.v_strides[2], v_scales + begin * 4
            find_scales(
                table, shape.block_size, tile + begin, end - begin, scales.v, scales.v_strides, offset, places, into
            )
        if transforms.bias != 0:
            origin = np.int64(call.rows.positions[row_start])
            for t in range(KEYS):
                store_one(distances + t * 4, np.float32(key_position(tile + t, shape) - origin))
        asked = 0
        for r in range(0, num_rows, BLOCK):
            for t in range(asked, min(asked + per_step, num_next)):
                ask(load_int(next_keys + t * 8) + k_head, k_bytes)
                ask(load_int(next_values + t * 8) + v_head, v_bytes)
            asked += per_step
            # The keys that one of the rows sees, and those that all of them see.
            lo, hi, all_lo, all_hi = np.int64(KEYS), np.int64(0), np.int64(0), np.int64(KEYS)
            for i in range(r, r + BLOCK):
                row_lo, row_hi = max(bounds[i, 0] - tile, 0), min(bounds[i, 1] - tile, KEYS)
                row_hi = max(row_hi, row_lo)
                store_one(starts + i * 4, np.float32(row_lo))
                store_one(ends + i * 4, np.float32(row_hi))
                all_lo, all_hi = max(all_lo, row_lo), min(all_hi, row_hi)
                if row_lo < row_hi:
                    lo, hi = min(lo, row_lo), max(hi, row_hi)
            if lo >= hi:
                continue
            lo, hi = lo // BLOCK * BLOCK, (hi + BLOCK - 1) // BLOCK * BLOCK
            has_edges = lo < all_lo or all_hi < hi
            _scores(k, k_parts, q + r * depth * 2 * q_parts, q_parts, s, lo, hi, depth)
            row_factors, row_acc = factors + r * 4, acc + r * width * 4
            if has_edges or must_transform:
                rows = row_factors, shifts + r * 4, slopes + r * 4, starts + r * 4, ends + r * 4
                by_key = k_scales if scales.k != 0 else np.int64(0)
                _transform(s, lo, hi, rows, by_key, distances, transforms, has_edges)
                row_factors = ones
            by_value = v_scales if scales.v != 0 else np.int64(0)
            is_fresh = fresh[r // BLOCK] != 0
            row_tops, row_sums = tops + r * 4, sums + r * 4
            _softmax(s, lo, hi, row_factors, by_value, row_tops, row_sums, row_acc, width, is_fresh, p_parts, third)
            _add_values(v, v_parts, s, p_parts, third, row_acc, lo, hi, width, is_fresh, room)
            fresh[r // BLOCK] = 0
    for r in range(0, num_rows, BLOCK):
        if fresh[r // BLOCK] != 0:  # rows that see no keys
            for d in range(acc + r * width * 4, acc + (r + BLOCK) * width * 4, STEP):
                store(d, splat_wide(np.float32(0)))
    return _store_results(call, item, num_rows, tops, sums, acc, width, bounds, result_room)


@njit(**INLINED)
def work(call, in_one):
    """Take prefill items until none is left; as `prefill.work`. in_one: known when it is compiled, whether numbers of K
    and V are one bfloat16 each, which makes a quicker kernel."""
    items, max_rows, counter = call.prefill
    shape, redo = call.shape, array_at(call.redo, len(items), np.uint8)
    num_rows = (max_rows * shape.group + BLOCK - 1) // BLOCK * BLOCK
    depth = (shape.head_dim + BLOCK - 1) // BLOCK * BLOCK
    width = (shape.value_dim + BLOCK - 1) // BLOCK * BLOCK
    q_bytes = depth * 2 * (parts_of_kind(call.tensors.q_kind) if call.scales.k == 0 else 1)
    k_bytes, v_bytes = depth * 2 * parts_of_kind(call.pages.k_kind), width * 2 * parts_of_kind(call.pages.v_kind)
    facts_line, bounds, terms = num_rows * 4, np.empty((num_rows, 2), np.int64), np.zeros((num_rows, 2), np.float32)
    fresh = np.empty(num_rows // BLOCK, np.uint8)
    # All else in one piece of memory, every part at the beginning of a cache line.
    memory = np.zeros(
        num_rows * (q_bytes + width * 4)
        + KEYS * (k_bytes + v_bytes + LINE + LINE // 2 + 52)
        + BLOCK * LINE
        + depth * 52
        + width * 32
        + max(depth, width) * 4
        + 8 * facts_line
        + 64
        + 2 * CONFIG_BYTES
        + 63,
        np.uint8,
    )
    q = (np.int64(memory.ctypes.data) + 63) // 64 * 64
    acc = q + num_rows * q_bytes
    k = acc + num_rows * width * 4
    v = k + KEYS * k_bytes
    s = v + KEYS * v_bytes
    third = s + KEYS * LINE
    room = third + KEYS // 2 * LINE
    found = room + BLOCK * LINE
    numbers = found + KEYS * 40
    query_room = numbers + KEYS * 12
    result_room = query_room + depth * 52
    zeros = result_room + width * 32 + 64
    facts = zeros + max(depth, width) * 4
    before = facts + 8 * facts_line
    operands, rooms = (q, acc, k, v, s, third, room), (query_room, result_room, zeros)
    scratch = (operands, rooms, facts, facts_line, bounds, terms, fresh, found, numbers)
    take(before)
    while True:
        index = fetch_add(counter, 1)
        if index >= len(items):
            break
        item = items[index]
        finite = _attend(call, (item[0], item[1], item[2], item[3], item[4]), scratch, in_one)
        redo[index] = 0 if finite else 1
    give_back(before)
    # Numba frees what is not named any more, whoever has its address.
    memory[0] = 0
