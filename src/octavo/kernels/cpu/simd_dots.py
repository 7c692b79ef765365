"""Dot products of bfloat16 (AVX-512's) for Numba: two products a lane and instruction, summed in float32.

Words are as in `simd_matrix`: of two bfloat16. Numbers below 2 ** -126 count as 0, as there. Machines without these
instructions widen both numbers of a word, which is for tests.
Intel, Architecture Instruction Set Extensions Programming Reference (319433), VDPBF16PS.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import pack_array

from octavo.kernels.cpu.simd_base import (
    DONE,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    V8,
    V16,
    A,
    broadcast,
    call,
    has_features,
    load_vector,
    math_of,
    operation,
    shuffle,
    store_vector,
)
from octavo.kernels.cpu.simd_eight_bit import E4M3_UNIT
from octavo.kernels.cpu.simd_matrix import BLOCK, TILE_BYTES

ROWS = 8
"""Rows whose sums with BLOCK columns stay in registers: sixteen of 32."""

LANES = 16

_LINE = BLOCK * 4


class _Bfloat16(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_SUMS, _WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_PAIRS = _WORDS if llvmlite.binding.llvm_version_info[0] < 16 else ir.VectorType(_Bfloat16(), 2 * LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)
_BYTES, _CODES = ir.VectorType(I8, 2 * LANES), ir.VectorType(I8, 4 * LANES)


def has_dot_products() -> bool:
    """Whether this machine has these instructions."""
    return has_features("avx512f", "avx512bf16")


def has_byte_tables() -> bool:
    """Whether it looks up bytes in tables of 128 as well."""
    return has_dot_products() and has_features("avx512vbmi")


def _add(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """sums + a b, of words."""
    if has_dot_products():
        pairs = (builder.bitcast(x, _PAIRS) for x in (a, b))
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, sums, *pairs)
    a, b = (builder.bitcast(x, _WORDS) for x in (a, b))
    low, high = ([f(builder, x) for x in (a, b)] for f in (_low_half, _high_half))
    return math_of(builder, "fma", *high, math_of(builder, "fma", *low, sums))


def _low_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, ir.Constant(_WORDS, [16] * LANES)), _SUMS)


def _high_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, ir.Constant(_WORDS, [-0x10000] * LANES)), _SUMS)


@operation(types.void, A, A, A, types.int64, A, types.boolean)
def add_dots(builder: Any, left: Any, right: Any, right_step: Any, count: Any, sums: Any, fresh: Any) -> Any:
    """sums = (0 if fresh else sums) + left[0] right[0] + ... + left[count - 1] right[count - 1], for ROWS rows.

    Args:
        left: rows of the first of squares that lie one after another.
        right, right_step: words [16][BLOCK], and the bytes from one square to the next; count: at least 1.
        sums: [ROWS][BLOCK] float32.
    """
    places = [(row, half) for row in range(ROWS) for half in range(BLOCK // LANES)]
    at = [builder.add(sums, I64(row * _LINE + half * TILE_BYTES)) for row, half in places]
    zero = ir.Constant(_SUMS, [0.0] * LANES)
    before = [builder.select(fresh, zero, load_vector(builder, place, F32, LANES, 4)) for place in at]
    entry, loop, after = builder.block, builder.append_basic_block("squares"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    number, a, b, *total = phis = [builder.phi(kind) for kind in (I64, I64, I64, *(_SUMS for _ in places))]
    first = [I64(0), left, right, *before]
    for word in range(BLOCK // 2):
        line = builder.add(b, I64(word * _LINE))
        halves = [
            load_vector(builder, builder.add(line, I64(half * TILE_BYTES)), I32, LANES, 4)
            for half in range(BLOCK // LANES)
        ]
        for row in range(ROWS):
            address = builder.inttoptr(builder.add(a, I64(row * TILE_BYTES + word * 4)), I32.as_pointer())
            pair = broadcast(builder, builder.load(address), LANES)
            for half, words in enumerate(halves):
                i = row * len(halves) + half
                total[i] = _add(builder, total[i], pair, words)
    following = [
        builder.add(number, I64(1)),
        builder.add(a, I64(BLOCK * TILE_BYTES)),
        builder.add(b, right_step),
        *total,
    ]
    builder.cbranch(builder.icmp_signed("<", following[0], count), loop, after)
    for phi, one, more in zip(phis, first, following, strict=True):
        phi.add_incoming(one, entry)
        phi.add_incoming(more, loop)
    builder.position_at_end(after)
    for place, result in zip(at, total, strict=True):
        store_vector(builder, place, result, 4)
    return DONE


@operation(V16, V16, V16, V16)
def add_dot(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """sums + a b, words in float32's place."""
    return _add(builder, sums, a, b)


@operation(V16)
def zero_words(_builder: Any) -> Any:
    """Sixteen zeros."""
    return ir.Constant(_SUMS, [0.0] * LANES)


@operation(V16, A)
def load_words(builder: Any, address: Any) -> Any:
    """Sixteen words, or float32."""
    return load_vector(builder, address, F32, LANES, 2)


@operation(V16, A, types.int64)
def load_some_words(builder: Any, address: Any, count: Any) -> Any:
    """The first `count` words, fewer than sixteen; then zeros."""
    mask = builder.trunc(builder.sub(builder.shl(I64(1), count), I64(1)), I16)
    lanes = builder.bitcast(mask, ir.VectorType(I1, LANES))
    place, zero = builder.inttoptr(address, _SUMS.as_pointer()), ir.Constant(_SUMS, [0.0] * LANES)
    return call(builder, f"llvm.masked.load.v{LANES}f32.p0", _SUMS, place, I32(2), lanes, zero)


def _from_codes(builder: Any, codes: Any, dtype: torch.dtype) -> list[Any]:
    """The bfloat16 of 64 fp8 codes, those of e4m3 over E4M3_UNIT, as two vectors of words: of each sixteen codes the
    first eight, and the others."""
    if has_byte_tables():
        sizes = torch.arange(128, dtype=torch.uint8, device="cpu").view(dtype).to(torch.bfloat16)
        if dtype == torch.float8_e4m3fn:
            sizes /= E4M3_UNIT
        table = sizes.view(torch.int8).view(128, 2)
        low, high = (_look_up(builder, codes, table[:, half].tolist()) for half in (0, 1))
        sign = builder.and_(codes, ir.Constant(_CODES, [-128] * 4 * LANES))
        x, y = low, builder.or_(high, sign)
        places = [
            [16 * lane + first + i + of for lane in range(4) for i in range(8) for of in (0, 4 * LANES)]
            for first in (0, 8)
        ]
    else:
        x = y = _widened(builder, codes, dtype)
        places = [[16 * lane + first + i for lane in range(4) for i in range(8)] for first in (0, 8)]
    return [builder.bitcast(shuffle(builder, x, y, lanes), _SUMS) for lanes in places]


def _look_up(builder: Any, codes: Any, table: list[int]) -> Any:
    """table[code % 128], bytes."""
    low, high = (ir.Constant(_CODES, table[first : first + 64]) for first in (0, 64))
    return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _CODES, low, codes, high)


def _widened(builder: Any, codes: Any, dtype: torch.dtype) -> Any:
    """The bits of the codes' bfloat16, in plain terms, by way of float16: see `simd_eight_bit`."""
    shorts, halves, floats, ints = (ir.VectorType(kind, 4 * LANES) for kind in (I16, ir.HalfType(), F32, I32))

    def all_of(kind: Any, value: Any) -> ir.Constant:
        return ir.Constant(kind, [value] * 4 * LANES)

    half = upper = builder.shl(builder.zext(codes, shorts), all_of(shorts, 8))
    if dtype == torch.float8_e4m3fn:
        half = builder.and_(builder.ashr(upper, all_of(shorts, 1)), all_of(shorts, 0xBF80))
    numbers = builder.fpext(builder.bitcast(half, halves), floats)
    if dtype == torch.float8_e4m3fn:
        size = builder.and_(upper, all_of(shorts, 0x7F00))
        is_nan = builder.icmp_unsigned("==", size, all_of(shorts, 0x7F00))
        numbers = builder.select(is_nan, all_of(floats, float("nan")), numbers)
    return builder.trunc(builder.lshr(builder.bitcast(numbers, ints), all_of(ints, 16)), shorts)


def words_of_rows(builder: Any, one: Any, other: Any, dtype: torch.dtype) -> Any:
    """Two rows of 32 codes: sixteen words of each."""
    lanes = [32 * row + 8 * lane + i for lane in range(4) for row in (0, 1) for i in range(8)]
    return pack_array(builder, _from_codes(builder, shuffle(builder, one, other, lanes), dtype))


def zipped_words(builder: Any, one: Any, other: Any, dtype: torch.dtype) -> Any:
    """Two rows of 32 codes: `zip_words_low` and `zip_words_high` of them."""
    lanes = [32 * row + i for i in range(32) for row in (0, 1)]
    return pack_array(builder, _from_codes(builder, shuffle(builder, one, other, lanes), dtype))


def load_codes(builder: Any, address: Any, count: Any = None) -> Any:
    """32 codes, or the first `count` words' and then zeros."""
    if count is None:
        return load_vector(builder, address, I8, 2 * LANES, 1)
    mask = builder.trunc(builder.sub(builder.shl(I64(1), builder.shl(count, I64(1))), I64(1)), I32)
    lanes = builder.bitcast(mask, ir.VectorType(I1, 2 * LANES))
    place = builder.inttoptr(address, _BYTES.as_pointer())
    zero = ir.Constant(_BYTES, [0] * 2 * LANES)
    return call(builder, f"llvm.masked.load.v{2 * LANES}i8.p0", _BYTES, place, I32(1), lanes, zero)


@operation(V16, A)
def load_word(builder: Any, address: Any) -> Any:
    """One word in all lanes."""
    return broadcast(builder, builder.load(builder.inttoptr(address, F32.as_pointer())), LANES)


def _zip(builder: Any, a: Any, b: Any, first: int) -> Any:
    lanes = [8 * lane + first + i + of for lane in range(4) for i in range(4) for of in (0, 2 * LANES)]
    return builder.bitcast(shuffle(builder, builder.bitcast(a, _SHORTS), builder.bitcast(b, _SHORTS), lanes), _SUMS)


@operation(V16, V16, V16)
def zip_words_low(builder: Any, a: Any, b: Any) -> Any:
    """Words of (a, b)'s bfloat16 numbers 0 to 3, 8 to 11, 16 to 19, 24 to 27: one instruction's order."""
    return _zip(builder, a, b, 0)


@operation(V16, V16, V16)
def zip_words_high(builder: Any, a: Any, b: Any) -> Any:
    """Words of the other numbers, 4 to 7 and so on."""
    return _zip(builder, a, b, 4)


@operation(V8, V8, V8)
def low_halves(builder: Any, x: Any, y: Any) -> Any:
    """Lanes 0 to 3 of x, then of y."""
    return shuffle(builder, x, y, [0, 1, 2, 3, 8, 9, 10, 11])


@operation(V8, V8, V8)
def high_halves(builder: Any, x: Any, y: Any) -> Any:
    """Lanes 4 to 7 of x, then of y."""
    return shuffle(builder, x, y, [4, 5, 6, 7, 12, 13, 14, 15])


@operation(V16, V8)
def twice(builder: Any, x: Any) -> Any:
    """Eight lanes, and again."""
    return shuffle(builder, x, x, [*range(8), *range(8)])


@operation(types.void, A, V8)
def store_weights(builder: Any, address: Any, x: Any) -> Any:
    """Four words of lanes i and 4 + i, rounded to the nearest bfloat16; of numbers that are not negative."""
    bits = builder.add(builder.bitcast(x, ir.VectorType(I32, 8)), ir.Constant(ir.VectorType(I32, 8), [0x8000] * 8))
    low, high = (shuffle(builder, bits, bits, list(range(first, first + 4))) for first in (0, 4))
    words = builder.or_(
        builder.lshr(low, ir.Constant(low.type, [16] * 4)), builder.and_(high, ir.Constant(low.type, [-0x10000] * 4))
    )
    return store_vector(builder, address, words, 4)


@operation(V16, *(V16 for _ in range(LANES)))
def totals(builder: Any, *vectors: Any) -> Any:
    """The sums of sixteen vectors, one a lane: 15 additions of shuffled pairs."""

    def within(low: list[int], high: list[int]) -> tuple[list[int], list[int]]:
        return tuple([4 * lane + i for lane in range(4) for i in four] for four in (low, high))  # type: ignore[return-value]

    def quarters(*chosen: int) -> list[int]:
        return [4 * quarter + i for quarter in chosen for i in range(4)]

    both = LANES
    steps = (
        within([0, both, 1, both + 1], [2, both + 2, 3, both + 3]),
        within([0, 1, both, both + 1], [2, 3, both + 2, both + 3]),
        (quarters(0, 2, 4, 6), quarters(1, 3, 5, 7)),
        (quarters(0, 2, 4, 6), quarters(1, 3, 5, 7)),
    )
    left = list(vectors)
    for lanes in steps:
        left = [
            builder.fadd(*(shuffle(builder, left[i], left[i + 1], one) for one in lanes))
            for i in range(0, len(left), 2)
        ]
    return left[0]
