"""Write new keys and values into their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.eight_bit import scale_of_rows, to_fp8, to_int8
from octavo.kernels.triton.launching import again, current_stream, misaligned
from octavo.kernels.triton.stored import as_bytes, number, scale_strides

if TYPE_CHECKING:
    from octavo.cache import LayerCache

TILE = 2048
"""Elements of K that a program writes at most: a program takes as many heads of one token as fit."""


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots.

    Args:
        cache: one layer's views.
        k, v: [>= num_slots, num_kv_heads, head_dim | value_dim], any strides and float dtype; rows past
            num_slots are padding.
        slot_mapping: [num_slots] int64; negative: the row is not stored.
    """
    k_cache, v_cache, k_scale, v_scale = cache.k_cache, cache.v_cache, cache.k_descale, cache.v_descale
    pages = (k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    scales = (None if k_scale is None else k_scale.data_ptr(), None if v_scale is None else v_scale.data_ptr())
    stream = current_stream(k.device)
    # All that a launch depends on beside these addresses and the number of slots.
    key = (
        "append kernel",
        stream,
        misaligned(*pages),
        (k.dtype, v.dtype),
        k.stride(),
        v.stride(),
        slot_mapping.stride(0),
    )
    prepared: Prepared | None = cache.memo.get(key)
    if prepared is None:
        _prepare(cache, k, v, slot_mapping, key)
    else:
        run = again(prepared.compiled, (slot_mapping.shape[0], prepared.programs, 1), stream)
        run(*pages, *scales, slot_mapping.data_ptr(), *prepared.rest)


class Prepared(NamedTuple):
    """A compiled kernel, how many programs write a row, and what follows the addresses."""

    compiled: Any
    programs: int
    rest: tuple[Any, ...]


def _prepare(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor, key: tuple[Any, ...]) -> None:
    """Write rows for the first time, and keep with the pages what the next ones need."""
    num_slots, (num_kv_heads, head_dim), value_dim = slot_mapping.shape[0], k.shape[1:], v.shape[2]
    block_dim = 1 << (max(head_dim, value_dim) - 1).bit_length()
    block_heads = min(1 << (num_kv_heads - 1).bit_length(), max(1, TILE // block_dim))
    programs = -(-num_kv_heads // block_heads)
    rest = (
        k.stride(),
        v.stride(),
        cache.k_cache.stride()[:3],
        cache.v_cache.stride()[:3],
        scale_strides(cache.k_descale),
        scale_strides(cache.v_descale, by_channel=cache.format.v_scaled_by_channel),
        slot_mapping.stride(0),
        cache.block_size,
        num_kv_heads,
    )
    constants = {
        "K_NUMBER": number(cache.k_cache.dtype),
        "V_NUMBER": number(cache.v_cache.dtype),
        "V_SCALED_BY_ROW": cache.format.v_scaled_by_row,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_HEADS": block_heads,
        "BLOCK_DIM": block_dim,
    }
    compiled = append_kernel[num_slots, programs](
        k,
        v,
        as_bytes(cache.k_cache),
        as_bytes(cache.v_cache),
        cache.k_descale,
        cache.v_descale,
        slot_mapping,
        *rest,
        **constants,
        num_warps=4,
    )
    if compiled is not None:  # not interpreted
        cache.memo[key] = Prepared(compiled, programs, (*rest, *constants.values()))


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr", "k_scale_ptr", "v_scale_ptr"])
def append_kernel(
    k_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_slots, num_kv_heads, VALUE_DIM]
    k_cache_ptr,  # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    v_cache_ptr,  # [num_blocks, block_size, num_kv_heads, VALUE_DIM]
    k_scale_ptr,  # float32 or None; int8: [num_blocks, num_kv_heads, block_size], written; fp8: [(num_kv_heads)]
    v_scale_ptr,  # the same; int8 that is not scaled by row: [num_kv_heads, VALUE_DIM]
    slot_mapping_ptr,  # [num_slots] int64
    k_stride,  # (row, head, element)
    v_stride,
    k_cache_stride,  # (block, row, head); elements follow each other
    v_cache_stride,
    k_scale_stride,  # (block, head, row or channel), those that there are
    v_scale_stride,
    slot_stride,
    block_size,
    num_kv_heads,
    K_NUMBER: tl.constexpr,  # "plain", "int8", "e4m3" or "e5m2"
    V_NUMBER: tl.constexpr,
    V_SCALED_BY_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program: BLOCK_HEADS heads of one token, K and V."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + row * slot_stride)
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    is_heads = heads < num_kv_heads
    head, is_head = heads[:, None], is_heads[:, None]
    element = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
    is_k, is_v = is_head & (element < HEAD_DIM), is_head & (element < VALUE_DIM)
    k = tl.load(k_ptr + row * k_stride[0] + head * k_stride[1] + element * k_stride[2], is_k, 0.0)
    v = tl.load(v_ptr + row * v_stride[0] + head * v_stride[1] + element * v_stride[2], is_v, 0.0)
    k_cache_ptr += block * k_cache_stride[0] + offset * k_cache_stride[1] + head * k_cache_stride[2] + element
    v_cache_ptr += block * v_cache_stride[0] + offset * v_cache_stride[1] + head * v_cache_stride[2] + element
    if K_NUMBER == "int8":
        k_scale_at = k_scale_ptr + block * k_scale_stride[0] + heads * k_scale_stride[1] + offset * k_scale_stride[2]
        k, k_scale = _by_row(k)
        if V_SCALED_BY_ROW:
            v_scale_at = (
                v_scale_ptr + block * v_scale_stride[0] + heads * v_scale_stride[1] + offset * v_scale_stride[2]
            )
            v, v_scale = _by_row(v)
            tl.store(v_scale_at, v_scale, is_heads)
        elif V_NUMBER == "int8":
            v = v.to(tl.float32)
            channel_scale_at = v_scale_ptr + head * v_scale_stride[1] + element * v_scale_stride[2]
            # int8 has no NaN: K's scale shows one.
            k_scale = tl.where(tl.max((v != v).to(tl.int32), 1) == 1, float("nan"), k_scale)
            v = to_int8(v, tl.load(channel_scale_at, is_v, 1.0))
        tl.store(k_scale_at, k_scale, is_heads)
    elif K_NUMBER != "plain":
        k = _by_head(k, k_scale_ptr, k_scale_stride, head, is_head, K_NUMBER)
        v = _by_head(v, v_scale_ptr, v_scale_stride, head, is_head, V_NUMBER)
    _store(k_cache_ptr, k, is_k)
    _store(v_cache_ptr, v, is_v)


@triton.jit
def _by_row(x):
    """Rows [heads, elements] as int8, and their own scales [heads]."""
    x = x.to(tl.float32)
    size = tl.abs(x)
    scale = scale_of_rows(tl.max(size, 1), tl.min((size < float("inf")).to(tl.int32), 1) == 1)
    return to_int8(x, scale[:, None] + tl.zeros_like(x)), scale


@triton.jit
def _by_head(x, scale_ptr, scale_stride, head, is_head, NUMBER: tl.constexpr):
    """Rows [heads, elements] as fp8 under static scales, or None."""
    x = x.to(tl.float32)
    if scale_ptr is not None:
        x = tl.div_rn(x, tl.load(scale_ptr + head * scale_stride[1], is_head, 1.0) + tl.zeros_like(x))
    return to_fp8(x, NUMBER)


@triton.jit
def _store(target, x, mask):
    """Convert and store."""
    if x.dtype != target.dtype.element_ty:
        x = x.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target, x, mask)
