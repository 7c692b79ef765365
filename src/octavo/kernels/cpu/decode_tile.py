"""The tile of keys that decode works on, and where its parts lie."""

from __future__ import annotations

from octavo.kernels.cpu.simd_base import IS_ZEN

TILE = 32 if IS_ZEN else 16
"""Keys of a tile, of at most 16 bits a number."""

WIDE_TILE = 16
"""Keys of a tile of float32."""

HEADS = 4
"""Query heads that share a K row; smaller groups compute the missing heads for nothing."""

ROOM = TILE + 2
"""Addresses that a tile has room for: the last is there twice, as keys are met in pairs."""

VALUES, K_SCALES, V_SCALES = (ROOM * 8 * i for i in range(1, 4))
"""Where a tile's addresses of rows of V, and of scales of K and V, follow those of rows of K."""

FOUND = ROOM * 8 * 4
"""Bytes of all of them."""

LINE = 64
"""Bytes of a cache line."""
