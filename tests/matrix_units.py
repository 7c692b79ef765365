"""Matrix units in plain terms, for machines without: tiles of sums lie in memory, products are of one number each.

For one thread, in a process whose kernels are not kept on disk, before the first of them is compiled.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu import prefill_matrix, prefill_matrix_products, simd_dots
from octavo.kernels.cpu.native import array_at
from octavo.kernels.cpu.simd import (
    fma,
    load_bf16_even,
    load_bf16_odd,
    load_f32,
    load_int,
    load_splat,
    splat,
    store,
    store_int,
)
from octavo.kernels.cpu.simd_matrix import BLOCK, CONFIG_BYTES, TILE_BYTES, TILE_ROWS
from octavo.kernels.cpu.stored import OPTIONS

_SUMS, _LEFT = np.full((BLOCK, BLOCK), np.nan, np.float32), np.empty(BLOCK, np.float32)
_LOADED = np.zeros(4, np.int64)
faults = np.zeros(1, np.int64)
"""Descriptions of tiles that were not right."""

SUMS, LEFT, LOADED, FAULTS = (int(array.ctypes.data) for array in (_SUMS, _LEFT, _LOADED, faults))
ROW = BLOCK * 4


@njit(**OPTIONS)
def zero_sums():
    for x in range(SUMS, SUMS + BLOCK * ROW, 32):
        store(np.int64(x), splat(np.float32(0)))


@njit(**OPTIONS)
def load_sums(address, line):
    for i in range(BLOCK):
        for x in range(0, ROW, 32):
            store(np.int64(SUMS + i * ROW + x), load_f32(address + i * line + x))


@njit(**OPTIONS)
def store_sums(address, line):
    for i in range(BLOCK):
        for x in range(0, ROW, 32):
            store(address + i * line + x, load_f32(np.int64(SUMS + i * ROW + x)))


@njit(**OPTIONS)
def load_left(address, line):
    """Where it lies: whether it is there still when it is multiplied is the kernel's part."""
    store_int(np.int64(LOADED), address)
    store_int(np.int64(LOADED + 8), line)


@njit(**OPTIONS)
def load_right(address, line):
    store_int(np.int64(LOADED + 16), address)
    store_int(np.int64(LOADED + 24), line)


@njit(**OPTIONS)
def multiply_tiles():
    a, a_line = load_int(np.int64(LOADED)), load_int(np.int64(LOADED + 8))
    b, b_line = load_int(np.int64(LOADED + 16)), load_int(np.int64(LOADED + 24))
    even, odd = np.int64(LEFT), np.int64(LEFT + ROW // 2)
    for i in range(BLOCK):
        for x in range(0, 64, 32):  # sixteen words are eight even numbers and eight odd ones, twice
            store(even + x, load_bf16_even(a + i * a_line + x))
            store(odd + x, load_bf16_odd(a + i * a_line + x))
        for word in range(BLOCK // 2):
            for x in range(0, ROW, 32):
                at, right = np.int64(SUMS + i * ROW + x), b + word * b_line + x
                total = fma(load_splat(even + word * 4), load_bf16_even(right), load_f32(at))
                store(at, fma(load_splat(odd + word * 4), load_bf16_odd(right), total))


@njit(**OPTIONS)
def set_tiles(address):
    """Full tiles and nothing else: a unit faults where bytes that mean nothing are not 0."""
    described = array_at(address, CONFIG_BYTES, np.uint8)
    faults = array_at(np.int64(FAULTS), 1, np.int64)
    if described[0] != 1 or described.sum() != 1 + 8 * (TILE_ROWS + TILE_BYTES):
        faults[0] += 1


@njit(**OPTIONS)
def describe_tiles(address):
    array_at(address, CONFIG_BYTES, np.uint8)[:] = 0


@njit(**OPTIONS)
def release_tiles():
    pass


def stand_in(units: str) -> None:
    """Let the kernels use these "tiles", or "dots" as they are where there are none."""
    matrix, products = prefill_matrix, prefill_matrix_products
    products.UNITS = units
    if units == "tiles":
        tiles = (zero_sums, load_sums, store_sums, load_left, load_right, multiply_tiles)
        for one in (*tiles, set_tiles, describe_tiles, release_tiles):
            setattr(products, one.__name__, one)
        matrix.multiply, matrix.take, matrix.give_back = products.in_tiles, products.take_tiles, products.return_tiles
    else:
        simd_dots.has_dot_products = lambda: False
        matrix.multiply, matrix.take, matrix.give_back = products.by_dots, products.nothing, products.nothing
