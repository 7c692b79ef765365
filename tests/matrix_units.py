"""Matrix units in plain terms, for machines without: tiles of sums lie in memory, products are of one number each.

For one thread, in a process whose kernels are not kept on disk, before the first of them is compiled.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu import compiled, prefill_matrix
from octavo.kernels.cpu.native import array_at
from octavo.kernels.cpu.simd import fma, load_bf16_even, load_bf16_odd, load_f32, load_splat, splat, store
from octavo.kernels.cpu.simd_matrix import BLOCK, CONFIG_BYTES, TILE_BYTES, TILE_ROWS
from octavo.kernels.cpu.stored import OPTIONS

_SUMS, _LEFT = np.full((BLOCK, BLOCK), np.nan, np.float32), np.empty(BLOCK, np.float32)
faults = np.zeros(1, np.int64)
"""Descriptions of tiles that were not right."""

SUMS, LEFT, FAULTS, ROW = int(_SUMS.ctypes.data), int(_LEFT.ctypes.data), int(faults.ctypes.data), BLOCK * 4


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
def multiply_tiles(a, a_line, b, b_line):
    even, odd = np.int64(LEFT), np.int64(LEFT + ROW // 2)
    for i in range(BLOCK):
        for x in range(0, 64, 32):  # sixteen words are eight even numbers and eight odd ones, twice
            store(even + x, load_bf16_even(a + i * a_line + x))
            store(odd + x, load_bf16_odd(a + i * a_line + x))
        for word in range(BLOCK // 2):
            for x in range(0, ROW, 32):
                at, right = np.int64(SUMS + i * ROW + x), b + word * b_line + x
                sums = fma(load_splat(even + word * 4), load_bf16_even(right), load_f32(at))
                store(at, fma(load_splat(odd + word * 4), load_bf16_odd(right), sums))


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


def stand_in() -> None:
    """Let the kernels use these."""
    for one in (zero_sums, load_sums, store_sums, multiply_tiles, set_tiles, describe_tiles, release_tiles):
        setattr(prefill_matrix, one.__name__, one)
    compiled.has_matrix_units = lambda: True
