"""Write new keys and values into their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from octavo.cache import LayerCache


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots.

    Args:
        cache: one layer's views.
        k, v: [>= num_slots, num_kv_heads, head_dim | value_dim]; rows past num_slots are padding.
        slot_mapping: [num_slots] int64; negative: the row is not stored.
    """
    stored = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[stored]
    block, offset = slots // cache.block_size, slots % cache.block_size
    cache.k_cache[block, offset] = k[stored].to(cache.k_cache.dtype)
    cache.v_cache[block, offset] = v[stored].to(cache.v_cache.dtype)
