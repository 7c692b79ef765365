"""The two products of decode by dot products of bfloat16: K and V as they lie, bfloat16 queries, weights rounded to it.

An instruction takes two neighbours of a key, or one number of two keys' values. fp8 numbers are looked up, as bfloat16
has all of them.
"""

from __future__ import annotations

from numba import njit

from octavo.kernels.cpu.decode_tile import HEADS, LINE
from octavo.kernels.cpu.simd import fma, load_f32, load_int, load_splat, mul, prefetch_far, store
from octavo.kernels.cpu.simd_dots import (
    add_dot,
    high_halves,
    load_some_words,
    load_word,
    load_words,
    low_halves,
    store_weights,
    totals,
    twice,
    zero_words,
)
from octavo.kernels.cpu.stored import OPTIONS, load, load_some_words_of_two, load_words_of_two, load_zipped, size_of

STEP = 32
"""Numbers of a vector."""


@njit(**OPTIONS)
def _add_keys(sums, k, q):
    """Four keys meet four heads."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = sums
    ka, kb, kc, kd = k
    q0, q1, q2, q3 = q
    return (
        add_dot(a0, ka, q0),
        add_dot(a1, ka, q1),
        add_dot(a2, ka, q2),
        add_dot(a3, ka, q3),
        add_dot(b0, kb, q0),
        add_dot(b1, kb, q1),
        add_dot(b2, kb, q2),
        add_dot(b3, kb, q3),
        add_dot(c0, kc, q0),
        add_dot(c1, kc, q1),
        add_dot(c2, kc, q2),
        add_dot(c3, kc, q3),
        add_dot(d0, kd, q0),
        add_dot(d1, kd, q1),
        add_dot(d2, kd, q2),
        add_dot(d3, kd, q3),
    )


def scores(k, count, offset, ahead, num_ahead, q, head_dim, s, scale_offset, factors, tag):
    """`decode._scores` of bfloat16 or fp8 keys; q in bfloat16, as it is: factors follow."""
    size, stride, words = size_of(tag), head_dim * 4, head_dim // 2
    factor, zero = twice(load_f32(factors)), zero_words()
    for t in range(0, count, 4):
        ka = load_int(k + t * 8) + offset
        kb = load_int(k + min(t + 1, count - 1) * 8) + offset
        kc = load_int(k + min(t + 2, count - 1) * 8) + offset
        kd = load_int(k + min(t + 3, count - 1) * 8) + offset
        for i in range(t, min(t + 4, num_ahead)):
            row = load_int(ahead + i * 8)
            for line in range(0, head_dim * size, LINE):
                prefetch_far(row + line)
        sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
        row = q
        for _ in range(words // 16):
            keys = load_words_of_two(ka, kb, tag) + load_words_of_two(kc, kd, tag)
            heads = (
                load_words(row),
                load_words(row + stride),
                load_words(row + 2 * stride),
                load_words(row + 3 * stride),
            )
            sums = _add_keys(sums, keys, heads)
            ka, kb, kc, kd = ka + STEP * size, kb + STEP * size, kc + STEP * size, kd + STEP * size
            row += 64
        rest = words % 16
        if rest != 0:
            keys = load_some_words_of_two(ka, kb, rest, tag) + load_some_words_of_two(kc, kd, rest, tag)
            heads = (
                load_some_words(row, rest),
                load_some_words(row + stride, rest),
                load_some_words(row + 2 * stride, rest),
                load_some_words(row + 3 * stride, rest),
            )
            sums = _add_keys(sums, keys, heads)
        store(s + t * 16, mul(factor, totals(*sums)))


def add_values(v, count, offset, ahead, num_ahead, s, acc, value_dim, tag):
    """`decode._add_values` of bfloat16 or fp8 values; s becomes words. acc is in the order of `from_words`."""
    size, stride, whole = size_of(tag), value_dim * 4, value_dim // STEP * STEP
    for d in range(whole, value_dim, 8):
        for head in range(HEADS):
            r = acc + head * stride + d * 4
            a = load_f32(r)
            for t in range(count):
                a = fma(load_splat(s + t * 16 + head * 4), load(load_int(v + t * 8) + offset + d * size, tag), a)
            store(r, a)
    for t in range(0, count, 2):
        store_weights(s + t * 8, load_f32(s + t * 16))
    # Spread over the passes: few fetches fit at a time.
    per_pass = (num_ahead * STEP + whole - 1) // max(whole, 1)
    asked = 0
    for d in range(0, whole, STEP):
        for i in range(asked, min(asked + per_pass, num_ahead)):
            row = load_int(ahead + i * 8)
            for line in range(0, value_dim * size, LINE):
                prefetch_far(row + line)
        asked += per_pass
        r, base = acc + d * 4, offset + d * size
        a0, a1 = load_words(r), load_words(r + 64)
        b0, b1 = load_words(r + stride), load_words(r + stride + 64)
        c0, c1 = load_words(r + 2 * stride), load_words(r + 2 * stride + 64)
        d0, d1 = load_words(r + 3 * stride), load_words(r + 3 * stride + 64)
        for t in range(0, count, 2):
            one, other = load_int(v + t * 8) + base, load_int(v + t * 8 + 8) + base
            low, high = load_zipped(one, other, t + 1 < count, tag)
            w = load_word(s + t * 8)
            a0, a1 = add_dot(a0, low, w), add_dot(a1, high, w)
            w = load_word(s + t * 8 + 4)
            b0, b1 = add_dot(b0, low, w), add_dot(b1, high, w)
            w = load_word(s + t * 8 + 8)
            c0, c1 = add_dot(c0, low, w), add_dot(c1, high, w)
            w = load_word(s + t * 8 + 12)
            d0, d1 = add_dot(d0, low, w), add_dot(d1, high, w)
        store(r, a0)
        store(r + 64, a1)
        store(r + stride, b0)
        store(r + stride + 64, b1)
        store(r + 2 * stride, c0)
        store(r + 2 * stride + 64, c1)
        store(r + 3 * stride, d0)
        store(r + 3 * stride + 64, d1)


@njit(**OPTIONS)
def from_words(values, width):
    """Sums of `add_values` in their numbers' order, in place."""
    for target in range(values, values + width // STEP * STEP * 4, STEP * 4):
        a, b = load_f32(target), load_f32(target + 32)
        c, d = load_f32(target + 64), load_f32(target + 96)
        store(target, low_halves(a, c))
        store(target + 32, high_halves(a, c))
        store(target + 64, low_halves(b, d))
        store(target + 96, high_halves(b, d))
