"""Row by row, in Numba: new keys and values into their pages, and the merge of partial results."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple

import numpy as np
from numba import njit

from octavo.kernels.cpu.native import array_at
from octavo.kernels.cpu.rounding import NAN, store_channels, store_fp8, store_row
from octavo.kernels.cpu.simd import fetch_add, fma, load_f32, load_one, mul, splat, store_one
from octavo.kernels.cpu.stored import BFLOAT16, INLINED, INT8, OPTIONS, bytes_of, load_kind, store_kind

CHUNK = 16
"""Rows that a thread takes at a time."""


class Copy(NamedTuple):
    """New rows of K (or V), and the pages that they go to: addresses, strides in bytes, storage kinds.

    An address of 0: there are no such scales. int8 has one of both: scales of rows are written, static ones read.
    """

    source: int
    source_strides: tuple[int, int]  # row, head
    source_kind: int
    target: int
    target_strides: tuple[int, int, int]  # block, row, head
    target_kind: int
    width: int
    scales: int
    scale_strides: tuple[int, int, int]  # block, row, head
    static: int
    static_stride: int  # head; channels of int8 follow each other


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


_APPEND = struct.Struct("2q 16q 16q 2q q")
"""An append in memory: address and number of the slots; K and V, a `Copy` each; block_size, num_kv_heads; counter."""

_MERGE = struct.Struct("19q 2q q")
"""A merge in memory: `Parts`; address and number of the sinks; counter."""


def pack_append(
    slots: tuple[int, int], k: tuple[int, ...], v: tuple[int, ...], block_size: int, num_kv_heads: int
) -> ctypes.Array[ctypes.c_char]:
    """An append as `append` reads it. slots: address and number; k, v: a flat `Copy`."""
    job = ctypes.create_string_buffer(_APPEND.size)
    _APPEND.pack_into(job, 0, *slots, *k, *v, block_size, num_kv_heads, 0)
    return job


def pack_merge(parts: tuple[int, ...], sinks: tuple[int, int]) -> ctypes.Array[ctypes.c_char]:
    """A merge as `merge` reads it. parts: a flat `Parts`; sinks: address and number of [num_heads] float32."""
    job = ctypes.create_string_buffer(_MERGE.size)
    _MERGE.pack_into(job, 0, *parts, *sinks, 0)
    return job


@njit(**OPTIONS)
def _copy_at(address):
    w = array_at(address, (16,), np.int64)
    return Copy(
        w[0],
        (w[1], w[2]),
        w[3],
        w[4],
        (w[5], w[6], w[7]),
        w[8],
        w[9],
        w[10],
        (w[11], w[12], w[13]),
        w[14],
        w[15],
    )


@njit(**OPTIONS)
def _scale_at(copy, block, offset, head):
    """Where the scale of a row lies."""
    return copy.scales + block * copy.scale_strides[0] + offset * copy.scale_strides[1] + head * copy.scale_strides[2]


@njit(**OPTIONS)
def _copy_row(copy, i, block, offset, head):
    """One row of one head. Returns whether it holds a NaN that its format has no code for."""
    source = copy.source + i * copy.source_strides[0] + head * copy.source_strides[1]
    target = copy.target + block * copy.target_strides[0] + offset * copy.target_strides[1]
    target += head * copy.target_strides[2]
    kind, width = copy.source_kind, copy.width
    if copy.target_kind <= BFLOAT16:
        from_size, to_size = bytes_of(kind), bytes_of(copy.target_kind)
        for d in range(0, width, 8):
            store_kind(target + d * to_size, load_kind(source + d * from_size, kind), copy.target_kind)
    elif copy.target_kind != INT8:
        scale = copy.static + head * copy.static_stride if copy.static != 0 else np.int64(0)
        store_fp8(source, kind, target, copy.target_kind, width, scale)
    elif copy.static == 0:
        store_one(_scale_at(copy, block, offset, head), store_row(source, kind, target, width))
    else:
        return store_channels(source, kind, target, width, copy.static + head * copy.static_stride)
    return False


@njit(**INLINED)
def append(job):
    """Write row i to slot slots[i], where that is not negative; several threads may run this on one job.

    Args:
        job: address of what `pack_append` wrote.
    """
    w = array_at(job, (37,), np.int64)
    slots = array_at(w[0], (w[1],), np.int64)
    k, v, block_size, num_kv_heads = _copy_at(job + 16), _copy_at(job + 144), w[34], w[35]
    while True:
        start = fetch_add(job + 288, CHUNK)
        if start >= len(slots):
            break
        for i in range(start, min(start + CHUNK, len(slots))):
            if slots[i] >= 0:
                block = slots[i] // block_size
                offset = slots[i] - block * block_size
                for head in range(num_kv_heads):
                    _copy_row(k, i, block, offset, head)
                    if _copy_row(v, i, block, offset, head):  # who sees the key gets NaN from K's scale
                        store_one(_scale_at(k, block, offset, head), NAN)


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


@njit(**INLINED)
def merge(job):
    """Merge parts by their LSE, one after another; several threads may run this on one job.

    Args:
        job: address of what `pack_merge` wrote.
    """
    w = array_at(job, (22,), np.int64)
    parts = Parts(
        w[0],
        (w[1], w[2], w[3]),
        w[4],
        (w[5], w[6], w[7]),
        w[8],
        (w[9], w[10]),
        w[11],
        w[12],
        (w[13], w[14]),
        w[15],
        w[16],
        w[17],
        w[18],
    )
    sinks = array_at(w[19], (w[20],), np.float32)
    weights = np.empty(parts.num_parts, np.float32)
    while True:
        start = fetch_add(job + 168, CHUNK)
        if start >= parts.num_rows:
            break
        for row in range(start, min(start + CHUNK, parts.num_rows)):
            for head in range(parts.num_heads):
                _merge_row(parts, sinks, row, head, weights)
