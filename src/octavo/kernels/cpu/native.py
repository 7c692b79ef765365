"""What the compiled kernels are given, and the parts that they share."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from octavo.kernels.cpu.rounding import quantised, row_scale
from octavo.kernels.cpu.simd import (
    absolute,
    call_job,
    fma,
    load_f32,
    load_int,
    load_one,
    load_real,
    mul,
    negative,
    pointer,
    root,
    splat,
    store,
    store_int,
    store_one,
)
from octavo.kernels.cpu.stored import COUNTING, FLOAT32, INLINED, OPTIONS, bytes_of, load_kind, store_kind, unit_of

LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)

LEAST = np.finfo(np.float32).min
"""The least score that something can be taken from: below it is only -inf."""


class Shape(NamedTuple):
    """Sizes of a layer, and the shard whose keys are here."""

    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    block_size: int
    dcp_world: int
    dcp_rank: int
    interleave: int


class Tensors(NamedTuple):
    """Addresses, strides in bytes and storage kinds: (row, head) of q, (block, row, head) of pages, (split, row,
    head) of out and lse. An lse of 0 is not wanted."""

    q: int
    q_strides: tuple[int, int]
    q_kind: int
    k: int
    k_strides: tuple[int, int, int]
    v: int
    v_strides: tuple[int, int, int]
    out: int
    out_strides: tuple[int, int, int]
    out_kind: int
    lse: int
    lse_strides: tuple[int, int, int]


class Scales(NamedTuple):
    """Addresses of float32 scales, and strides in bytes; an address of 0: there are none."""

    q: int
    q_strides: tuple[int, int]  # query row, KV head: fp8's of q and K, which multiply q
    k: int
    k_strides: tuple[int, int, int]  # block, row, head: of int8 K by row; q is quantised alike
    v: int
    v_strides: tuple[int, int, int]  # block, row, head: of int8 V by row
    out: int
    out_strides: tuple[int, int, int]  # query row, KV head, channel (4 or 0): what multiplies the output


class Transforms(NamedTuple):
    """What happens to q k before the softmax, in powers of two.

    score = before * q k; with a soft cap (after != 0) score = after * tanh(score); plus the position bias (0: none,
    1: slope * (key - row), 2: -slope * |row - key|, 3: -slope * sqrt(|row - key|)).
    """

    before: float
    after: float
    bias: int


class Rows(NamedTuple):
    """A step's rows, by launch row, and its tables, by launch sequence."""

    rows: np.ndarray  # [num_rows] int64 query row
    lo: np.ndarray  # [num_rows] int32 first local key seen
    hi: np.ndarray  # [num_rows] int32 end of the local keys seen
    positions: np.ndarray  # [num_rows] int32
    kv_splits: np.ndarray  # [n, num_splits + 1] int32
    block_table: np.ndarray  # [n, max_blocks] int32


class Pages(NamedTuple):
    """What K and V are stored as, and the machine code for them; see `jobs`. Code of 0 is not needed."""

    k_kind: int
    v_kind: int
    decode: int  # takes the job, as `prefill` does
    prefill: int
    load_keys: int  # `load_keys` of the prefill kernel's tile
    load_values: int


class Items(NamedTuple):
    """Work that threads take piece by piece."""

    items: np.ndarray  # [n, fields] int64; the kernels say which fields
    largest: int  # size of the largest, as the kernel counts it
    counter: int  # address of an int64: items taken


class Call(NamedTuple):
    """One launch of one layer. slopes (times log2 e) and sinks: [num_q_heads] float32, or empty."""

    shape: Shape
    tensors: Tensors
    transforms: Transforms
    scales: Scales
    rows: Rows
    slopes: np.ndarray
    sinks: np.ndarray
    decode: Items
    prefill: Items
    redo: int  # address of [prefill items] bytes, see `prefill.work`
    pages: Pages


_JOB = struct.Struct("8q 21q 2dq 6q4q 2q2q 3q3q q 15q 6q 2q")
"""A call in memory, eight bytes a word: shape, tensors, transforms; the addresses of the rows' arrays, then their
sizes; slopes and sinks, (address, length); items, (address, number, largest), twice; redo; scales; pages; the two
counters."""


_WORDS = _JOB.size // 8


def pack(
    shape: tuple[int, ...],
    tensors: tuple[int, ...],
    transforms: Transforms,
    rows: tuple[int, ...],
    slopes: tuple[int, int],
    sinks: tuple[int, int],
    decode: tuple[int, int, int],
    prefill: tuple[int, int, int],
    redo: int,
    scales: tuple[int, ...],
    pages: Pages,
) -> ctypes.Array[ctypes.c_char]:
    """A call as kernels read it, and the memory that its threads count in: addresses and sizes, see `_JOB`."""
    job = ctypes.create_string_buffer(_JOB.size)
    items = *decode, *prefill, redo
    _JOB.pack_into(job, 0, *shape, *tensors, *transforms, *rows, *slopes, *sinks, *items, *scales, *pages, 0, 0)
    return job


@njit(**COUNTING)
def array_at(address, shape, dtype):
    """The array that lies at an address."""
    return carray(pointer(address), shape, dtype)


@njit(**COUNTING)
def call_of(job):
    """The call that `pack` wrote to address `job`."""
    w = array_at(job, (_WORDS,), np.int64)
    tensors = Tensors(
        w[8],
        (w[9], w[10]),
        w[11],
        w[12],
        (w[13], w[14], w[15]),
        w[16],
        (w[17], w[18], w[19]),
        w[20],
        (w[21], w[22], w[23]),
        w[24],
        w[25],
        (w[26], w[27], w[28]),
    )
    scales = Scales(
        w[53],
        (w[54], w[55]),
        w[56],
        (w[57], w[58], w[59]),
        w[60],
        (w[61], w[62], w[63]),
        w[64],
        (w[65], w[66], w[67]),
    )
    rows = Rows(
        array_at(w[32], (w[38],), np.int64),
        array_at(w[33], (w[38],), np.int32),
        array_at(w[34], (w[38],), np.int32),
        array_at(w[35], (w[38],), np.int32),
        array_at(w[36], (w[39], w[40]), np.int32),
        array_at(w[37], (w[39], w[41]), np.int32),
    )
    return Call(
        Shape(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]),
        tensors,
        Transforms(load_real(job + 29 * 8), load_real(job + 30 * 8), w[31]),
        scales,
        rows,
        array_at(w[42], (w[43],), np.float32),
        array_at(w[44], (w[45],), np.float32),
        Items(array_at(w[46], (w[47], 6), np.int64), w[48], job + 74 * 8),
        Items(array_at(w[49], (w[50], 5), np.int64), w[51], job + 75 * 8),
        w[52],
        Pages(w[68], w[69], w[70], w[71], w[72], w[73]),
    )


@njit(**OPTIONS)
def attend(job):
    """Run the kernels of a job that have items: words as in `call_of`, which each kernel calls for itself."""
    num_decode_items, num_prefill_items = load_int(job + 47 * 8), load_int(job + 50 * 8)
    decode, prefill = load_int(job + 70 * 8), load_int(job + 71 * 8)
    if num_decode_items > 0:
        call_job(decode, job)
    if num_prefill_items > 0:
        call_job(prefill, job)


@njit(**OPTIONS)
def find_rows(table, block_size, first, count, base, strides, addresses):
    """Where the rows of keys first, first + 1, ... lie, head 0: [count] int64 at `addresses`.

    Args:
        table: [max_blocks] int32 of the sequence.
        base, strides: of the pages, in bytes.
    """
    page = first // block_size
    offset = first - page * block_size
    while count > 0:
        row = base + np.int64(table[page]) * strides[0] + offset * strides[1]
        run = min(count, block_size - offset)
        for _ in range(run):
            store_int(addresses, row)
            row += strides[1]
            addresses += 8
        count -= run
        page += 1
        offset = 0


@njit(**OPTIONS)
def key_position(j, shape):
    """Global position of local key j."""
    run = j // shape.interleave
    return (run * shape.dcp_world + shape.dcp_rank) * shape.interleave + j - run * shape.interleave


@njit(**OPTIONS)
def biased(x, slope, distance, bias):
    """Scores with their position bias; distance: of the key from the row, bias: see `Transforms`."""
    if bias >= 2:
        distance = absolute(distance)
        if bias == 3:
            distance = root(distance)
        distance = negative(distance)
    return fma(slope, distance, x)


@njit(**OPTIONS)
def sink_of(call, head):
    """A head's sink, in powers of two; -inf, which changes nothing, where the launch has none."""
    return call.sinks[head] * np.float32(LOG2_E) if len(call.sinks) > 0 else np.float32(-np.inf)


@njit(**INLINED)
def query_factor(call, row, head):
    """What one head's scores are multiplied with, but for int8's scales of rows."""
    scales, factor = call.scales, np.float32(call.transforms.before * unit_of(call.pages.k_kind))
    if scales.q != 0:
        factor *= load_one(scales.q + row * scales.q_strides[0] + head // call.shape.group * scales.q_strides[1])
    return factor


@njit(**OPTIONS)
def load_query(call, row, head, target):
    """One head's query to `target` [head_dim] float32, whole numbers where K is int8. Returns its factor."""
    tensors, width, factor = call.tensors, call.shape.head_dim, query_factor(call, row, head)
    source = tensors.q + row * tensors.q_strides[0] + head * tensors.q_strides[1]
    size = bytes_of(tensors.q_kind)
    for d in range(0, width, 8):
        store(target + d * 4, load_kind(source + d * size, tensors.q_kind))
    if call.scales.k == 0:
        return factor
    scale = row_scale(target, FLOAT32, width)
    for d in range(0, width * 4, 32):
        store(target + d, quantised(load_f32(target + d), scale))
    return factor * scale


@njit(**INLINED)
def settle(call, head, row, split, m, l):
    """Write one head's LSE; returns what its weighted sum of values is multiplied with.

    Args:
        m, l: largest score, in powers of two, and the sum of weights.
    """
    tensors, sink = call.tensors, sink_of(call, head)
    scale, top = np.float32(1), max(m, sink)
    if top > m:
        scale = np.float32(2.0 ** (m - top))
        l *= scale
    if sink > -np.inf:
        l += np.float32(2.0 ** (sink - top))
    if tensors.lse != 0:
        lse = (
            tensors.lse + split * tensors.lse_strides[0] + row * tensors.lse_strides[1] + head * tensors.lse_strides[2]
        )
        value = (top + math.log2(l)) * LN_2 if l != 0 else -np.inf
        store_one(lse, np.float32(value))
    return scale / l * unit_of(call.pages.v_kind) if l != 0 else np.float32(0)


@njit(**INLINED)
def find_output(call, head, row, split):
    """Where one head's output belongs."""
    tensors = call.tensors
    return tensors.out + split * tensors.out_strides[0] + row * tensors.out_strides[1] + head * tensors.out_strides[2]


@njit(**OPTIONS)
def finish(call, head, row, split, m, l, acc):
    """Write one head's output and LSE.

    Args:
        m, l: see `settle`.
        acc: address of the weighted sum of values, [value_dim] float32.
    """
    tensors, scales, factor = call.tensors, call.scales, splat(settle(call, head, row, split, m, l))
    by_channel = scales.out_strides[2] != 0
    given = scales.out + row * scales.out_strides[0] + head // call.shape.group * scales.out_strides[1]
    if scales.out != 0 and not by_channel:
        factor = mul(factor, splat(load_one(given)))
    out, size = find_output(call, head, row, split), bytes_of(tensors.out_kind)
    for d in range(0, call.shape.value_dim, 8):
        x = mul(factor, load_f32(acc + d * 4))
        if by_channel:
            x = mul(x, load_f32(given + d * 4))
        store_kind(out + d * size, x, tensors.out_kind)
