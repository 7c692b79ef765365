"""Write new keys and values into their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

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
    num_slots, (num_kv_heads, head_dim), value_dim = slot_mapping.shape[0], k.shape[1:], v.shape[2]
    # Triton's own cdiv and next_power_of_2 cost 10 us of host time here.
    block_dim = 1 << (max(head_dim, value_dim) - 1).bit_length()
    block_heads = min(1 << (num_kv_heads - 1).bit_length(), max(1, TILE // block_dim))
    append_kernel[num_slots, -(-num_kv_heads // block_heads)](
        k,
        v,
        cache.k_cache,
        cache.v_cache,
        slot_mapping,
        k.stride(),
        v.stride(),
        cache.k_cache.stride()[:3],
        cache.v_cache.stride()[:3],
        slot_mapping.stride(0),
        cache.block_size,
        num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def append_kernel(
    k_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_slots, num_kv_heads, VALUE_DIM]
    k_cache_ptr,  # [num_blocks, block_size, num_kv_heads, HEAD_DIM]
    v_cache_ptr,  # [num_blocks, block_size, num_kv_heads, VALUE_DIM]
    slot_mapping_ptr,  # [num_slots] int64
    k_stride,  # (row, head, element)
    v_stride,
    k_cache_stride,  # (block, row, head); elements follow each other
    v_cache_stride,
    slot_stride,
    block_size,
    num_kv_heads,
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
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK_DIM).to(tl.int64)[None, :]
    is_head = head < num_kv_heads
    _store(
        k_ptr + row * k_stride[0] + head * k_stride[1] + element * k_stride[2],
        k_cache_ptr + block * k_cache_stride[0] + offset * k_cache_stride[1] + head * k_cache_stride[2] + element,
        is_head & (element < HEAD_DIM),
    )
    _store(
        v_ptr + row * v_stride[0] + head * v_stride[1] + element * v_stride[2],
        v_cache_ptr + block * v_cache_stride[0] + offset * v_cache_stride[1] + head * v_cache_stride[2] + element,
        is_head & (element < VALUE_DIM),
    )


@triton.jit
def _store(source, target, mask):
    """Load, convert, store: the one place that knows how a row is stored."""
    x = tl.load(source, mask)
    if x.dtype != target.dtype.element_ty:
        x = x.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target, x, mask)
