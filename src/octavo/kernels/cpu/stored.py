"""How numbers are stored: told by a tag at compile time (pages), or by a kind at run time (what is touched once)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.core import types
from numba.extending import overload

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
from octavo.kernels.cpu.simd_eight_bit import (
    E4M3_UNIT,
    load_e4m3,
    load_e4m3_even,
    load_e4m3_odd,
    load_e5m2,
    load_e5m2_even,
    load_e5m2_odd,
    load_i8,
)

OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
"""How every function here is compiled."""

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


class _Stored(NamedTuple):
    size: int  # bytes of a number
    one: Callable[[int], Any]  # loads eight
    even: Callable[[int], Any] | None = None  # loads numbers 0, 2, ..., 14, where that costs less than neighbours
    odd: Callable[[int], Any] | None = None
    unit: float = 1.0  # what loaded numbers must be multiplied with


_BY_TAG = {
    types.float32: _Stored(4, load_f32),
    types.int16: _Stored(2, load_f16),
    types.uint16: _Stored(2, load_bf16, load_bf16_even, load_bf16_odd),
    types.int8: _Stored(1, load_i8),
    types.uint8: _Stored(1, load_e4m3, load_e4m3_even, load_e4m3_odd, E4M3_UNIT),
    types.uint32: _Stored(1, load_e5m2, load_e5m2_even, load_e5m2_odd),
}


def load(address: int, tag: type) -> Any:
    """Eight stored numbers as float32, over the tag's unit."""


@overload(load, inline="always")
def _load(address, tag):
    one = _BY_TAG[tag.dtype].one

    return lambda address, tag: one(address)


def load_pair(address: int, tag: type) -> Any:
    """Sixteen stored numbers as two vectors: halves, or the even and the odd ones where these cost less."""


@overload(load_pair, inline="always")
def _load_pair(address, tag):
    size, one, even, odd, _ = _BY_TAG[tag.dtype]
    if even is not None:
        return lambda address, tag: (even(address), odd(address))
    half = 8 * size

    return lambda address, tag: (one(address), one(address + half))


def size_of(tag: type) -> int:
    """Bytes of a stored number."""
    raise NotImplementedError("compiled functions only")


@overload(size_of, inline="always")
def _size_of(tag):
    size = _BY_TAG[tag.dtype].size
    return lambda tag: size


def unit_of(tag: type) -> float:
    """What `load` and `load_pair` leave to be multiplied with."""
    raise NotImplementedError("compiled functions only")


@overload(unit_of, inline="always")
def _unit_of(tag):
    unit = _BY_TAG[tag.dtype].unit
    return lambda tag: unit


def to_pair(x: Any, y: Any, tag: type) -> Any:
    """Two halves of sixteen numbers as `load_pair` would have them."""


@overload(to_pair, inline="always")
def _to_pair(x, y, tag):
    if _BY_TAG[tag.dtype].even is not None:
        return lambda x, y, tag: (evens(x, y), odds(x, y))
    return lambda x, y, tag: (x, y)


def from_pair(x: Any, y: Any, tag: type) -> Any:
    """The two halves of sixteen numbers that `load_pair` brought."""


@overload(from_pair, inline="always")
def _from_pair(x, y, tag):
    if _BY_TAG[tag.dtype].even is not None:
        return lambda x, y, tag: (zip_low(x, y), zip_high(x, y))
    return lambda x, y, tag: (x, y)


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
