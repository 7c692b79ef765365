"""The two products of decode in float32: K and V of 32, 16 and 8 bits, widened as they are read."""

from __future__ import annotations

import numpy as np

from octavo.kernels.cpu.decode_tile import HEADS, LINE
from octavo.kernels.cpu.simd import fma, load_f32, load_int, load_splat, prefetch_far, splat, store, totals
from octavo.kernels.cpu.simd_eight_bit import no_codes
from octavo.kernels.cpu.stored import load, load_pair, note, size_of, with_noted, with_rows_noted


def scores(k, count, offset, ahead, num_ahead, q, head_dim, s, scale_offset, factors, tag):
    """`decode._scores` of float keys; q in pair order, scaled."""
    size, stride = size_of(tag), head_dim * 4
    zero = splat(np.float32(0))
    for t in range(0, count, 2):
        ka = load_int(k + t * 8) + offset
        kb = load_int(k + t * 8 + 8) + offset
        if t < num_ahead:
            pa = load_int(ahead + t * 8)
            pb = load_int(ahead + t * 8 + 8)
            for line in range(0, head_dim * size, LINE):
                prefetch_far(pa + line)
                prefetch_far(pb + line)
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        noted_a = noted_b = no_codes()
        qa = q
        for _ in range(head_dim // 16):
            x, x_ = load_pair(ka, tag)
            y, y_ = load_pair(kb, tag)
            noted_a, noted_b = note(noted_a, ka, tag), note(noted_b, kb, tag)
            z = load_f32(qa)
            a0, b0 = fma(z, x, a0), fma(z, y, b0)
            z = load_f32(qa + stride)
            a1, b1 = fma(z, x, a1), fma(z, y, b1)
            z = load_f32(qa + 2 * stride)
            a2, b2 = fma(z, x, a2), fma(z, y, b2)
            z = load_f32(qa + 3 * stride)
            a3, b3 = fma(z, x, a3), fma(z, y, b3)
            z = load_f32(qa + 32)
            a0, b0 = fma(z, x_, a0), fma(z, y_, b0)
            z = load_f32(qa + 32 + stride)
            a1, b1 = fma(z, x_, a1), fma(z, y_, b1)
            z = load_f32(qa + 32 + 2 * stride)
            a2, b2 = fma(z, x_, a2), fma(z, y_, b2)
            z = load_f32(qa + 32 + 3 * stride)
            a3, b3 = fma(z, x_, a3), fma(z, y_, b3)
            ka += 16 * size
            kb += 16 * size
            qa += 64
        if head_dim % 16:
            x, y = load(ka, tag), load(kb, tag)
            z = load_f32(qa)
            a0, b0 = fma(z, x, a0), fma(z, y, b0)
            z = load_f32(qa + stride)
            a1, b1 = fma(z, x, a1), fma(z, y, b1)
            z = load_f32(qa + 2 * stride)
            a2, b2 = fma(z, x, a2), fma(z, y, b2)
            z = load_f32(qa + 3 * stride)
            a3, b3 = fma(z, x, a3), fma(z, y, b3)
        store(s + t * 16, with_rows_noted(totals(a0, a1, a2, a3, b0, b1, b2, b3), noted_a, noted_b, tag))


def add_values(v, count, offset, ahead, num_ahead, s, acc, value_dim, tag):
    """`decode._add_values` of float values; sixteen numbers of V's width at a time."""
    size, stride = size_of(tag), value_dim * 4
    per_pass = (num_ahead * 16 + value_dim - 1) // value_dim  # spread over the passes: few fetches fit at a time
    asked = 0
    for d in range(0, value_dim - 8, 16):
        r = acc + d * 4
        for i in range(asked, min(asked + per_pass, num_ahead)):
            row = load_int(ahead + i * 8)
            for line in range(0, value_dim * size, LINE):
                prefetch_far(row + line)
        asked += per_pass
        a0, a1 = load_f32(r), load_f32(r + 32)
        b0, b1 = load_f32(r + stride), load_f32(r + stride + 32)
        c0, c1 = load_f32(r + 2 * stride), load_f32(r + 2 * stride + 32)
        d0, d1 = load_f32(r + 3 * stride), load_f32(r + 3 * stride + 32)
        base, noted = offset + d * size, no_codes()
        for t in range(count):
            row = load_int(v + t * 8) + base
            x, y = load_pair(row, tag)
            noted = note(noted, row, tag)
            w = load_splat(s + t * 16)
            a0, a1 = fma(w, x, a0), fma(w, y, a1)
            w = load_splat(s + t * 16 + 4)
            b0, b1 = fma(w, x, b0), fma(w, y, b1)
            w = load_splat(s + t * 16 + 8)
            c0, c1 = fma(w, x, c0), fma(w, y, c1)
            w = load_splat(s + t * 16 + 12)
            d0, d1 = fma(w, x, d0), fma(w, y, d1)
        a0, a1 = with_noted(a0, a1, noted, tag)
        b0, b1 = with_noted(b0, b1, noted, tag)
        c0, c1 = with_noted(c0, c1, noted, tag)
        d0, d1 = with_noted(d0, d1, noted, tag)
        store(r, a0)
        store(r + 32, a1)
        store(r + stride, b0)
        store(r + stride + 32, b1)
        store(r + 2 * stride, c0)
        store(r + 2 * stride + 32, c1)
        store(r + 3 * stride, d0)
        store(r + 3 * stride + 32, d1)
    if value_dim % 16:
        d = value_dim - 8
        for head in range(HEADS):
            r = acc + head * stride + d * 4
            a0 = load_f32(r)
            for t in range(count):
                row = load_int(v + t * 8) + offset + d * size
                a0 = fma(load_splat(s + t * 16 + head * 4), load(row, tag), a0)
            store(r, a0)
