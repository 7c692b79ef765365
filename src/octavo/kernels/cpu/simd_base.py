"""A type for vectors of floats in Numba, and what operations on it are made of.

`simd` has the operations; this is for those who add some.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8
"""One AVX register; LLVM makes two NEON registers of it."""


def has_features(*names: str) -> bool:
    """Whether the machine that Numba compiles for has all of these; False where a setting of Numba's names another one
    than this, or takes its vectors away."""
    is_other = config.CPU_NAME or config.CPU_FEATURES or not config.ENABLE_AVX
    found = {} if is_other else llvmlite.binding.get_host_cpu_features()
    return all(found.get(name, False) for name in names)


WIDE = 16 if has_features("avx512f") else LANES
"""The widest register of this machine."""

IS_ZEN = llvmlite.binding.get_host_cpu_name().startswith("znver")
"""Whether this is one of AMD's Zen cores."""

F16, F32 = ir.HalfType(), ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
INTS = ir.VectorType(I32, LANES)
BYTE_POINTER = ir.IntType(8).as_pointer()
DONE = ir.Constant(BYTE_POINTER, None)


class _FloatVector(types.Type):
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"f32x{lanes}")


@register_model(_FloatVector)
class _FloatVectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: _FloatVector) -> None:
        super().__init__(manager, numba_type, ir.VectorType(F32, numba_type.lanes))


class _IntVector(types.Type):
    def __init__(self, bits: int, lanes: int) -> None:
        self.bits, self.lanes = bits, lanes
        super().__init__(name=f"i{bits}x{lanes}")


@register_model(_IntVector)
class _IntVectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: _IntVector) -> None:
        super().__init__(manager, numba_type, ir.VectorType(ir.IntType(numba_type.bits), numba_type.lanes))


V8, VW, V16 = _FloatVector(LANES), _FloatVector(WIDE), _FloatVector(16)
I32X8, I16X16, I8X16 = _IntVector(32, LANES), _IntVector(16, 2 * LANES), _IntVector(8, 2 * LANES)
V = "vector"  # of either width, the same in all of an operation's places
A = types.int64  # an address, or an offset in bytes

Emit = Callable[..., Any]


def operation(result: Any, *arguments: Any) -> Callable[[Emit], Any]:
    """Make an intrinsic of these types out of a function that emits LLVM: (builder, *values) -> value. It keeps that
    function as `emit`."""

    def wrap(emit: Emit) -> Any:
        def typing(_context: Any, *given: Any) -> tuple[Any, Emit] | None:
            vector = next((one for one in given if isinstance(one, _FloatVector)), None)

            def generate(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
                return emit(builder, *values)

            chosen: list[Any] = [vector if one is V else one for one in (result, *arguments)]
            return chosen[0](*chosen[1:]), generate

        made = _intrinsic(emit, typing, len(arguments))
        made.emit = emit
        return made

    return wrap


def tagged(result: Any, *arguments: Any) -> Callable[[Emit], Any]:
    """The same with a tag as the last argument, a NumPy scalar type, which `emit` learns first, as Numba's type:
    (type, builder, *values) -> value."""

    def wrap(emit: Emit) -> Any:
        def typing(_context: Any, *given: Any) -> tuple[Any, Emit] | None:
            tag = given[-1]

            def generate(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
                return emit(tag.dtype, builder, *values[:-1])

            return result(*arguments, tag), generate

        return _intrinsic(emit, typing, len(arguments) + 1)

    return wrap


def _intrinsic(emit: Emit, typing: Any, num_arguments: int) -> Any:
    typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
    typing.__signature__ = inspect.signature(emit).replace(
        parameters=[
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("context", *(f"value{i}" for i in range(num_arguments)))
        ]
    )
    return intrinsic(typing)


def constant(value: float, like: Any) -> ir.Constant:
    rounded = struct.unpack("f", struct.pack("f", value))[0]  # a float32's value, as LLVM's text form demands
    return ir.Constant(like.type, [rounded] * like.type.count)


def int_constant(value: int, like: Any) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, like.type.count), [value] * like.type.count)


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    function = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values)


def math_of(builder: Any, name: str, *values: Any) -> Any:
    """An LLVM intrinsic of vectors, like fma."""
    kind = values[0].type
    return call(builder, f"llvm.{name}.v{kind.count}f32", kind, *values)


def load_vector(builder: Any, address: Any, element: ir.Type, count: int, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, ir.VectorType(element, count).as_pointer()))
    value.align = align
    return value


def store_vector(builder: Any, address: Any, value: Any, align: int) -> Any:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align
    return DONE


def shuffle(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(builder, first, first, [0] * lanes)


def sum_vectors(builder: Any, add: Callable[[Any, Any], Any], vectors: Sequence[Any]) -> Any:
    """The sums of eight vectors, one a lane: seven shuffled additions instead of eight trees."""

    def pairs(x: Any, y: Any) -> Any:
        even, odd = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
        return add(*(shuffle(builder, x, y, lanes) for lanes in (even, odd)))

    a, b, c, d = (pairs(vectors[i], vectors[i + 1]) for i in range(0, 8, 2))
    left, right = pairs(a, b), pairs(c, d)
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return add(*(shuffle(builder, left, right, lanes) for lanes in (low, high)))
