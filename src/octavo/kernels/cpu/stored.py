"""How numbers are stored: told by a tag at compile time (pages), or by a kind at run time (what is touched once)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core.cgutils import pack_array

from octavo.kernels.cpu.simd import (
    evens,
    load_bf16,
    load_bf16_even,
    load_bf16_odd,
    load_f16,
    load_f32,
    odds,
    store,
    store_bf16,
    store_f16,
    zip_high,
    zip_low,
)
from octavo.kernels.cpu.simd_base import I8X16, I64, V8, V16, A, tagged
from octavo.kernels.cpu.simd_dots import (
    load_codes,
    load_some_words,
    load_words,
    words_of_rows,
    zero_words,
    zip_words_high,
    zip_words_low,
    zipped_words,
)
from octavo.kernels.cpu.simd_eight_bit import (
    E4M3_UNIT,
    load_e4m3,
    load_e4m3_even,
    load_e4m3_odd,
    load_e5m2,
    load_e5m2_even,
    load_e5m2_odd,
    load_i8,
    note_codes,
    spoil_even,
    spoil_halves,
    spoil_odd,
)

OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
}
"""How functions here are compiled: arrays that they are given are not counted, which cost a call for each, again and
again, as a `Call` has eight."""

COUNTING = {**OPTIONS, "_nrt": True}
"""The same for functions that make arrays."""

INLINED = {**OPTIONS, "inline": "always"}
"""The same for a large function with one caller: Numba optimises a function again within each that calls it."""

FLOAT32, FLOAT16, BFLOAT16, INT8, E4M3, E5M2 = range(6)
"""Kinds. Kernels read the first three where they learn it at run time, and write all."""

KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
}

WIDE_KINDS = {torch.float32, torch.float16, torch.bfloat16}
"""The dtypes of the first three."""

TAGS = {
    torch.float32: np.float32,
    torch.float16: np.int16,
    torch.bfloat16: np.uint16,
    torch.int8: np.int8,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e5m2: np.uint32,
}
"""Tags: NumPy scalar types, as Numba tells functions of different types apart; they only stand for the dtypes."""

DOTS = {torch.bfloat16: np.uint64, torch.float8_e4m3fn: np.int64, torch.float8_e5m2: np.int32}
"""Tags of what decode multiplies by dot products of bfloat16; fp8 where the machine looks up bytes in tables."""


class _Stored(NamedTuple):
    size: int  # bytes of a number
    one: Any  # loads eight
    even: Any = None  # loads numbers 0, 2, ..., 14, where that costs less than neighbours
    odd: Any = None
    parts: int = 1  # bfloat16 that a number is the sum of


_BY_TAG = {
    types.float32: _Stored(4, load_f32, parts=3),
    types.int16: _Stored(2, load_f16, parts=2),
    types.uint16: _Stored(2, load_bf16, load_bf16_even, load_bf16_odd),
    types.int8: _Stored(1, load_i8),
    types.uint8: _Stored(1, load_e4m3, load_e4m3_even, load_e4m3_odd),
    types.uint32: _Stored(1, load_e5m2, load_e5m2_even, load_e5m2_odd),
    types.uint64: _Stored(2, load_bf16),
    types.int64: _Stored(1, load_e4m3),
    types.int32: _Stored(1, load_e5m2),
}

BY_DOTS = {from_dtype(np.dtype(tag)): dtype for dtype, tag in DOTS.items()}
"""The dtypes of these tags, by Numba's types."""

_PAIR, _WORDS = types.UniTuple(V8, 2), types.UniTuple(V16, 2)


@tagged(V8, A)
def load(of: Any, builder: Any, address: Any) -> Any:
    """Eight stored numbers as float32, over the unit of their kind."""
    return _BY_TAG[of].one.emit(builder, address)


@tagged(_PAIR, A)
def load_pair(of: Any, builder: Any, address: Any) -> Any:
    """Sixteen stored numbers as two vectors: halves, or the even and the odd ones where these cost less. e4m3's NaN
    comes as a number: `note` finds it."""
    size, one, even, odd, *_ = _BY_TAG[of]
    if even is not None:
        return pack_array(builder, [even.emit(builder, address), odd.emit(builder, address)])
    half = builder.add(address, address.type(8 * size))
    return pack_array(builder, [one.emit(builder, address), one.emit(builder, half)])


@tagged(I8X16, I8X16, A)
def note(of: Any, builder: Any, noted: Any, address: Any) -> Any:
    """What `load_pair` of the same numbers left out; begins with `no_codes`."""
    return note_codes.emit(builder, noted, address) if of == types.uint8 else noted


@tagged(V8, V8, I8X16, I8X16)
def with_rows_noted(of: Any, builder: Any, x: Any, one: Any, other: Any) -> Any:
    """Scores of two rows, four heads each, and what was noted of the rows."""
    return spoil_halves.emit(builder, x, one, other) if of == types.uint8 else x


@tagged(_PAIR, V8, V8, I8X16)
def with_noted(of: Any, builder: Any, x: Any, y: Any, noted: Any) -> Any:
    """Sums of sixteen numbers, in pair order, and what was noted of them."""
    if of == types.uint8:
        x, y = spoil_even.emit(builder, x, noted), spoil_odd.emit(builder, y, noted)
    return pack_array(builder, [x, y])


@tagged(_PAIR, V8, V8)
def to_pair(of: Any, builder: Any, x: Any, y: Any) -> Any:
    """Two halves of sixteen numbers as `load_pair` would have them."""
    if _BY_TAG[of].even is not None:
        x, y = evens.emit(builder, x, y), odds.emit(builder, x, y)
    return pack_array(builder, [x, y])


@tagged(_PAIR, V8, V8)
def from_pair(of: Any, builder: Any, x: Any, y: Any) -> Any:
    """The two halves of sixteen numbers that `load_pair` brought."""
    if _BY_TAG[of].even is not None:
        x, y = zip_low.emit(builder, x, y), zip_high.emit(builder, x, y)
    return pack_array(builder, [x, y])


@tagged(types.int64)
def size_of(of: Any, _builder: Any) -> Any:
    """Bytes of a stored number."""
    return I64(_BY_TAG[of].size)


@tagged(types.int64)
def parts_of(of: Any, _builder: Any) -> Any:
    """How many bfloat16 a stored number is the sum of."""
    return I64(_BY_TAG[of].parts)


@tagged(types.boolean)
def is_int8(of: Any, _builder: Any) -> Any:
    """Whether the numbers are int8."""
    return ir.IntType(1)(of == types.int8)


@tagged(types.boolean)
def by_dots(of: Any, _builder: Any) -> Any:
    """Whether the numbers are for dot products of bfloat16."""
    return ir.IntType(1)(of in BY_DOTS)


@tagged(_WORDS, A, A)
def load_words_of_two(of: Any, builder: Any, one: Any, other: Any) -> Any:
    """Two rows' 32 numbers as words of bfloat16, over the unit of their kind."""
    if of == types.uint64:
        return pack_array(builder, [load_words.emit(builder, row) for row in (one, other)])
    x, y = (load_codes(builder, row) for row in (one, other))
    return words_of_rows(builder, x, y, BY_DOTS[of])


@tagged(_WORDS, A, A, types.int64)
def load_some_words_of_two(of: Any, builder: Any, one: Any, other: Any, count: Any) -> Any:
    """The same of the first `count` words, fewer than sixteen; then zeros."""
    if of == types.uint64:
        return pack_array(builder, [load_some_words.emit(builder, row, count) for row in (one, other)])
    x, y = (load_codes(builder, row, count) for row in (one, other))
    return words_of_rows(builder, x, y, BY_DOTS[of])


@tagged(_WORDS, A, A, types.boolean)
def load_zipped(of: Any, builder: Any, one: Any, other: Any, both: Any) -> Any:
    """Two rows' 32 numbers as words of one of each, in the order of `zip_words_low` and `zip_words_high`; without both
    the other's count as 0."""
    if of == types.uint64:
        x, y = (load_words.emit(builder, row) for row in (one, other))
        y = builder.select(both, y, zero_words.emit(builder))
        return pack_array(builder, [zip_words.emit(builder, x, y) for zip_words in (zip_words_low, zip_words_high)])
    x, y = (load_codes(builder, row) for row in (one, other))
    return zipped_words(builder, x, builder.select(both, y, y.type([0] * y.type.count)), BY_DOTS[of])


@njit(**OPTIONS)
def load_kind(address, kind):
    """Eight numbers of a kind known at run time, as float32."""
    if kind == FLOAT32:
        return load_f32(address)
    if kind == FLOAT16:
        return load_f16(address)
    return load_bf16(address)


@njit(**OPTIONS)
def store_kind(address, x, kind):
    """Eight numbers to memory, in a kind known at run time."""
    if kind == FLOAT32:
        store(address, x)
    elif kind == FLOAT16:
        store_f16(address, x)
    else:
        store_bf16(address, x)


@njit(**OPTIONS)
def bytes_of(kind):
    """Bytes of a number of this kind."""
    if kind == FLOAT32:
        return 4
    return 2 if kind <= BFLOAT16 else 1


@njit(**OPTIONS)
def unit_of(kind):
    """What loaded numbers of this kind must be multiplied with."""
    return np.float32(E4M3_UNIT if kind == E4M3 else 1)


@njit(**OPTIONS)
def parts_of_kind(kind):
    """How many bfloat16 a number of this kind is the sum of."""
    return 3 if kind == FLOAT32 else 2 if kind == FLOAT16 else 1
