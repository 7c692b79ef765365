"""The loop of an attend program over tiles of keys: online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.common import finite_peak, global_position, transform_scores
from octavo.kernels.triton.keys import find_rows, load_keys, rows_in_block


@triton.jit
def attend_keys(
    q_ptr,  # [BLOCK_M] pointers to the rows
    k_ptr,  # of this KV head, like v_ptr
    v_ptr,
    table_ptr,  # of this sequence
    is_row,  # [BLOCK_M] bool
    pos,  # [BLOCK_M] int32
    slopes,  # [BLOCK_M] float32 or None
    lo,  # [BLOCK_M] int32, local keys that a row sees: [lo, hi)
    hi,
    first,  # local keys that some row sees lie in [first, last)
    last,
    whole_begin,  # tiles [whole_begin, whole_end) are seen whole by every row
    whole_end,
    factor,
    pre_scale,
    soft_cap,
    rank,
    CAUSAL: tl.constexpr,
    SQRT_ALIBI: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    REST_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    REST_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_ROW: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_ROW: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """peak and total [BLOCK_M] in the units of `factor`, acc [BLOCK_M, BLOCK_VALUE] and rest [BLOCK_M, REST_VALUE].

    Widths that are no power of two come in two parts, BLOCK and REST. CAREFUL keeps values that are not finite from
    rows that do not see their key.
    """
    q = load_queries(q_ptr, is_row, 0, BLOCK_HEAD, HEAD_DIM, UPCAST)
    k_rows = rows_in_block(k_ptr, K_ROW, 0, BLOCK_HEAD, BLOCK_SIZE, BLOCK_KV)
    v_rows = rows_in_block(v_ptr, V_ROW, 0, BLOCK_VALUE, BLOCK_SIZE, BLOCK_KV)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, rest = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32), peak  # without a rest, any tensor will do
    if REST_HEAD > 0:
        q_rest = load_queries(q_ptr, is_row, BLOCK_HEAD, REST_HEAD, HEAD_DIM, UPCAST)
        k_rest_rows = rows_in_block(k_ptr, K_ROW, BLOCK_HEAD, REST_HEAD, BLOCK_SIZE, BLOCK_KV)
    if REST_VALUE > 0:
        rest = tl.zeros([BLOCK_M, REST_VALUE], tl.float32)
        v_rest_rows = rows_in_block(v_ptr, V_ROW, BLOCK_VALUE, REST_VALUE, BLOCK_SIZE, BLOCK_KV)

    for t in tl.range(first // BLOCK_KV, tl.cdiv(last, BLOCK_KV), num_stages=STAGES):
        j = t * BLOCK_KV + tl.arange(0, BLOCK_KV)
        block, row = find_rows(table_ptr, j, t, first, last, BLOCK_SIZE, BLOCK_KV)
        # No row of V may come from outside, where anything may stand: 0 * NaN is NaN. A score can be left out later.
        there = (j - first).to(tl.uint32) < (last - first).to(tl.uint32)
        k_at, v_at = block * K_BLOCK + row * K_ROW, block * V_BLOCK + row * V_ROW
        scores = multiply_keys(q, load_keys(k_rows, k_at, None, 0, BLOCK_HEAD, HEAD_DIM, UPCAST), None)
        if REST_HEAD > 0:
            k_rest = load_keys(k_rest_rows, k_at, None, BLOCK_HEAD, REST_HEAD, HEAD_DIM, UPCAST)
            scores = multiply_keys(q_rest, k_rest, scores)
        key_pos = global_position(j, WORLD, rank, INTERLEAVE)
        scores = transform_scores(scores, pre_scale, soft_cap, slopes, pos, key_pos, SQRT_ALIBI, CAUSAL)
        if CAREFUL or (t < whole_begin) | (t >= whole_end):
            scores = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = finite_peak(new_peak)
        rescale = tl.exp2((peak - shift) * factor)
        p = tl.exp2(tl.fma(scores, factor, (-shift * factor)[:, None]))
        total = total * rescale + tl.sum(p, 1)
        peak = new_peak
        v = load_keys(v_rows, v_at, there, 0, BLOCK_VALUE, VALUE_DIM, UPCAST)
        acc = add_values(acc * rescale[:, None], p, v, j, lo, hi, UPCAST, CAREFUL)
        if REST_VALUE > 0:
            v_rest = load_keys(v_rest_rows, v_at, there, BLOCK_VALUE, REST_VALUE, VALUE_DIM, UPCAST)
            rest = add_values(rest * rescale[:, None], p, v_rest, j, lo, hi, UPCAST, CAREFUL)
    return peak, total, acc, rest


@triton.jit
def load_queries(q_ptr, is_row, COLUMN: tl.constexpr, BLOCK_DIM: tl.constexpr, DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Columns [COLUMN, COLUMN + BLOCK_DIM) of the rows, 0 past DIM and in rows that are none."""
    column = COLUMN + tl.arange(0, BLOCK_DIM)
    q = tl.load(q_ptr[:, None] + column[None, :], mask=is_row[:, None] & (column < DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@triton.jit
def multiply_keys(q, k, scores):
    """scores + q . k in float32: [BLOCK_M, BLOCK_KV]; operands of different types meet in float32."""
    if q.dtype == k.dtype:
        return tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    else:
        return tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), scores, input_precision="ieee")


@triton.jit
def add_values(
    acc,  # [BLOCK_M, BLOCK_VALUE] float32
    p,  # [BLOCK_M, BLOCK_KV] float32, 0 where a row does not see a key
    v,  # [BLOCK_KV, BLOCK_VALUE]
    j,
    lo,
    hi,
    UPCAST: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """acc + p . v; with CAREFUL a value that is not finite makes NaN of the rows that see it, and of no other."""
    if CAREFUL:
        finite = (v - v) == 0
        # Products of 1e38 are infinite, and inf - inf is NaN: this needs no second accumulator.
        WIDE: tl.constexpr = tl.float32 if UPCAST else tl.bfloat16
        rows = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), 1e38, 0.0).to(WIDE)
        values = tl.where(finite, 0.0, 1e38).to(WIDE)
        acc = tl.dot(rows, values, acc, input_precision="ieee")
        acc = tl.dot(rows, -values, acc, input_precision="ieee")
        v = tl.where(finite, v, 0.0)
    return tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
