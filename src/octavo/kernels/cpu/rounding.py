"""Rows of float numbers to 8-bit ones, in Numba, as `octavo.quantise` defines them bit by bit."""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.simd import absolute, fma, load_f32, load_splat, maximum, peak, splat, total
from octavo.kernels.cpu.simd_eight_bit import (
    clamp,
    divide,
    quotient,
    store_e4m3,
    store_e5m2,
    store_i8,
    to_whole,
)
from octavo.kernels.cpu.stored import E4M3, OPTIONS, bytes_of, load_kind

INT8_MAX = np.float32(127)
NAN = np.float32(np.nan)
E4M3_MAX, E5M2_MAX = np.float32(448), np.float32(57344)


@njit(**OPTIONS)
def row_scale(source, kind, width):
    """absmax / 127 of a row; NaN where a number of it is not finite."""
    size = bytes_of(kind)
    top = rest = splat(np.float32(0))
    for d in range(0, width * size, 8 * size):
        x = load_kind(source + d, kind)
        top = maximum(absolute(x), top)
        rest = fma(splat(np.float32(0)), x, rest)  # 0, or NaN
    return NAN if np.isnan(total(rest)) else peak(top) / INT8_MAX


@njit(**OPTIONS)
def quantised(x, scale):
    """Eight numbers as whole ones of -127 .. 127 under a row's scale; 0 where that is 0 or NaN."""
    if not scale > 0:
        return splat(np.float32(0))
    return clamp(to_whole(divide(x, splat(scale))), INT8_MAX)


@njit(**OPTIONS)
def store_row(source, kind, target, width):
    """A row to int8 under a scale of its own, which is returned."""
    scale, size = row_scale(source, kind, width), bytes_of(kind)
    for d in range(0, width, 8):
        store_i8(target + d, quantised(load_kind(source + d * size, kind), scale))
    return scale


@njit(**OPTIONS)
def store_channels(source, kind, target, width, scales):
    """A row to int8 under its channels' scales, [width] float32 at `scales`. Returns whether a number is NaN."""
    size = bytes_of(kind)
    zero = splat(np.float32(0))
    rest = zero
    for d in range(0, width, 8):
        x, scale = load_kind(source + d * size, kind), load_f32(scales + d * 4)
        # Infinities are none: clamped they are numbers.
        rest = fma(zero, clamp(x, np.float32(1)), rest)
        store_i8(target + d, clamp(to_whole(quotient(x, scale)), INT8_MAX))
    return np.isnan(total(rest))


@njit(**OPTIONS)
def store_fp8(source, kind, target, to_kind, width, scale):
    """A row to fp8 under one scale at address `scale`; at 0 there is none."""
    size = bytes_of(kind)
    for d in range(0, width, 8):
        x = load_kind(source + d * size, kind)
        if scale != 0:
            x = divide(x, load_splat(scale))
        if to_kind == E4M3:
            store_e4m3(target + d, clamp(x, E4M3_MAX))
        else:
            store_e5m2(target + d, clamp(x, E5M2_MAX))
