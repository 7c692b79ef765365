"""Write new keys and values into their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from octavo.cache import LayerCache


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots; arguments as in `kernels.cpu.append`."""
    num_slots = slot_mapping.shape[0]
    k, v = k[:num_slots], v[:num_slots]
    if num_slots and int(slot_mapping.min()) < 0:
        stored = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    where = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    cache.k_cache[where] = k.to(cache.k_cache.dtype)
    cache.v_cache[where] = v.to(cache.v_cache.dtype)
