"""Merge partial results: the one reduction behind splits, cascade levels and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launching import again, current_stream, misaligned
from octavo.launch import State

PARTS_AT_ONCE = 32
"""LSEs that a program loads in one go to find the maximum."""

UNROLL = 4
"""Parts whose loads are under way together; they are still added one after another."""


def merge(
    parts: State,
    sinks: Tensor | None,
    result: State,
    query_start_loc: Tensor | None = None,
    memo: dict[tuple[Any, ...], Any] | None = None,
) -> None:
    """Merge parts by their LSE, the sink as one more part without a value.

    Parts that are not empty are added one after another, so that empty ones, wherever they stand (a longer
    neighbour or a shared prefix brings them), leave every bit as it is.

    Args:
        parts: out [num_parts, num_tokens, num_q_heads, value_dim], lse [num_parts, num_tokens, num_q_heads]
            float32, any strides. The output of a part with lse = -inf is not read.
        sinks: [num_q_heads] float32 or None.
        result: one part, out of any float dtype, lse float32 or None; written in place.
        query_start_loc: [num_seqs + 1] int32; rows from its last entry on belong to no sequence and stay as
            they are. None: all rows are written.
        memo: where launches are kept for merges whose arguments have the same shapes, strides and dtypes; None:
            nowhere.
    """
    assert parts.lse is not None
    tensors = (parts.out, parts.lse, sinks, result.out, result.lse, query_start_loc)
    at = tuple(None if x is None else x.data_ptr() for x in tensors)
    stream = current_stream(parts.out.device)
    # Of the addresses a kernel depends on whether Triton may load 16 bytes at a time.
    key = ("merge", stream, misaligned(parts.out.data_ptr(), result.out.data_ptr(), at[2] or 0))
    prepared: Prepared | None = None if memo is None else memo.get(key)
    if prepared is not None:
        prepared.run(*at, *prepared.rest)
        return
    result = result.in_parts()
    num_parts, num_tokens, num_q_heads, value_dim = parts.out.shape
    # The step from part to part changes with the number of tokens: whether 16 divides it must not, or another kernel is
    # compiled.
    step = parts.out.stride(0)
    unit = 16 if parts.out.stride(1) % 16 == 0 and step % 16 == 0 else 1
    rest = (
        step // unit,
        parts.out.stride()[1:],
        parts.lse.stride(0),
        parts.lse.stride()[1:],
        result.out.stride()[1:],
        (0, 0) if result.lse is None else result.lse.stride()[1:],
        1 if sinks is None else sinks.stride(0),
        num_parts,
        0 if query_start_loc is None else query_start_loc.shape[0] - 1,
    )
    constants = {
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": 1 << (value_dim - 1).bit_length(),
        "BLOCK_PARTS": PARTS_AT_ONCE,
        "UNROLL": UNROLL,
        "UNIT": unit,
    }
    grid = (num_tokens, num_q_heads, 1)
    compiled = merge_kernel[grid](*tensors, *rest, **constants, num_warps=1 if value_dim <= 128 else 4)
    if compiled is not None and memo is not None:  # not interpreted
        memo[key] = Prepared(again(compiled, grid, stream), (*rest, *constants.values()))


class Prepared(NamedTuple):
    """A compiled kernel with its grid, and what follows the addresses."""

    run: Callable[..., None]
    rest: tuple[Any, ...]


@triton.jit(
    do_not_specialize=["part_units", "part_lse_step", "num_parts", "num_seqs"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "lse_ptr", "part_lse_ptr"],
)
def merge_kernel(
    part_ptr,  # [num_parts, num_tokens, num_q_heads, VALUE_DIM]
    part_lse_ptr,  # [num_parts, num_tokens, num_q_heads] float32
    sinks_ptr,  # [num_q_heads] float32 or None
    out_ptr,  # [num_tokens, num_q_heads, VALUE_DIM]
    lse_ptr,  # [num_tokens, num_q_heads] float32 or None
    query_start_loc_ptr,  # [num_seqs + 1] int32 or None
    part_units,  # times UNIT: from part to part
    part_stride,  # (token, head, element)
    part_lse_step,  # from part to part
    part_lse_stride,  # (token, head)
    out_stride,  # (token, head, element)
    lse_stride,  # (token, head)
    sinks_stride,
    num_parts,
    num_seqs,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A program: one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if query_start_loc_ptr is not None:
        if token >= tl.load(query_start_loc_ptr + num_seqs):
            return
    part_lse_ptr += token * part_lse_stride[0] + head * part_lse_stride[1]

    # The maximum, and where the last part that is not empty ends.
    peaks = tl.full([BLOCK_PARTS], float("-inf"), tl.float32)
    ends = tl.zeros([BLOCK_PARTS], tl.int32)
    for start in range(0, num_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        part_lse = tl.load(part_lse_ptr + part.to(tl.int64) * part_lse_step, part < num_parts, float("-inf"))
        peaks = tl.maximum(peaks, part_lse)
        ends = tl.where(part_lse != float("-inf"), part + 1, ends)
    peak = tl.max(peaks)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * sinks_stride)
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # so that (-inf) - (-inf) never happens

    total = 0.0
    if sinks_ptr is not None:
        total = tl.exp(sink - peak)
    element = tl.arange(0, BLOCK_DIM)
    part_ptr += token * part_stride[0] + head * part_stride[1] + element * part_stride[2]
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for start in range(0, tl.max(ends), UNROLL):
        for i in tl.static_range(UNROLL):
            part_lse = tl.load(part_lse_ptr, start + i < num_parts, float("-inf"))
            width = tl.where(part_lse == float("-inf"), 0, VALUE_DIM)  # an empty part is not read
            value = tl.load(part_ptr, element < width, 0.0).to(tl.float32)
            weight = tl.exp(part_lse - peak)
            total += weight
            acc += value * weight
            part_lse_ptr += part_lse_step
            part_ptr += tl.cast(part_units, tl.int64) * UNIT

    out = tl.div_rn(acc, tl.where(total == 0, 1.0, total))
    out_ptr += token * out_stride[0] + head * out_stride[1] + element * out_stride[2]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), element < VALUE_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * lse_stride[0] + head * lse_stride[1], peak + tl.log(total))
