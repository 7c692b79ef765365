"""Rows of q as they multiply keys."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.eight_bit import scale_of_rows, to_int8, widen

TOP = tl.constexpr(14)
"""16-bit rows beside fp8 keys are multiplied by a power of two so that their largest number is near 2^14."""


@triton.jit
def load_queries(
    q_ptr,  # [BLOCK_M] pointers to the rows
    is_row,  # [BLOCK_M] bool
    BLOCK_HEAD: tl.constexpr,
    REST_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_NUMBER: tl.constexpr,
    K_NUMBER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The rows in two parts, [BLOCK_M, BLOCK_HEAD] and [BLOCK_M, REST_HEAD], and what their scores are to be
    multiplied by, [BLOCK_M] float32.

    Beside plain keys the parts are columns as they are; beside int8 keys the same columns, quantised as
    `octavo.quantise` says; beside fp8 keys the even and the odd columns, as float16 or float32. Without a second part
    it is the first again.
    """
    FP8: tl.constexpr = K_NUMBER == "e4m3" or K_NUMBER == "e5m2"
    STEP: tl.constexpr = 2 if FP8 else 1
    q = load_columns(q_ptr, is_row, 0, STEP, BLOCK_HEAD, HEAD_DIM, Q_NUMBER, UPCAST)
    rest, scale = q, tl.zeros(is_row.shape, tl.float32) + 1
    if REST_HEAD > 0:
        rest = load_columns(q_ptr, is_row, 1 if FP8 else BLOCK_HEAD, STEP, REST_HEAD, HEAD_DIM, Q_NUMBER, UPCAST)
    if K_NUMBER == "int8":
        q, rest = q.to(tl.float32), rest.to(tl.float32)
        size, rest_size = tl.abs(q), tl.abs(rest)
        finite = tl.minimum(_all_finite(size), _all_finite(rest_size)) == 1
        scale = scale_of_rows(tl.maximum(tl.max(size, 1), tl.max(rest_size, 1)), finite)
        q = to_int8(q, scale[:, None] + tl.zeros_like(q))
        rest = to_int8(rest, scale[:, None] + tl.zeros_like(rest))
        scale = tl.where(scale == 0, 1.0, scale)  # of zeros
    elif FP8 and q_ptr.dtype.element_ty != tl.float32 and not UPCAST:
        # bfloat16 reaches further than float16.
        size = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), tl.max(tl.abs(rest.to(tl.float32)), 1))
        exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, TOP + 1)
        scale = ((exponent - TOP) << 23).to(tl.float32, bitcast=True)
        inverse = ((254 + TOP - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        q, rest = (q.to(tl.float32) * inverse).to(tl.float16), (rest.to(tl.float32) * inverse).to(tl.float16)
    return q, rest, scale


@triton.jit
def load_columns(
    q_ptr,
    is_row,
    COLUMN: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NUMBER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """BLOCK_DIM columns of the rows, COLUMN and every STEP-th after it, 0 past DIM and in rows that are none."""
    column = COLUMN + STEP * tl.arange(0, BLOCK_DIM)
    q = tl.load(q_ptr[:, None] + column[None, :], mask=is_row[:, None] & (column < DIM)[None, :], other=0)
    if NUMBER != "plain":
        q = widen(q.to(tl.int16), NUMBER)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@triton.jit
def _all_finite(size):
    return tl.min((size < float("inf")).to(tl.int32), 1)
