"""Write new keys and values into their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from octavo.quantise import store_rows

if TYPE_CHECKING:
    from octavo.cache import LayerCache


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots; arguments as in `kernels.cpu.append`."""
    num_slots = slot_mapping.shape[0]
    k, v = k[:num_slots], v[:num_slots]
    if num_slots and int(slot_mapping.min()) < 0:
        stored = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    rows = store_rows(cache.format, k, v, cache.k_descale, cache.v_descale)
    cache.k_cache[block, offset] = rows.k
    cache.v_cache[block, offset] = rows.v
    if rows.k_scale is not None:
        assert cache.k_descale is not None
        cache.k_descale[block, :, offset] = rows.k_scale
    if rows.v_scale is not None:
        assert cache.v_descale is not None
        cache.v_descale[block, :, offset] = rows.v_scale
