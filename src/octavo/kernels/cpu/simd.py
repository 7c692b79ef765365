"""Vectors of floats for Numba: a type, and operations that are one LLVM instruction or a few.

Numba's own loops vectorise dot products badly. With these, a kernel is ordinary Python that names its registers.
Pointers are int64 addresses: an address that Numba takes for unsigned would become a double when a signed offset
is added, so addresses enter kernels as `np.int64`.

Vectors have eight lanes where memory sets the pace, and WIDE lanes where arithmetic does; operations that read or
write no memory take both.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd_base import (
    BYTE_POINTER,
    DONE,
    F16,
    F32,
    I16,
    I32,
    I64,
    INTS,
    IS_ZEN,
    LANES,
    V8,
    VW,
    WIDE,
    A,
    Emit,
    V,
    broadcast,
    call,
    constant,
    int_constant,
    load_vector,
    math_of,
    operation,
    shuffle,
    store_vector,
    sum_vectors,
)

# --- Memory -----------------------------------------------------------------------------------------------------


def _calling(count: int) -> Any:
    @operation(types.void, A, *[A] * count)
    def call_code(builder: Any, address: Any, *arguments: Any) -> Any:
        """Call the machine code at an address with whole numbers."""
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        builder.call(builder.inttoptr(address, function.as_pointer()), arguments)
        return DONE

    return call_code


call_job, call_load_keys, call_load_values = map(_calling, (1, 7, 6))


@operation(V8, A)
def load_f32(builder: Any, address: Any) -> Any:
    """Eight float32."""
    return load_vector(builder, address, F32, LANES, 4)


@operation(VW, A)
def load_wide(builder: Any, address: Any) -> Any:
    """WIDE float32."""
    return load_vector(builder, address, F32, WIDE, 4)


@operation(V8, A)
def load_f16(builder: Any, address: Any) -> Any:
    """Eight float16, widened."""
    return builder.fpext(load_vector(builder, address, F16, LANES, 2), ir.VectorType(F32, LANES))


@operation(V8, A)
def load_bf16(builder: Any, address: Any) -> Any:
    """Eight bfloat16, widened: the upper half of a float32."""
    halves = builder.zext(load_vector(builder, address, I16, LANES, 2), INTS)
    return builder.bitcast(builder.shl(halves, ir.Constant(INTS, [16] * LANES)), ir.VectorType(F32, LANES))


@operation(V8, A)
def load_bf16_even(builder: Any, address: Any) -> Any:
    """Elements 0, 2, ..., 14 of sixteen bfloat16: cheaper than widening eight neighbours."""
    words = load_vector(builder, address, I32, LANES, 2)
    return builder.bitcast(builder.shl(words, ir.Constant(INTS, [16] * LANES)), ir.VectorType(F32, LANES))


@operation(V8, A)
def load_bf16_odd(builder: Any, address: Any) -> Any:
    """Elements 1, 3, ..., 15 of sixteen bfloat16."""
    words = load_vector(builder, address, I32, LANES, 2)
    return builder.bitcast(builder.and_(words, ir.Constant(INTS, [0xFFFF0000] * LANES)), ir.VectorType(F32, LANES))


@operation(types.void, A, V)
def store(builder: Any, address: Any, value: Any) -> Any:
    """A vector of float32 to memory."""
    return store_vector(builder, address, value, 4)


@operation(types.void, A, V8)
def store_f16(builder: Any, address: Any, value: Any) -> Any:
    """Eight float16, rounded to nearest even."""
    return store_vector(builder, address, builder.fptrunc(value, ir.VectorType(F16, LANES)), 2)


@operation(types.void, A, V8)
def store_bf16(builder: Any, address: Any, value: Any) -> Any:
    """Eight bfloat16, rounded to nearest even; NaN stays NaN."""

    def ints(number: int) -> ir.Constant:
        return ir.Constant(INTS, [number] * LANES)

    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.add(bits, builder.add(odd, ints(0x7FFF)))
    quiet = builder.or_(bits, ints(0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return store_vector(builder, address, builder.trunc(builder.lshr(chosen, ints(16)), ir.VectorType(I16, LANES)), 2)


@operation(types.void, A, types.float32)
def store_one(builder: Any, address: Any, value: Any) -> Any:
    """One float32 to memory."""
    return store_vector(builder, address, value, 4)


@operation(types.float32, A)
def load_one(builder: Any, address: Any) -> Any:
    """One float32."""
    return builder.load(builder.inttoptr(address, F32.as_pointer()))


@operation(types.float64, A)
def load_real(builder: Any, address: Any) -> Any:
    """One float64."""
    return builder.load(builder.inttoptr(address, ir.DoubleType().as_pointer()))


@operation(types.voidptr, A)
def pointer(builder: Any, address: Any) -> Any:
    """An address as Numba's `carray` takes it."""
    return builder.inttoptr(address, BYTE_POINTER)


@operation(types.int64, A)
def load_int(builder: Any, address: Any) -> Any:
    """One int64."""
    return builder.load(builder.inttoptr(address, I64.as_pointer()))


@operation(types.void, A, types.int64)
def store_int(builder: Any, address: Any, value: Any) -> Any:
    """One int64 to memory."""
    return store_vector(builder, address, value, 8)


@operation(V8, A)
def load_splat(builder: Any, address: Any) -> Any:
    """One float32 from memory in all of eight lanes."""
    return broadcast(builder, builder.load(builder.inttoptr(address, F32.as_pointer())), LANES)


@operation(VW, A)
def load_splat_wide(builder: Any, address: Any) -> Any:
    """One float32 from memory in all of WIDE lanes."""
    return broadcast(builder, builder.load(builder.inttoptr(address, F32.as_pointer())), WIDE)


@operation(types.void, A)
def prefetch(builder: Any, address: Any) -> Any:
    """Ask for the cache line at an address; nothing happens if there is none."""
    read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), builder.inttoptr(address, BYTE_POINTER), read, keep, data)
    return DONE


@operation(types.void, A)
def prefetch_far(builder: Any, address: Any) -> Any:
    """The same for a line of memory: to where most requests are open at once. A Zen core has more of them for its
    second-level cache than the 24 for its first; on Intel's all take one way."""
    read, keep, data = (ir.Constant(I32, value) for value in (0, 2 if IS_ZEN else 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), builder.inttoptr(address, BYTE_POINTER), read, keep, data)
    return DONE


@operation(types.int64, A, types.int64)
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 that threads share, and return what it was."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), amount, "monotonic")


@operation(types.void, V8, V8, V8, V8, V8, V8, V8, V8, A, types.int64)
def store_transposed(builder: Any, *values: Any) -> Any:
    """Eight vectors as the columns of eight rows: (x0, ..., x7, address, bytes from row to row)."""
    *x, address, stride = values

    def pick(pairs: list[Any], one: list[int], other: list[int]) -> list[Any]:
        """Two shuffles of each pair of vectors."""
        return [shuffle(builder, a, b, lanes) for a, b in pairs for lanes in (one, other)]

    # Neighbours interleave by ones, then by twos, then by fours.
    x = pick([(x[i], x[i + 1]) for i in (0, 2, 4, 6)], [0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15])
    x = pick([(x[i], x[i + 2]) for i in (0, 1, 4, 5)], [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
    x = pick([(x[i], x[i + 4]) for i in range(4)], [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    for row, i in enumerate((0, 4, 2, 6, 1, 5, 3, 7)):
        store_vector(builder, builder.add(address, builder.mul(stride, ir.Constant(I64, row))), x[i], 4)
    return DONE


# --- Arithmetic -------------------------------------------------------------------------------------------------


@operation(V8, types.float32)
def splat(builder: Any, scalar: Any) -> Any:
    """One number in all of eight lanes."""
    return broadcast(builder, scalar, LANES)


@operation(VW, types.float32)
def splat_wide(builder: Any, scalar: Any) -> Any:
    """One number in all of WIDE lanes."""
    return broadcast(builder, scalar, WIDE)


@operation(V8, types.float32, types.float32)
def splat_halves(builder: Any, low: Any, high: Any) -> Any:
    """One number in lanes 0 to 3, another in lanes 4 to 7."""
    return shuffle(builder, broadcast(builder, low, LANES), broadcast(builder, high, LANES), [0] * 4 + [8] * 4)


@operation(V, V, V, V)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return math_of(builder, "fma", x, y, z)


@operation(V, V, V)
def add(builder: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return builder.fadd(x, y)


@operation(V, V, V)
def sub(builder: Any, x: Any, y: Any) -> Any:
    """x - y."""
    return builder.fsub(x, y)


@operation(V, V, V)
def mul(builder: Any, x: Any, y: Any) -> Any:
    """x * y."""
    return builder.fmul(x, y)


@operation(V, V)
def inverse(builder: Any, x: Any) -> Any:
    """1 / x; 0 where x is 0."""
    none = constant(0.0, x)
    return builder.select(builder.fcmp_ordered("==", x, none), none, builder.fdiv(constant(1.0, x), x))


@operation(V, V)
def absolute(builder: Any, x: Any) -> Any:
    """|x|."""
    return math_of(builder, "fabs", x)


@operation(V, V)
def negative(builder: Any, x: Any) -> Any:
    """-x."""
    return builder.fneg(x)


@operation(V, V)
def root(builder: Any, x: Any) -> Any:
    """The square root."""
    return math_of(builder, "sqrt", x)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(V, V, V)
def maximum(builder: Any, x: Any, y: Any) -> Any:
    """The larger of x and y; y where x is NaN."""
    return _larger(builder, x, y)


@operation(types.boolean, V, V)
def any_above(builder: Any, x: Any, y: Any) -> Any:
    """Whether x > y in some lane."""
    bits = ir.IntType(x.type.count)
    lanes = builder.bitcast(builder.fcmp_ordered(">", x, y), bits)
    return builder.icmp_unsigned("!=", lanes, ir.Constant(bits, 0))


@operation(V, V, types.int64, types.int64)
def keep_lanes(builder: Any, x: Any, start: Any, end: Any) -> Any:
    """x in lanes start to end - 1, -inf in the others."""
    count = x.type.count
    lane = ir.Constant(ir.VectorType(I32, count), list(range(count)))
    start, end = (broadcast(builder, builder.trunc(edge, I32), count) for edge in (start, end))
    inside = builder.and_(builder.icmp_signed(">=", lane, start), builder.icmp_signed("<", lane, end))
    return builder.select(inside, x, ir.Constant(x.type, [float("-inf")] * count))


@operation(V8, V8)
def swap_halves(builder: Any, x: Any) -> Any:
    """Lanes 4 to 7, then 0 to 3."""
    return shuffle(builder, x, x, [4, 5, 6, 7, 0, 1, 2, 3])


def _fold(builder: Any, x: Any, join: Emit) -> Any:
    """All lanes joined into one scalar, halves first."""
    while x.type.count > 1:
        half = x.type.count // 2
        low, high = list(range(half)), list(range(half, 2 * half))
        x = join(builder, shuffle(builder, x, x, low), shuffle(builder, x, x, high))
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.float32, V)
def first_lane(builder: Any, x: Any) -> Any:
    """Lane 0."""
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.float32, V)
def total(builder: Any, x: Any) -> Any:
    """The sum of the lanes."""
    return _fold(builder, x, lambda builder, x, y: builder.fadd(x, y))


@operation(types.float32, V)
def peak(builder: Any, x: Any) -> Any:
    """The largest lane."""
    return _fold(builder, x, _larger)


@operation(V8, V8, V8, V8, V8, V8, V8, V8, V8)
def totals(builder: Any, *vectors: Any) -> Any:
    """The sums of eight vectors, one a lane."""
    return sum_vectors(builder, builder.fadd, vectors)


@operation(V8, V8, V8)
def evens(builder: Any, x: Any, y: Any) -> Any:
    """Elements 0, 2, ..., 14 of x and y together."""
    return shuffle(builder, x, y, list(range(0, 16, 2)))


@operation(V8, V8, V8)
def odds(builder: Any, x: Any, y: Any) -> Any:
    """Elements 1, 3, ..., 15 of x and y together."""
    return shuffle(builder, x, y, list(range(1, 16, 2)))


@operation(V8, V8, V8)
def zip_low(builder: Any, even: Any, odd: Any) -> Any:
    """The first eight elements of what `evens` and `odds` took apart."""
    return shuffle(builder, even, odd, [0, 8, 1, 9, 2, 10, 3, 11])


@operation(V8, V8, V8)
def zip_high(builder: Any, even: Any, odd: Any) -> Any:
    """The last eight elements of what `evens` and `odds` took apart."""
    return shuffle(builder, even, odd, [4, 12, 5, 13, 6, 14, 7, 15])


def _polynomial(builder: Any, x: Any, *factors: float) -> Any:
    """Horner's scheme, the highest power first."""
    value = constant(factors[0], x)
    for factor in factors[1:]:
        value = math_of(builder, "fma", value, x, constant(factor, x))
    return value


@operation(V, V)
def exp2(builder: Any, x: Any) -> Any:
    """2 ** x for x < 127, within 3 ulp; some number below 2 ** -126 between -127 and -126, 0 from -127 down (also for
    -inf); NaN stays NaN."""
    # At -127 the polynomial is 1 and the exponent comes to nothing: a zero.
    x, magic = _larger(builder, constant(-127.0, x), x), constant(1.5 * 2**23, x)
    # Adding 1.5 * 2 ** 23 leaves the nearest whole number in the lowest bits.
    shifted = builder.fadd(x, magic)
    rest = builder.fsub(x, builder.fsub(shifted, magic))
    # 2 ** r on [-0.5, 0.5] with the least relative error, 9.2e-8, that degree 5 has where 2 ** 0 is 1.
    value = _polynomial(builder, rest, 1.3264727e-3, 9.6715127e-3, 5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0)
    ints = ir.VectorType(I32, x.type.count)
    exponent = builder.shl(builder.bitcast(shifted, ints), int_constant(23, x))
    # As a factor: added to the value's bits it would make numbers of some NaN.
    factor = builder.bitcast(builder.add(exponent, int_constant(127 << 23, x)), x.type)
    return builder.fmul(value, factor)


@operation(V, V)
def tanh(builder: Any, x: Any) -> Any:
    """The hyperbolic tangent, within 5 ulp: the rational function of degree 13/6 that Eigen's `ptanh` uses."""
    edge = 7.90531110763549805  # beyond it the result rounds to 1
    clamped = builder.select(builder.fcmp_ordered(">", x, constant(edge, x)), constant(edge, x), x)
    clamped = builder.select(builder.fcmp_ordered("<", x, constant(-edge, x)), constant(-edge, x), clamped)
    square = builder.fmul(clamped, clamped)
    above = _polynomial(
        builder,
        square,
        -2.76076847742355e-16,
        2.00018790482477e-13,
        -8.60467152213735e-11,
        5.12229709037114e-08,
        1.48572235717979e-05,
        6.37261928875436e-04,
        4.89352455891786e-03,
    )
    below = _polynomial(
        builder, square, 1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03
    )
    return builder.fdiv(builder.fmul(clamped, above), below)
