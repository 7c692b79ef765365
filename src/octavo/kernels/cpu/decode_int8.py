"""The two products of decode in whole numbers: int8 queries with int8 keys, 16-bit weights with int8 values.

Products of neighbours are added in pairs, one instruction for sixteen of them where float needs two. Sums are int32
and exact; the factors follow once a key, or once a tile and head.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from octavo.kernels.cpu.decode_tile import K_SCALES, LINE, TILE
from octavo.kernels.cpu.simd import (
    fma,
    load_f32,
    load_int,
    load_one,
    load_splat,
    maximum,
    mul,
    prefetch_far,
    splat,
    splat_halves,
    store,
    swap_halves,
)
from octavo.kernels.cpu.simd_eight_bit import (
    add_products,
    divide,
    load_half_short,
    load_half_zip,
    load_i8_short,
    load_i16,
    load_zip_high,
    load_zip_low,
    splat_pair,
    store_weights,
    to_float,
    whole_totals,
    zeros,
)
from octavo.kernels.cpu.stored import OPTIONS

TOP = np.float32(32767)
"""The largest weight of a tile."""

LEAST = np.float32(2.0**-111)
"""What counts as the largest weight of a tile where all are smaller: TOP over it is finite."""


def scores(k, count, offset, ahead, num_ahead, q, head_dim, s, scale_offset, factors, tag):
    """`decode._scores` of int8 keys; q: [head_dim] int16 of each row."""
    stride, factor = head_dim * 4, load_f32(factors)
    for t in range(0, count, 2):
        ka, kb = load_int(k + t * 8) + offset, load_int(k + t * 8 + 8) + offset
        sa, sb = load_int(k + K_SCALES + t * 8) + scale_offset, load_int(k + K_SCALES + t * 8 + 8) + scale_offset
        if t < num_ahead:
            pa = load_int(ahead + t * 8)
            pb = load_int(ahead + t * 8 + 8)
            for d in range(0, head_dim, LINE):
                prefetch_far(pa + d)
                prefetch_far(pb + d)
        a0, a1, a2, a3, b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
        qa = q
        for d in range(0, head_dim - 8, 16):
            x, y = load_i8_short(ka + d), load_i8_short(kb + d)
            z = load_i16(qa)
            a0, b0 = add_products(z, x, a0), add_products(z, y, b0)
            z = load_i16(qa + stride)
            a1, b1 = add_products(z, x, a1), add_products(z, y, b1)
            z = load_i16(qa + 2 * stride)
            a2, b2 = add_products(z, x, a2), add_products(z, y, b2)
            z = load_i16(qa + 3 * stride)
            a3, b3 = add_products(z, x, a3), add_products(z, y, b3)
            qa += 32
        if head_dim % 16:
            x, y = load_half_short(ka + head_dim - 8), load_half_short(kb + head_dim - 8)
            z = load_i16(qa)
            a0, b0 = add_products(z, x, a0), add_products(z, y, b0)
            z = load_i16(qa + stride)
            a1, b1 = add_products(z, x, a1), add_products(z, y, b1)
            z = load_i16(qa + 2 * stride)
            a2, b2 = add_products(z, x, a2), add_products(z, y, b2)
            z = load_i16(qa + 3 * stride)
            a3, b3 = add_products(z, x, a3), add_products(z, y, b3)
        store(
            s + t * 16,
            mul(
                mul(factor, splat_halves(load_one(sa), load_one(sb))),
                to_float(whole_totals(a0, a1, a2, a3, b0, b1, b2, b3)),
            ),
        )


@njit(**OPTIONS)
def _round_weights(s, count, weights, factors):
    """Weights s [count][4] float32 to int16, the largest of a head TOP, the two of a pair of keys side by side:
    weights [pairs][4][2], s = weight * factor [4, twice]. A factor is NaN where a weight is not finite."""
    top = rest = zero = splat(np.float32(0))
    for t in range(0, count, 2):
        x = load_f32(s + t * 16)
        top = maximum(x, top)
        rest = fma(zero, x, rest)
    top = maximum(maximum(swap_halves(top), top), splat(LEAST))
    inverse = divide(splat(TOP), top)
    for t in range(0, count, 2):
        store_weights(weights + t * 8, load_f32(s + t * 16), inverse)
    rest = fma(zero, swap_halves(rest), rest)
    store(factors, fma(top, splat(np.float32(1) / TOP), rest))


def add_values(v, count, offset, ahead, num_ahead, s, acc, value_dim, tag):
    """`decode._add_values` of int8 values."""
    weights, factors = s + TILE * 16, s + TILE * 24
    _round_weights(s, count, weights, factors)
    stride = value_dim * 4
    per_pass = (num_ahead * 16 + value_dim - 1) // value_dim  # spread over the passes: few fetches fit at a time
    asked = 0
    f0, f1 = load_splat(factors), load_splat(factors + 4)
    f2, f3 = load_splat(factors + 8), load_splat(factors + 12)
    for d in range(0, value_dim - 8, 16):
        for i in range(asked, min(asked + per_pass, num_ahead)):
            row = load_int(ahead + i * 8)
            for line in range(0, value_dim, LINE):
                prefetch_far(row + line)
        asked += per_pass
        a0, a1, b0, b1, c0, c1, d0, d1 = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
        base = offset + d
        for t in range(0, count, 2):
            one, other = load_int(v + t * 8) + base, load_int(v + t * 8 + 8) + base
            x, y = load_zip_low(one, other), load_zip_high(one, other)
            w = splat_pair(weights + t * 8)
            a0, a1 = add_products(w, x, a0), add_products(w, y, a1)
            w = splat_pair(weights + t * 8 + 4)
            b0, b1 = add_products(w, x, b0), add_products(w, y, b1)
            w = splat_pair(weights + t * 8 + 8)
            c0, c1 = add_products(w, x, c0), add_products(w, y, c1)
            w = splat_pair(weights + t * 8 + 12)
            d0, d1 = add_products(w, x, d0), add_products(w, y, d1)
        r = acc + d * 4
        store(r, fma(f0, to_float(a0), load_f32(r)))
        store(r + 32, fma(f0, to_float(a1), load_f32(r + 32)))
        r += stride
        store(r, fma(f1, to_float(b0), load_f32(r)))
        store(r + 32, fma(f1, to_float(b1), load_f32(r + 32)))
        r += stride
        store(r, fma(f2, to_float(c0), load_f32(r)))
        store(r + 32, fma(f2, to_float(c1), load_f32(r + 32)))
        r += stride
        store(r, fma(f3, to_float(d0), load_f32(r)))
        store(r + 32, fma(f3, to_float(d1), load_f32(r + 32)))
    if value_dim % 16:
        d = value_dim - 8
        for head in range(4):
            r, a0 = acc + head * stride + d * 4, zeros()
            for t in range(0, count, 2):
                one, other = load_int(v + t * 8), load_int(v + t * 8 + 8)
                x = load_half_zip(one + offset + d, other + offset + d)
                a0 = add_products(splat_pair(weights + t * 8 + head * 4), x, a0)
            store(r, fma(load_splat(factors + head * 4), to_float(a0), load_f32(r)))
