"""Vectors of eight floats for Numba: a type, and operations that are one LLVM instruction or a few.

Numba's own loops vectorise dot products badly. With these, a kernel is ordinary Python that names its registers.
Pointers are int64 addresses: an address that Numba takes for unsigned would become a double when a signed offset
is added, so addresses enter kernels as `np.int64`.

Numba keeps compiled kernels by the date of the kernel's own file: after a change here, touch `decode.py`.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8
"""One AVX register; LLVM makes two NEON registers of it."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_BYTE_POINTER = ir.IntType(8).as_pointer()


class _FloatVector(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"f32x{LANES}")


@register_model(_FloatVector)
class _FloatVectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: _FloatVector) -> None:
        super().__init__(manager, numba_type, _VECTOR)


_V = _FloatVector()
_A = types.int64  # an address, or an offset in bytes

Emit = Callable[..., Any]


def _operation(result: types.Type, *arguments: types.Type) -> Callable[[Emit], Any]:
    """Make an intrinsic of these types out of a function that emits LLVM: (builder, *values) -> value."""

    def wrap(emit: Emit) -> Any:
        def typing(_context: Any, *_given: Any) -> tuple[Any, Emit]:
            def generate(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
                return emit(builder, *values)

            return result(*arguments), generate

        typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
        typing.__signature__ = inspect.signature(emit).replace(  # type: ignore[attr-defined]
            parameters=[
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in ("context", *(f"value{i}" for i in range(len(arguments))))
            ]
        )
        return intrinsic(typing)

    return wrap


def _constant(value: float) -> ir.Constant:
    rounded = struct.unpack("f", struct.pack("f", value))[0]  # a float32's value, as LLVM's text form demands
    return ir.Constant(_VECTOR, [rounded] * LANES)


def _call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    function = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values)


def _load(builder: Any, address: Any, element: ir.Type, count: int, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, ir.VectorType(element, count).as_pointer()))
    value.align = align
    return value


def _broadcast(builder: Any, scalar: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(vector, vector, ir.Constant(_INTS, [0] * LANES))


@_operation(_V, _A)
def load_f32(builder: Any, address: Any) -> Any:
    """Eight float32."""
    return _load(builder, address, _F32, LANES, 4)


@_operation(_V, _A)
def load_f16(builder: Any, address: Any) -> Any:
    """Eight float16, widened."""
    return builder.fpext(_load(builder, address, ir.HalfType(), LANES, 2), _VECTOR)


@_operation(_V, _A)
def load_bf16(builder: Any, address: Any) -> Any:
    """Eight bfloat16, widened: the upper half of a float32."""
    halves = builder.zext(_load(builder, address, ir.IntType(16), LANES, 2), _INTS)
    return builder.bitcast(builder.shl(halves, ir.Constant(_INTS, [16] * LANES)), _VECTOR)


@_operation(types.void, _A, _V)
def store(builder: Any, address: Any, value: Any) -> Any:
    """Eight float32 to memory."""
    builder.store(value, builder.inttoptr(address, _VECTOR.as_pointer())).align = 4
    return ir.Constant(_BYTE_POINTER, None)


@_operation(types.void, _A, types.float32)
def store_one(builder: Any, address: Any, value: Any) -> Any:
    """One float32 to memory."""
    builder.store(value, builder.inttoptr(address, _F32.as_pointer()))
    return ir.Constant(_BYTE_POINTER, None)


@_operation(_V, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    """One number in all lanes."""
    return _broadcast(builder, scalar)


@_operation(_V, _A)
def load_splat(builder: Any, address: Any) -> Any:
    """One float32 from memory in all lanes."""
    pointer = builder.inttoptr(address, _F32.as_pointer())
    return _broadcast(builder, builder.load(pointer))


@_operation(_V, _V, _V, _V)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, x, y, z)


@_operation(_V, _V, _V)
def add(builder: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return builder.fadd(x, y)


@_operation(_V, _V, _V)
def sub(builder: Any, x: Any, y: Any) -> Any:
    """x - y."""
    return builder.fsub(x, y)


@_operation(_V, _V, _V)
def mul(builder: Any, x: Any, y: Any) -> Any:
    """x * y."""
    return builder.fmul(x, y)


@_operation(_V, _V, _V)
def maximum(builder: Any, x: Any, y: Any) -> Any:
    """The larger of x and y; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@_operation(types.boolean, _V, _V)
def any_above(builder: Any, x: Any, y: Any) -> Any:
    """Whether x > y in some lane."""
    lanes = builder.bitcast(builder.fcmp_ordered(">", x, y), ir.IntType(LANES))
    return builder.icmp_unsigned("!=", lanes, ir.Constant(ir.IntType(LANES), 0))


@_operation(_V, _V)
def swap_halves(builder: Any, x: Any) -> Any:
    """Lanes 4 to 7, then 0 to 3."""
    return builder.shuffle_vector(x, x, ir.Constant(_INTS, [4, 5, 6, 7, 0, 1, 2, 3]))


@_operation(_V, _V, _V, _V, _V, _V, _V, _V, _V)
def totals(builder: Any, *vectors: Any) -> Any:
    """The sums of eight vectors, one a lane: seven shuffled additions instead of eight trees."""

    def pairs(x: Any, y: Any) -> Any:
        even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
        return builder.fadd(*(builder.shuffle_vector(x, y, ir.Constant(_INTS, mask)) for mask in (even, odd)))

    a, b, c, d = (pairs(vectors[i], vectors[i + 1]) for i in range(0, 8, 2))
    left, right = pairs(a, b), pairs(c, d)
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return builder.fadd(*(builder.shuffle_vector(left, right, ir.Constant(_INTS, mask)) for mask in (low, high)))


@_operation(_V, _V)
def exp2(builder: Any, x: Any) -> Any:
    """2 ** x for x <= 0, within 2 ulp; 0 below -126 (also for -inf); NaN stays NaN."""
    tiny = builder.fcmp_ordered("<", x, _constant(-126.0))
    x = builder.select(tiny, _constant(-126.0), x)
    whole = _call(builder, f"llvm.rint.v{LANES}f32", _VECTOR, x)
    rest = builder.fsub(x, whole)
    # Taylor of 2 ** r on [-0.5, 0.5]: the next term is below 2 ** -24.
    value = _constant(1.5403530e-4)
    for factor in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        value = _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, value, rest, _constant(factor))
    exponent = builder.shl(builder.fptosi(whole, _INTS), ir.Constant(_INTS, [23] * LANES))
    power = builder.bitcast(builder.add(builder.bitcast(value, _INTS), exponent), _VECTOR)
    power = builder.select(builder.fcmp_unordered("uno", rest, rest), rest, power)
    return builder.select(tiny, _constant(0.0), power)


@_operation(types.void, _A)
def prefetch(builder: Any, address: Any) -> Any:
    """Ask for the cache line at an address; nothing happens if there is none."""
    pointer = builder.inttoptr(address, _BYTE_POINTER)
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, keep, data)
    return ir.Constant(_BYTE_POINTER, None)


@_operation(types.int64, _A, types.int64)
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 that threads share, and return what it was."""
    return builder.atomic_rmw("add", builder.inttoptr(address, _I64.as_pointer()), amount, "monotonic")
