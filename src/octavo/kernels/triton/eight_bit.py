"""8-bit numbers on the device: back to real ones while attending, and from real ones while writing.

`octavo.quantise` defines what is written, bit by bit. NUMBER is what one number is: "plain" (16 bits and more), "int8",
"e4m3" or "e5m2". ISA tells which instructions there are: 0: those that every GPU and the interpreter have; otherwise
NVIDIA's compute capability, times 10.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8_MAX = tl.constexpr(127.0)

ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away again, it rounds what is below 2^22 to whole numbers, halves to even."""


@triton.jit
def unpack(pairs, NUMBER: tl.constexpr, TYPE: tl.constexpr, ISA: tl.constexpr):
    """The numbers in the low and in the high bytes of int16 pairs, exactly, as TYPE: two tensors of the same shape.

    Bytes are taken from pairs, as matrix units have no way to transpose bytes on their way from shared memory.
    """
    if NUMBER == "int8" and ISA >= 80 and TYPE == tl.float16:  # noqa: SIM300
        # 0x6400 | n is 1024 + n.
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 u, c;
            xor.b32 u, $2, 0x80808080;
            mov.b32 c, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4240;
            prmt.b32 $1, u, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    elif NUMBER == "int8" and ISA >= 80 and TYPE == tl.bfloat16:  # noqa: SIM300
        # 0x4300 | n is 128 + n for n < 128; to it comes -128, or -256 where the sign is set.
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 n, s, one, m;
            and.b32 n, $2, 0x7f7f7f7f;
            and.b32 s, $2, 0x80808080;
            mov.b32 one, 0x3f803f80;
            prmt.b32 $0, n, 0x43434343, 0x4240;
            prmt.b32 m, s, 0xc3c3c3c3, 0x4240;
            fma.rn.bf16x2 $0, $0, one, m;
            prmt.b32 $1, n, 0x43434343, 0x4341;
            prmt.b32 m, s, 0xc3c3c3c3, 0x4341;
            fma.rn.bf16x2 $1, $1, one, m; }""",
            "=&r,=&r,r", [pairs], (tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    elif NUMBER == "e4m3" and ISA >= 89 and TYPE == tl.float16:  # noqa: SIM300
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 u; .reg .b16 a, b;
            prmt.b32 u, $2, 0, 0x3120;
            mov.b32 {a, b}, u;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    elif NUMBER == "e5m2" and ISA >= 80 and TYPE == tl.float16:  # noqa: SIM300
        low, high = tl.inline_asm_elementwise(
            """{ prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414; }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    else:
        low, high = widen(pairs & 0xFF, NUMBER).to(TYPE), widen((pairs >> 8) & 0xFF, NUMBER).to(TYPE)
    return low, high


@triton.jit
def widen(byte, NUMBER: tl.constexpr):
    """The numbers that int16 in 0 .. 255 stand for, float16."""
    if NUMBER == "int8":
        return ((byte ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif NUMBER == "e5m2":
        return (byte << 8).to(tl.float16, bitcast=True)
    else:
        # An exponent of four bits in the place of one of five is 8 too small.
        small = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), small * 256.0)


@triton.jit
def scale_of_rows(largest, finite):
    """The scales of rows by their largest magnitude; NaN where the row is not finite. All float32, any shape."""
    return tl.where(finite, tl.div_rn(largest, tl.zeros_like(largest) + INT8_MAX), float("nan"))


@triton.jit
def to_int8(x, scale):
    """`clamp(rint(x / scale), -127, 127)`, 0 where the scale is 0 or anything is NaN; x and scale of one shape."""
    value = tl.div_rn(x, scale)
    value = tl.where((value == value) & (scale != 0), value, 0.0)
    value = tl.minimum(tl.maximum(value, -INT8_MAX), INT8_MAX)
    return ((value + ROUNDER) - ROUNDER).to(tl.int8)


@triton.jit
def to_fp8(x, NUMBER: tl.constexpr):
    """float32 as the bytes of fp8, uint8: saturated, rounded to nearest, halves to even; NaN stays NaN."""
    MANTISSA: tl.constexpr = 3 if NUMBER == "e4m3" else 2
    BIAS: tl.constexpr = 7 if NUMBER == "e4m3" else 15
    MOST: tl.constexpr = 448.0 if NUMBER == "e4m3" else 57344.0
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)  # normal number
    UNIT: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)  # a float32 whose last place is that of subnormal fp8 numbers
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), MOST)
    size_bits = size.to(tl.int32, bitcast=True)
    below: tl.constexpr = 23 - MANTISSA
    rounded = size_bits + ((1 << (below - 1)) - 1) + ((size_bits >> below) & 1)
    normal = (rounded >> below) - ((127 - BIAS) << MANTISSA)
    subnormal = (size + UNIT).to(tl.int32, bitcast=True) - (tl.zeros_like(size) + UNIT).to(tl.int32, bitcast=True)
    code = tl.where(size < SMALLEST, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
