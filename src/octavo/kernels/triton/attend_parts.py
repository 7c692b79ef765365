"""The end of an attend program: rows of a result, and the parts of a sequence as one."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.common import finite_peak


@triton.jit
def store_parts(
    out,  # [BLOCK_M, BLOCK_VALUE] float32
    parts_ptr,
    part_row,  # [BLOCK_M] int64
    is_row,
    VALUE_DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Leave rows of a part, their columns from COLUMN on."""
    column = COLUMN + tl.arange(0, BLOCK_VALUE)
    is_out = is_row[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(parts_ptr + part_row[:, None] * VALUE_DIM + column[None, :], out, mask=is_out)


@triton.jit
def merge_parts(
    parts_ptr,
    parts_lse_ptr,
    first_part,  # [PART_ROWS] int64, rows of the sequence's first part
    is_row,  # [PART_ROWS]
    num_parts,
    stride,  # rows from one part to the next
    PART_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """The parts of a sequence as one: out [PART_ROWS, BLOCK_VALUE], its columns from COLUMN on, and lse [PART_ROWS].

    The parts are taken in their order, whatever the order in which they were finished.
    """
    # So many parts at a time that their loads are under way together, and yet fit the registers.
    AT_ONCE: tl.constexpr = min(16, max(1, 8192 // (PART_ROWS * BLOCK_VALUE)))
    column = COLUMN + tl.arange(0, BLOCK_VALUE)
    top = tl.full([PART_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([PART_ROWS], tl.float32)
    out = tl.zeros([PART_ROWS, BLOCK_VALUE], tl.float32)
    for i in range(0, num_parts, AT_ONCE):
        # The first-level cache may hold what was there before.
        new_top = top
        for part in tl.static_range(AT_ONCE):
            at, there = first_part + (i + part) * stride, is_row & (i + part < num_parts)
            lse = tl.load(parts_lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            new_top = tl.maximum(new_top, lse)
        shift = finite_peak(new_top)
        keep = tl.exp(top - shift)
        total, out, top = total * keep, out * keep[:, None], new_top
        for part in tl.static_range(AT_ONCE):
            at, there = first_part + (i + part) * stride, is_row & (i + part < num_parts)
            lse = tl.load(parts_lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            x = tl.load(
                parts_ptr + at[:, None] * VALUE_DIM + column[None, :],
                mask=there[:, None] & (column < VALUE_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weight = tl.exp(lse - shift)
            total += weight
            out += x * weight[:, None]
    return out / tl.where(total == 0, 1.0, total)[:, None], finite_peak(top) + tl.log(total)


@triton.jit
def store_rows(
    out,  # [rows, BLOCK_VALUE] float32
    lse,  # [rows] float32
    sinks_ptr,
    out_ptr,
    lse_ptr,
    term_stride,
    out_stride,
    lse_stride,
    row,  # [rows] int64
    head,
    is_row,
    VALUE_DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Write rows of a state, their columns from COLUMN on; a sink joins first, by the same arithmetic as in `merge`."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * term_stride[1], mask=is_row, other=0.0)
        top = finite_peak(tl.maximum(lse, sink))
        weight = tl.exp(lse - top)
        total = tl.exp(sink - top) + weight
        out = tl.div_rn(out * weight[:, None], tl.where(total == 0, 1.0, total)[:, None] + tl.zeros_like(out))
        lse = top + tl.log(total)
    column = COLUMN + tl.arange(0, BLOCK_VALUE)
    out_ptr += row[:, None] * out_stride[0] + head[:, None] * out_stride[1]
    is_out = is_row[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(out_ptr + column[None, :], out.to(out_ptr.dtype.element_ty), mask=is_out)
    if lse_ptr is not None and COLUMN == 0:
        lse_ptr += row * lse_stride[0] + head * lse_stride[1]
        tl.store(lse_ptr, lse, mask=is_row)
