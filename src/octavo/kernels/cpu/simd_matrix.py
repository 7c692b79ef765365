"""Matrix units (Intel's AMX) for Numba: tiles of sixteen rows of 64 bytes, and numbers as the units read them.

A unit multiplies bfloat16 and adds in float32: sums [32][32] += a [32][32] * b [32][32] is one `multiply_tiles`, where
a lies as it is and b as words: [16][32] of (row 2 i, row 2 i + 1). Numbers below 2 ** -126 count as 0.
Intel, Architecture Instruction Set Extensions Programming Reference (319433), chapter 3.

Wider numbers are sums of bfloat16: two for float16, three for float32, each what the ones before leave, cut off after
eight digits. Products of parts i and j are at most 2 ** (-7 (i + j)) of the whole.
Henry, Tang, Heinecke: Leveraging the bfloat16 datatype for higher-precision computations, arXiv:1904.06376.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd_base import (
    BYTE_POINTER,
    DONE,
    I8,
    I16,
    I32,
    I64,
    LANES,
    V8,
    A,
    V,
    call,
    has_features,
    int_constant,
    operation,
    store_vector,
)

BLOCK = 32
"""Rows and columns of what is multiplied at once: two tiles each way."""

TILE_ROWS, TILE_BYTES = 16, 64
"""Rows of a tile, and bytes of one: 16 sums or 32 bfloat16."""

CONFIG_BYTES = 64
"""Bytes of a description of the tiles."""

_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
"""Tiles by what they hold: of sums, row by row, of a and of b."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux: the system call, its code, and the number of the tiles' part of a thread's state."""


@cache
def has_matrix_units() -> bool:
    """Whether this machine multiplies bfloat16 in tiles, and the system lets this process (asked once, for all of its
    threads and children)."""
    wanted = has_features("amx-tile", "amx-bf16", "avx512f")
    if not wanted or not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


def _tile(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _load(builder: Any, tile: int, address: Any, line: Any) -> None:
    place = builder.inttoptr(address, BYTE_POINTER)
    call(builder, "llvm.x86.tileloadd64", ir.VoidType(), _tile(tile), place, line)


def _places(builder: Any, address: Any, line: Any) -> list[Any]:
    """Where the tiles of sums [32][32] begin."""
    below = builder.add(address, builder.mul(line, ir.Constant(I64, TILE_ROWS)))
    return [builder.add(row, ir.Constant(I64, offset)) for row in (address, below) for offset in (0, TILE_BYTES)]


@operation(types.void, A)
def set_tiles(builder: Any, address: Any) -> Any:
    """Shape this thread's tiles as described at the address."""
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.inttoptr(address, BYTE_POINTER))
    return DONE


@operation(types.void, A)
def describe_tiles(builder: Any, address: Any) -> Any:
    """This thread's description of its tiles, to the address; zeros where it uses none."""
    call(builder, "llvm.x86.sttilecfg", ir.VoidType(), builder.inttoptr(address, BYTE_POINTER))
    return DONE


@operation(types.void)
def release_tiles(builder: Any) -> Any:
    """This thread uses no tiles from here on: switching to another one costs no more than before."""
    call(builder, "llvm.x86.tilerelease", ir.VoidType())
    return DONE


@operation(types.void)
def zero_sums(builder: Any) -> Any:
    """sums = 0."""
    for tile in _SUMS:
        call(builder, "llvm.x86.tilezero", ir.VoidType(), _tile(tile))
    return DONE


@operation(types.void, A, types.int64)
def load_sums(builder: Any, address: Any, line: Any) -> Any:
    """sums = [32][32] float32, rows `line` bytes apart."""
    for tile, place in zip(_SUMS, _places(builder, address, line), strict=True):
        _load(builder, tile, place, line)
    return DONE


@operation(types.void, A, types.int64)
def store_sums(builder: Any, address: Any, line: Any) -> Any:
    """sums to [32][32] float32, rows `line` bytes apart."""
    for tile, place in zip(_SUMS, _places(builder, address, line), strict=True):
        pointer = builder.inttoptr(place, BYTE_POINTER)
        call(builder, "llvm.x86.tilestored64", ir.VoidType(), _tile(tile), pointer, line)
    return DONE


@operation(types.void, A, types.int64)
def load_left(builder: Any, address: Any, line: Any) -> Any:
    """a = [32][32] bfloat16, rows `line` bytes apart."""
    below = builder.add(address, builder.mul(line, ir.Constant(I64, TILE_ROWS)))
    for tile, place in zip(_LEFT, (address, below), strict=True):
        _load(builder, tile, place, line)
    return DONE


@operation(types.void, A, types.int64)
def load_right(builder: Any, address: Any, line: Any) -> Any:
    """b = [16][32] words of two bfloat16, rows `line` bytes apart."""
    for tile, place in zip(_RIGHT, (address, builder.add(address, ir.Constant(I64, TILE_BYTES))), strict=True):
        _load(builder, tile, place, line)
    return DONE


@operation(types.void)
def multiply_tiles(builder: Any) -> Any:
    """sums += a b."""
    for i, sums in enumerate(_SUMS):
        tiles = (_tile(x) for x in (sums, _LEFT[i // 2], _RIGHT[i % 2]))
        call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), *tiles)
    return DONE


def _words(x: Any) -> ir.VectorType:
    return ir.VectorType(I32, x.type.count)


@operation(V, V, V)
def words_of(builder: Any, low: Any, high: Any) -> Any:
    """Words of two bfloat16: the upper halves of float32, what is cut off left out."""
    bits = builder.bitcast(low, _words(low))
    word = builder.lshr(bits, ir.Constant(bits.type, [16] * bits.type.count))
    return builder.bitcast(builder.or_(word, _upper_bits(builder, high)), low.type)


@operation(V, V)
def rest_of(builder: Any, x: Any) -> Any:
    """What a bfloat16 leaves of x that is cut off where it ends; NaN where x is not finite."""
    return builder.fsub(x, _upper(builder, builder.bitcast(x, _words(x)), x))


@operation(V, V)
def rounded(builder: Any, x: Any) -> Any:
    """The nearest bfloat16, ties away from 0, as float32; NaN of a float32 operation stays NaN."""
    return _upper(builder, builder.add(builder.bitcast(x, _words(x)), int_constant(0x8000, x)), x)


@operation(V, V)
def rounded_even(builder: Any, x: Any) -> Any:
    """The nearest bfloat16, ties to even, as float32; NaN stays NaN."""
    bits = builder.bitcast(x, _words(x))
    odd = builder.and_(builder.lshr(bits, int_constant(16, x)), int_constant(1, x))
    near = builder.add(bits, builder.add(odd, int_constant(0x7FFF, x)))
    quiet = builder.or_(bits, int_constant(0x400000, x))
    return _upper(builder, builder.select(builder.fcmp_unordered("uno", x, x), quiet, near), x)


def _upper_bits(builder: Any, x: Any) -> Any:
    return builder.and_(builder.bitcast(x, _words(x)), int_constant(-0x10000, x))


def _upper(builder: Any, bits: Any, like: Any) -> Any:
    return builder.bitcast(builder.and_(bits, int_constant(-0x10000, like)), like.type)


@operation(types.void, A, V8)
def store_upper(builder: Any, address: Any, value: Any) -> Any:
    """The upper halves of eight float32, in 16 bits."""
    bits = builder.bitcast(value, ir.VectorType(I32, LANES))
    upper = builder.trunc(builder.lshr(bits, ir.Constant(bits.type, [16] * LANES)), ir.VectorType(I16, LANES))
    return store_vector(builder, address, upper, 2)


@operation(V, V, V, V, V)
def keep_between(builder: Any, x: Any, at: Any, start: Any, end: Any) -> Any:
    """x where start <= at < end, -inf elsewhere, lane by lane."""
    inside = builder.and_(builder.fcmp_ordered(">=", at, start), builder.fcmp_ordered("<", at, end))
    return builder.select(inside, x, ir.Constant(x.type, [float("-inf")] * x.type.count))
