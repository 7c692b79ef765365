"""Dot products of bfloat16 (AVX-512's) for Numba: two products a lane and instruction, summed in float32.

Squares lie as `simd_matrix` describes them. Numbers below 2 ** -126 count as 0, as there.
Intel, Architecture Instruction Set Extensions Programming Reference (319433), VDPBF16PS.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd_base import DONE, F32, I32, I64, A, broadcast, call, load_vector, operation, store_vector
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


_SUMS, _WORDS, _PAIRS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(_Bfloat16(), 2 * LANES)


def has_dot_products() -> bool:
    """Whether this machine has these instructions."""
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512f", "avx512bf16"))


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
    names = [I64, I64, I64, *(_SUMS for _ in places)]
    first = [I64(0), left, right, *before]
    number, a, b, *total = (builder.phi(kind) for kind in names)
    phis = [number, a, b, *total]
    for word in range(BLOCK // 2):
        line = builder.add(b, I64(word * _LINE))
        halves = [
            builder.bitcast(load_vector(builder, builder.add(line, I64(half * TILE_BYTES)), I32, LANES, 4), _PAIRS)
            for half in range(BLOCK // LANES)
        ]
        for row in range(ROWS):
            address = builder.inttoptr(builder.add(a, I64(row * TILE_BYTES + word * 4)), I32.as_pointer())
            pair = builder.bitcast(broadcast(builder, builder.load(address), LANES), _PAIRS)
            for half, words in enumerate(halves):
                i = row * len(halves) + half
                total[i] = call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _SUMS, total[i], pair, words)
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
