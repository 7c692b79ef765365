"""The loop of an attend program over tiles of keys: online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.common import finite_peak, global_position, transform_scores
from octavo.kernels.triton.keys import find_rows, load_keys, load_pairs, rows_in_block, scales_in_block
from octavo.kernels.triton.queries import load_queries

SMALLEST = tl.constexpr(1e-36)


@triton.jit
def attend_keys(
    q_ptr,  # [BLOCK_M] pointers to the rows
    k_ptr,  # of this KV head, like v_ptr
    v_ptr,
    k_scale_ptr,  # of this KV head: of rows of int8 K, or None
    v_scale_ptr,  # of rows of int8 V, or None
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
    row_scale,  # float32, number or [BLOCK_M]: static scales of q and of K
    soft_cap,
    rank,
    zero,  # 0, of which no compiler need know
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
    K_SCALE_BLOCK: tl.constexpr,
    K_SCALE_ROW: tl.constexpr,
    V_SCALE_BLOCK: tl.constexpr,
    V_SCALE_ROW: tl.constexpr,
    Q_NUMBER: tl.constexpr,
    K_NUMBER: tl.constexpr,
    V_NUMBER: tl.constexpr,
    V_TYPE: tl.constexpr,
    SHIFT: tl.constexpr,
    ISA: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """log_total and total [BLOCK_M], acc [BLOCK_M, BLOCK_VALUE] and rest [BLOCK_M, REST_VALUE].

    log_total is the logarithm to base 2 of the sum of a row's weights; acc and rest are to be divided by total.

    Sums of products are written as `fma`: left to the compiler, whether a product is rounded first would depend on what
    is compiled around it, and the same row would not have the same bits in every variant of the kernel.

    Widths that are no power of two come in two parts, BLOCK and REST; rows of fp8 K and of 8-bit V in their even and
    their odd columns. CAREFUL keeps values that are not finite from rows that do not see their key.
    """
    K_PAIRS: tl.constexpr = K_NUMBER == "e4m3" or K_NUMBER == "e5m2"
    V_PAIRS: tl.constexpr = V_NUMBER != "plain"
    q, q_rest, q_scale = load_queries(q_ptr, is_row, BLOCK_HEAD, REST_HEAD, HEAD_DIM, Q_NUMBER, K_NUMBER, UPCAST)
    unit, wide_unit = factor, factor
    if K_NUMBER != "plain":
        if pre_scale is None:
            # Not 0, which would make NaN of the peak of a row that has seen nothing yet.
            unit = factor * row_scale * q_scale
            unit = tl.where(unit < SMALLEST, SMALLEST, unit)
            wide_unit = unit[:, None]
        else:
            pre_scale = (pre_scale * row_scale * q_scale)[:, None]
    k_rows = rows_in_block(k_ptr, K_ROW, 0, BLOCK_HEAD, BLOCK_SIZE, BLOCK_KV)
    v_rows = rows_in_block(v_ptr, V_ROW, 0, BLOCK_VALUE, BLOCK_SIZE, BLOCK_KV)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, rest = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32), peak  # without a rest, any tensor will do
    if REST_HEAD > 0 and not K_PAIRS:
        k_rest_rows = rows_in_block(k_ptr, K_ROW, BLOCK_HEAD, REST_HEAD, BLOCK_SIZE, BLOCK_KV)
    if REST_VALUE > 0:
        rest = tl.zeros([BLOCK_M, REST_VALUE], tl.float32)
        if not V_PAIRS:
            v_rest_rows = rows_in_block(v_ptr, V_ROW, BLOCK_VALUE, REST_VALUE, BLOCK_SIZE, BLOCK_KV)
    if K_NUMBER == "int8":
        k_scales = scales_in_block(k_scale_ptr, K_SCALE_ROW, BLOCK_SIZE, BLOCK_KV)
    if v_scale_ptr is not None:
        v_scales = scales_in_block(v_scale_ptr, V_SCALE_ROW, BLOCK_SIZE, BLOCK_KV)

    # From 0, not from the first tile: where the start is worked out late, Triton 3.7 no longer sees that the numbers of
    # a row follow each other. It then loads K and V one number at a time, and outside its pipeline.
    begin = first // BLOCK_KV
    for i in tl.range(0, tl.cdiv(last, BLOCK_KV) - begin, num_stages=STAGES):
        t = begin + i
        j = t * BLOCK_KV + (tl.arange(0, BLOCK_KV) + zero)
        block, row = find_rows(table_ptr, j, t, first, last, BLOCK_SIZE, BLOCK_KV)
        # No row of V may come from outside, where anything may stand: 0 * NaN is NaN. A score can be left out later.
        there = (j - first).to(tl.uint32) < (last - first).to(tl.uint32)
        k_at, v_at = block * K_BLOCK + row * K_ROW, block * V_BLOCK + row * V_ROW
        if K_PAIRS:
            k, k_rest = load_pairs(k_rows, k_at, None, BLOCK_HEAD, HEAD_DIM, K_NUMBER, tl.float16, ISA)
            scores = multiply_keys(q_rest, k_rest, multiply_keys(q, k, None))
        else:
            scores = multiply_keys(q, load_keys(k_rows, k_at, None, 0, BLOCK_HEAD, HEAD_DIM, UPCAST), None)
            if REST_HEAD > 0:
                k_rest = load_keys(k_rest_rows, k_at, None, BLOCK_HEAD, REST_HEAD, HEAD_DIM, UPCAST)
                scores = multiply_keys(q_rest, k_rest, scores)
        if K_NUMBER == "int8":
            k_scale = tl.load(k_scales + (block * K_SCALE_BLOCK + row * K_SCALE_ROW))
            scores = scores.to(tl.float32) * k_scale[None, :]
        key_pos = global_position(j, WORLD, rank, INTERLEAVE)
        scores = transform_scores(scores, pre_scale, soft_cap, slopes, pos, key_pos, SQRT_ALIBI, CAUSAL)
        if CAREFUL or (t < whole_begin) | (t >= whole_end):
            scores = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = finite_peak(new_peak)
        rescale = tl.exp2((peak - shift) * unit)
        down = tl.fma(-shift, unit, 1.0 * SHIFT)
        p = tl.exp2(tl.fma(scores, wide_unit, down[:, None]))
        total = tl.fma(total, rescale, tl.sum(p, 1))
        peak = new_peak
        if V_PAIRS:
            v, v_rest = load_pairs(v_rows, v_at, there, BLOCK_VALUE, VALUE_DIM, V_NUMBER, V_TYPE, ISA)
            if UPCAST:
                v, v_rest = v.to(tl.float32), v_rest.to(tl.float32)
            if v_scale_ptr is not None:
                v_scale = tl.load(v_scales + (block * V_SCALE_BLOCK + row * V_SCALE_ROW), mask=there, other=0.0)
                if CAREFUL:  # a row of V that is NaN, instead of its scale
                    finite = (v_scale - v_scale) == 0
                    v = tl.where(finite[:, None], v, float("nan"))
                    v_rest = tl.where(finite[:, None], v_rest, float("nan"))
                    v_scale = tl.where(finite, v_scale, 0.0)
                p *= v_scale[None, :]
        else:
            v = load_keys(v_rows, v_at, there, 0, BLOCK_VALUE, VALUE_DIM, UPCAST)
            if REST_VALUE > 0:
                v_rest = load_keys(v_rest_rows, v_at, there, BLOCK_VALUE, REST_VALUE, VALUE_DIM, UPCAST)
        acc = add_values(acc * rescale[:, None], p, v, j, lo, hi, UPCAST, CAREFUL)
        if REST_VALUE > 0:
            rest = add_values(rest * rescale[:, None], p, v_rest, j, lo, hi, UPCAST, CAREFUL)
    return tl.fma(peak, unit, tl.log2(total) - SHIFT), total, acc, rest


@triton.jit
def multiply_keys(q, k, scores):
    """scores + q . k in float32: [BLOCK_M, BLOCK_KV]; operands of different types meet in float32, int8 in int32."""
    if q.dtype == tl.int8:
        return tl.dot(q, tl.trans(k), scores, out_dtype=tl.int32)
    elif q.dtype == k.dtype:
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
        # Products of 1e38 are infinite, and inf * 0 is NaN: this needs no second accumulator.
        WIDE: tl.constexpr = tl.float32 if UPCAST else tl.bfloat16
        rows = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), 1e38, 0.0).to(WIDE)
        values = tl.where(finite, 0.0, 1e38).to(WIDE)
        acc = tl.dot(rows, values, acc, input_precision="ieee")
        acc += acc * 0.0
        v = tl.where(finite, v, 0.0)
    return tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
