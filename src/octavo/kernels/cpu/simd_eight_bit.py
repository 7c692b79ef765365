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
    I8X16,
    I16,
    I16X16,
    I32,
    I32X8,
    INTS,
    LANES,
    V8,
    A,
    V,
    broadcast,
    call,
    constant,
    has_features,
    load_vector,
    math_of,
    operation,
    shuffle,
    store_vector,
    sum_vectors,
)

_BYTES, _SHORTS, _HALVES = (ir.VectorType(one, LANES) for one in (I8, I16, F16))
_FLOATS = ir.VectorType(F32, LANES)

E4M3_UNIT = 256.0
"""What the loads of e4m3 must be multiplied with: float16's exponent has another bias."""


HAS_PAIRS = has_features("avx2")
"""Whether the machine multiplies sixteen int16 and adds neighbours at once; LLVM does not see it in plain terms."""


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
    """e4m3 in the upper bytes of 16 bits, as float16 over E4M3_UNIT: the sign stays, the rest moves down by one bit.
    NaN becomes 480, the next number."""
    return builder.and_(builder.ashr(upper, _shorts(1)), _shorts(0xBF80))


@operation(V8, A)
def load_e4m3(builder: Any, address: Any) -> Any:
    """Eight e4m3, over E4M3_UNIT."""
    upper = _upper_bytes(builder, address)
    nan = builder.icmp_signed("==", builder.and_(upper, _shorts(0x7F00)), _shorts(0x7F00))
    quiet = builder.and_(builder.sext(nan, _SHORTS), _shorts(0x7E00))
    return _widened(builder, builder.or_(_e4m3(builder, upper), quiet))


@operation(V8, A)
def load_e4m3_even(builder: Any, address: Any) -> Any:
    """Elements 0, 2, ..., 14 of sixteen e4m3, over E4M3_UNIT; NaN as 480, see `note_codes`."""
    return _widened(builder, _e4m3(builder, _even_bytes(builder, address)))


@operation(V8, A)
def load_e4m3_odd(builder: Any, address: Any) -> Any:
    """Elements 1, 3, ..., 15 of sixteen e4m3, over E4M3_UNIT; NaN as 480."""
    return _widened(builder, _e4m3(builder, _odd_bytes(builder, address)))


_CODES = ir.VectorType(I8, 2 * LANES)
_TOP_CODE = ir.Constant(_CODES, [0x7F] * 2 * LANES)


@operation(I8X16)
def no_codes(builder: Any) -> Any:
    """The start of `note_codes`."""
    return ir.Constant(_CODES, [0] * 2 * LANES)


@operation(I8X16, I8X16, A)
def note_codes(builder: Any, noted: Any, address: Any) -> Any:
    """The larger of what was noted and sixteen codes without their sign: NaN is e4m3's largest."""
    codes = builder.and_(load_vector(builder, address, I8, 2 * LANES, 1), _TOP_CODE)
    return builder.select(builder.icmp_unsigned(">", codes, noted), codes, noted)


@operation(V8, V8, I8X16, I8X16)
def spoil_halves(builder: Any, x: Any, one: Any, other: Any) -> Any:
    """x, NaN in lanes 0 to 3 where NaN is noted in `one`, in lanes 4 to 7 where it is in `other`."""
    terms = []
    for noted in (one, other):
        found = builder.bitcast(builder.icmp_signed("==", noted, _TOP_CODE), I16)
        terms.append(builder.select(builder.icmp_signed("!=", found, I16(0)), F32(float("nan")), F32(0.0)))
    low, high = (broadcast(builder, term, LANES) for term in terms)
    return builder.fadd(x, shuffle(builder, low, high, [0] * 4 + [8] * 4))


def _spoil(builder: Any, x: Any, noted: Any, lanes: list[int]) -> Any:
    bad = builder.icmp_signed("==", shuffle(builder, noted, noted, lanes), ir.Constant(_BYTES, [0x7F] * LANES))
    return builder.select(bad, ir.Constant(_FLOATS, [float("nan")] * LANES), x)


@operation(V8, V8, I8X16)
def spoil_even(builder: Any, x: Any, noted: Any) -> Any:
    """x, NaN where NaN is noted among codes 0, 2, ..., 14."""
    return _spoil(builder, x, noted, list(range(0, 2 * LANES, 2)))


@operation(V8, V8, I8X16)
def spoil_odd(builder: Any, x: Any, noted: Any) -> Any:
    """x, NaN where NaN is noted among codes 1, 3, ..., 15."""
    return _spoil(builder, x, noted, list(range(1, 2 * LANES, 2)))


# --- Products of whole numbers -----------------------------------------------------------------------------------


@operation(I32X8)
def zeros(builder: Any) -> Any:
    """Eight int32, 0."""
    return ir.Constant(INTS, [0] * LANES)


@operation(I16X16, A)
def load_i8_short(builder: Any, address: Any) -> Any:
    """Sixteen int8 as int16."""
    return builder.sext(load_vector(builder, address, I8, 2 * LANES, 1), ir.VectorType(I16, 2 * LANES))


@operation(I16X16, A)
def load_i16(builder: Any, address: Any) -> Any:
    """Sixteen int16."""
    return load_vector(builder, address, I16, 2 * LANES, 2)


@operation(I16X16, A)
def load_half_short(builder: Any, address: Any) -> Any:
    """Eight int8 as int16, then zeros."""
    half = builder.sext(load_vector(builder, address, I8, LANES, 1), _SHORTS)
    return shuffle(builder, half, _shorts(0), list(range(2 * LANES)))


def _zipped(builder: Any, one: Any, other: Any, count: int, first: int) -> Any:
    """Numbers first to first + 7 of two rows of `count` int8, by turns, as int16."""
    x, y = (load_vector(builder, address, I8, count, 1) for address in (one, other))
    lanes = [first + i // 2 + count * (i % 2) for i in range(2 * LANES)]
    return builder.sext(shuffle(builder, x, y, lanes), ir.VectorType(I16, 2 * LANES))


@operation(I16X16, A, A)
def load_zip_low(builder: Any, one: Any, other: Any) -> Any:
    """The first eight of sixteen int8 of two rows, by turns, as int16."""
    return _zipped(builder, one, other, 2 * LANES, 0)


@operation(I16X16, A, A)
def load_zip_high(builder: Any, one: Any, other: Any) -> Any:
    """The last eight likewise."""
    return _zipped(builder, one, other, 2 * LANES, LANES)


@operation(I16X16, A, A)
def load_half_zip(builder: Any, one: Any, other: Any) -> Any:
    """Eight int8 of two rows likewise, where no more may be read."""
    return _zipped(builder, one, other, LANES, 0)


@operation(I16X16, A)
def splat_pair(builder: Any, address: Any) -> Any:
    """Two int16 from memory, eight times."""
    pair = builder.load(builder.inttoptr(address, I32.as_pointer()))
    return builder.bitcast(broadcast(builder, pair, LANES), ir.VectorType(I16, 2 * LANES))


@operation(types.void, A, V8, V8)
def store_weights(builder: Any, address: Any, x: Any, factor: Any) -> Any:
    """x * factor, below 2 ** 15, rounded to int16: lanes 0 and 4 side by side, 1 and 5, 2 and 6, 3 and 7."""
    # Adding 1.5 * 2 ** 23 leaves the nearest whole number in the lowest bits.
    whole = builder.bitcast(math_of(builder, "fma", x, factor, constant(1.5 * 2**23, x)), ir.VectorType(I16, 2 * LANES))
    return store_vector(builder, address, shuffle(builder, whole, whole, [0, 8, 2, 10, 4, 12, 6, 14]), 4)


@operation(types.void, A, V8)
def store_i16(builder: Any, address: Any, value: Any) -> Any:
    """Eight whole numbers as int16."""
    return store_vector(builder, address, builder.trunc(builder.fptosi(value, INTS), _SHORTS), 2)


@operation(I32X8, I16X16, I16X16, I32X8)
def add_products(builder: Any, x: Any, y: Any, sums: Any) -> Any:
    """sums + the products of neighbours in pairs: x0 y0 + x1 y1, x2 y2 + x3 y3, ..."""
    if HAS_PAIRS:
        return builder.add(sums, call(builder, "llvm.x86.avx2.pmadd.wd", INTS, x, y))
    wide = ir.VectorType(I32, 2 * LANES)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even, odd = (shuffle(builder, products, products, list(range(i, 2 * LANES, 2))) for i in (0, 1))
    return builder.add(sums, builder.add(even, odd))


@operation(V8, I32X8)
def to_float(builder: Any, x: Any) -> Any:
    """Eight int32 as float32."""
    return builder.sitofp(x, _FLOATS)


@operation(I32X8, *[I32X8] * 8)
def whole_totals(builder: Any, *vectors: Any) -> Any:
    """The sums of eight vectors, one a lane."""
    return sum_vectors(builder, builder.add, vectors)


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
