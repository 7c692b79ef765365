"""Products of squares of bfloat16, by what this machine has for them: matrix units or dot products."""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import array_at
from octavo.kernels.cpu.prefill_matrix_tile import LINE, SQUARE
from octavo.kernels.cpu.simd import add, load_wide, store
from octavo.kernels.cpu.simd_base import WIDE
from octavo.kernels.cpu.simd_dots import ROWS, add_dots, has_dot_products
from octavo.kernels.cpu.simd_matrix import (
    BLOCK,
    CONFIG_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    describe_tiles,
    has_matrix_units,
    load_left,
    load_right,
    load_sums,
    multiply_tiles,
    release_tiles,
    set_tiles,
    store_sums,
    zero_sums,
)
from octavo.kernels.cpu.stored import OPTIONS

UNITS = "tiles" if has_matrix_units() else "dots" if has_dot_products() else ""
"""What multiplies here; empty: nothing."""

PARTS = 3
"""Of a float32; of products those count whose parts, from 0 on, add up to less."""


@njit(**OPTIONS)
def in_tiles(left, left_parts, right, right_parts, right_step, third, third_step, count, sums, fresh, room):
    """sums = (0 if fresh else sums) + left[0] right[0] + ... + left[count - 1] right[count - 1].

    Args:
        left: squares [BLOCK][BLOCK], the parts of each one after another.
        right, right_step: squares of words [BLOCK / 2][BLOCK], of each two parts, and the bytes from one to the next;
            third, third_step: likewise their third parts.
        count: of the squares, at least 1.
        sums: [BLOCK][BLOCK] float32; room: as much again, unless fresh.
    """
    if left_parts == 1 and right_parts == 1:
        if fresh:
            zero_sums()
        else:
            load_sums(sums, np.int64(LINE))
    else:
        # Small products first, and by themselves: added to large sums each would be rounded as those are.
        zero_sums()
        square, word, small = left, right, third
        for _ in range(count):
            for i in range(left_parts):
                load_left(square + i * SQUARE, np.int64(TILE_BYTES))
                # What products of parts further on say is below what float32 says of the whole.
                for j in range(1 if i == 0 else 0, min(right_parts, PARTS - i)):
                    load_right(small if j == 2 else word + j * SQUARE, np.int64(LINE))
                    multiply_tiles()
            square, word, small = square + left_parts * SQUARE, word + right_step, small + third_step
    for _ in range(count):
        load_left(left, np.int64(TILE_BYTES))
        load_right(right, np.int64(LINE))
        multiply_tiles()
        left, right = left + left_parts * SQUARE, right + right_step
    if fresh or (left_parts == 1 and right_parts == 1):
        store_sums(sums, np.int64(LINE))
    else:
        store_sums(room, np.int64(LINE))
        for i in range(0, BLOCK * LINE, WIDE * 4):
            store(sums + i, add(load_wide(sums + i), load_wide(room + i)))


@njit(**OPTIONS)
def by_dots(left, left_parts, right, right_parts, right_step, third, third_step, count, sums, fresh, room):
    """The same where numbers are one part each."""
    for row in range(0, BLOCK, ROWS):
        add_dots(left + row * TILE_BYTES, right, right_step, count, sums + row * LINE, fresh)


@njit(**OPTIONS)
def take_tiles(room):
    """Make all of this thread's tiles full ones; room: zeros for two descriptions, the first of the tiles so far."""
    describe_tiles(room)
    described = array_at(room + CONFIG_BYTES, CONFIG_BYTES, np.uint8)
    described[0] = 1  # the palette
    for tile in range(8):
        described[16 + 2 * tile] = TILE_BYTES
        described[48 + tile] = TILE_ROWS
    set_tiles(room + CONFIG_BYTES)


@njit(**OPTIONS)
def return_tiles(room):
    """Leave the tiles as `take_tiles` found them."""
    if array_at(room, 1, np.uint8)[0] != 0:
        set_tiles(room)
    else:
        release_tiles()


@njit(**OPTIONS)
def nothing(room):
    """Dot products need no more."""


multiply, take, give_back = (in_tiles, take_tiles, return_tiles) if UNITS == "tiles" else (by_dots, nothing, nothing)
