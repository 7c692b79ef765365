"""Vectors of 8-bit numbers: read as floats, and floats rounded to them.

fp8 widens by shifts: e5m2 is the upper byte of a float16, e4m3 without its sign one of its middle.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd_base import (
    F16,
    F32,
    I8,
    I16,
    INTS,
    LANES,
    V8,
    A,
    V,
    constant,
    load_vector,
    math_of,
    operation,
    store_vector,
)

_BYTES, _SHORTS, _HALVES = (ir.VectorType(one, LANES) for one in (I8, I16, F16))
_FLOATS = ir.VectorType(F32, LANES)

E4M3_UNIT = 256.0
"""What the loads of e4m3 must be multiplied with: float16's exponent has another bias."""


def _shorts(number: int) -> ir.Constant:
    return ir.Constant(_SHORTS, [number] * LANES)


def _widened(builder: Any, shorts: Any) -> Any:
    """The bits of eight float16, as float32."""
    return builder.fpext(builder.bitcast(shorts, _HALVES), _FLOATS)


# --- Loads ------------------------------------------------------------------------------------------------------


@operation(V8, A)
def load_i8(builder: Any, address: Any) -> Any:
    """Eight int8 as float32."""
    return builder.sitofp(builder.sext(load_vector(builder, address, I8, LANES, 1), INTS), _FLOATS)


def _upper_bytes(builder: Any, address: Any) -> Any:
    """Eight bytes, each the upper one of 16 bits."""
    return builder.shl(builder.zext(load_vector(builder, address, I8, LANES, 1), _SHORTS), _shorts(8))


def _even_bytes(builder: Any, address: Any) -> Any:
    """Bytes 0, 2, ..., 14 likewise."""
    return builder.shl(load_vector(builder, address, I16, LANES, 1), _shorts(8))


def _odd_bytes(builder: Any, address: Any) -> Any:
    """Bytes 1, 3, ..., 15 likewise."""
    return builder.and_(load_vector(builder, address, I16, LANES, 1), _shorts(0xFF00))


@operation(V8, A)
def load_e5m2(builder: Any, address: Any) -> Any:
    """Eight e5m2."""
    return _widened(builder, _upper_bytes(builder, address))


@operation(V8, A)
def load_e5m2_even(builder: Any, address: Any) -> Any:
    """Elements 0, 2, ..., 14 of sixteen e5m2."""
    return _widened(builder, _even_bytes(builder, address))


@operation(V8, A)
def load_e5m2_odd(builder: Any, address: Any) -> Any:
    """Elements 1, 3, ..., 15 of sixteen e5m2."""
    return _widened(builder, _odd_bytes(builder, address))


def _e4m3(builder: Any, upper: Any) -> Any:
    """e4m3 in the upper bytes of 16 bits, as float32 over E4M3_UNIT: the sign stays, the rest moves down by one bit."""
    moved = builder.and_(builder.ashr(upper, _shorts(1)), _shorts(0xBF80))
    nan = builder.icmp_signed("==", builder.and_(upper, _shorts(0x7F00)), _shorts(0x7F00))
    return _widened(builder, builder.or_(moved, builder.and_(builder.sext(nan, _SHORTS), _shorts(0x7E00))))


@operation(V8, A)
def load_e4m3(builder: Any, address: Any) -> Any:
    """Eight e4m3, over E4M3_UNIT."""
    return _e4m3(builder, _upper_bytes(builder, address))


@operation(V8, A)
def load_e4m3_even(builder: Any, address: Any) -> Any:
    """Elements 0, 2, ..., 14 of sixteen e4m3, over E4M3_UNIT."""
    return _e4m3(builder, _even_bytes(builder, address))


@operation(V8, A)
def load_e4m3_odd(builder: Any, address: Any) -> Any:
    """Elements 1, 3, ..., 15 of sixteen e4m3, over E4M3_UNIT."""
    return _e4m3(builder, _odd_bytes(builder, address))


# --- Rounding ---------------------------------------------------------------------------------------------------


@operation(V, V, V)
def divide(builder: Any, x: Any, y: Any) -> Any:
    """x / y, correctly rounded."""
    return builder.fdiv(x, y)


@operation(V, V)
def to_whole(builder: Any, x: Any) -> Any:
    """The nearest whole number, halves to even."""
    return math_of(builder, "rint", x)


@operation(V, V, types.float32)
def clamp(builder: Any, x: Any, most: Any) -> Any:
    """x between -most and most; NaN stays NaN."""
    one = ir.Constant(x.type, ir.Undefined)
    for lane in range(x.type.count):
        one = builder.insert_element(one, most, ir.Constant(ir.IntType(32), lane))
    x = builder.select(builder.fcmp_ordered(">", x, one), one, x)
    least = builder.fsub(constant(-0.0, x), one)
    return builder.select(builder.fcmp_ordered("<", x, least), least, x)


@operation(V, V, V)
def quotient(builder: Any, x: Any, y: Any) -> Any:
    """x / y; 0 where y is 0 or the quotient is NaN."""
    value, zero = builder.fdiv(x, y), constant(0.0, x)
    bad = builder.or_(builder.fcmp_ordered("==", y, zero), builder.fcmp_unordered("uno", value, value))
    return builder.select(bad, zero, value)


@operation(types.void, A, V8)
def store_i8(builder: Any, address: Any, value: Any) -> Any:
    """Eight whole numbers that int8 has."""
    return store_vector(builder, address, builder.trunc(builder.fptosi(value, INTS), _BYTES), 1)


def _store_fp8(builder: Any, address: Any, value: Any, mantissa: int, bias: int) -> Any:
    """Eight floats to fp8, halves to even; NaN stays NaN, the others are within fp8's range.

    Args:
        mantissa: bits of fp8's; bias: of its exponent.
    """

    def ints(number: int) -> ir.Constant:
        return ir.Constant(INTS, [number] * LANES)

    bits, shift = builder.bitcast(value, INTS), 23 - mantissa
    sign = builder.and_(builder.lshr(bits, ints(24)), ints(0x80))
    size = builder.and_(bits, ints(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, ints(shift)), ints(1))
    rebias = (bias - 127 << 23) + (1 << shift - 1) - 1
    normal = builder.lshr(builder.add(builder.add(size, odd), ints(rebias)), ints(shift))
    # Below the least normal number all steps are equal. Added to a number with steps of that size, float32 rounds.
    step = float(2 ** (1 - bias - mantissa + 23))
    shifted = builder.fadd(builder.bitcast(size, _FLOATS), ir.Constant(_FLOATS, [step] * LANES))
    small = builder.and_(builder.bitcast(shifted, INTS), ints(0x7FFFFF))
    below = builder.icmp_signed("<", size, ints(128 - bias << 23))
    rounded = builder.select(below, small, normal)
    nan = builder.icmp_signed(">", size, ints(0x7F800000))
    rounded = builder.or_(builder.select(nan, ints(0x7F), rounded), sign)
    return store_vector(builder, address, builder.trunc(rounded, _BYTES), 1)


@operation(types.void, A, V8)
def store_e4m3(builder: Any, address: Any, value: Any) -> Any:
    """Eight e4m3 from numbers up to 448."""
    return _store_fp8(builder, address, value, 3, 7)


@operation(types.void, A, V8)
def store_e5m2(builder: Any, address: Any, value: Any) -> Any:
    """Eight e5m2 from numbers up to 57344."""
    return _store_fp8(builder, address, value, 2, 15)
