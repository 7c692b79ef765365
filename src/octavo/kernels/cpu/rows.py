"""Row by row, in Numba: new keys and values into their pages, and the merge of partial results."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import KERNEL, OPTIONS, bytes_of, load_kind, store_kind
from octavo.kernels.cpu.simd import fetch_add, fma, load_f32, load_one, mul, splat, store_one

CHUNK = 16
"""Rows that a thread takes at a time."""


class Copy(NamedTuple):
    """New rows of K (or V), and the pages that they go to: addresses, strides in bytes, storage kinds."""

    source: int
    source_strides: tuple[int, int]  # row, head
    source_kind: int
    target: int
    target_strides: tuple[int, int, int]  # block, row, head
    target_kind: int
    width: int


class Parts(NamedTuple):
    """Partial results and where their merge goes: addresses, strides in bytes. An lse of 0 is not wanted."""

    out: int
    out_strides: tuple[int, int, int]  # part, row, head
    lse: int
    lse_strides: tuple[int, int, int]
    result: int
    result_strides: tuple[int, int]  # row, head
    result_kind: int
    result_lse: int
    result_lse_strides: tuple[int, int]
    num_parts: int
    num_rows: int
    num_heads: int
    width: int


@njit(**OPTIONS)
def _copy_row(facts, i, block, offset, num_kv_heads):
    copy = Copy(*facts)
    source = copy.source + i * copy.source_strides[0]
    target = copy.target + block * copy.target_strides[0] + offset * copy.target_strides[1]
    from_size, to_size = bytes_of(copy.source_kind), bytes_of(copy.target_kind)
    for head in range(num_kv_heads):
        x, y = source + head * copy.source_strides[1], target + head * copy.target_strides[2]
        for d in range(0, copy.width, 8):
            store_kind(y + d * to_size, load_kind(x + d * from_size, copy.source_kind), copy.target_kind)


@njit(**KERNEL)
def append(slots, counter, k, v, block_size, num_kv_heads):
    """Write row i to slot slots[i], where that is not negative; several threads may run this on one counter.

    Args:
        slots: [num_slots] int64.
        counter: address of an int64, 0 at the start.
        k, v: a `Copy` each, plain.
    """
    while True:
        start = fetch_add(counter, CHUNK)
        if start >= len(slots):
            break
        for i in range(start, min(start + CHUNK, len(slots))):
            if slots[i] >= 0:
                block = slots[i] // block_size
                offset = slots[i] - block * block_size
                _copy_row(k, i, block, offset, num_kv_heads)
                _copy_row(v, i, block, offset, num_kv_heads)


@njit(**OPTIONS)
def _merge_row(parts, sinks, row, head, weights):
    """One row of one head. weights: room for [num_parts] float32."""
    lse = parts.lse + row * parts.lse_strides[1] + head * parts.lse_strides[2]
    out = parts.out + row * parts.out_strides[1] + head * parts.out_strides[2]
    sink = sinks[head] if len(sinks) > 0 else np.float32(-np.inf)
    peak = sink
    for i in range(parts.num_parts):
        x = load_one(lse + i * parts.lse_strides[0])
        if not x <= peak:  # NaN too
            peak = x
    if peak == -np.inf:
        peak = np.float32(0)  # so that (-inf) - (-inf) never happens
    total = np.float32(math.exp(sink - peak))
    for i in range(parts.num_parts):
        weights[i] = math.exp(load_one(lse + i * parts.lse_strides[0]) - peak)
        total += weights[i]
    factor = splat(np.float32(1) / total if total != 0 else np.float32(0))
    target = parts.result + row * parts.result_strides[0] + head * parts.result_strides[1]
    size = bytes_of(parts.result_kind)
    for d in range(0, parts.width, 8):
        acc = splat(np.float32(0))
        for i in range(parts.num_parts):
            if weights[i] != 0:  # the output of an empty part is not read as a number
                acc = fma(splat(weights[i]), load_f32(out + i * parts.out_strides[0] + d * 4), acc)
        store_kind(target + d * size, mul(factor, acc), parts.result_kind)
    if parts.result_lse != 0:
        place = parts.result_lse + row * parts.result_lse_strides[0] + head * parts.result_lse_strides[1]
        store_one(place, peak + np.float32(math.log(total)) if total != 0 else np.float32(-np.inf))


@njit(**KERNEL)
def merge(facts, sinks, counter):
    """Merge parts by their LSE, one after another; several threads may run this on one counter.

    Args:
        facts: a `Parts`, plain.
        sinks: [num_heads] float32, or empty.
        counter: address of an int64, 0 at the start.
    """
    parts = Parts(*facts)
    weights = np.empty(parts.num_parts, np.float32)
    while True:
        start = fetch_add(counter, CHUNK)
        if start >= parts.num_rows:
            break
        for row in range(start, min(start + CHUNK, parts.num_rows)):
            for head in range(parts.num_heads):
                _merge_row(parts, sinks, row, head, weights)
