"""The functions that threads call: compiled on first use, then read from disk.

Each takes one address, of a job that `native.pack`, `rows.pack_append` or `rows.pack_merge` wrote, so that any thread
can call it, PyTorch's own among them, and Python hands over nothing else.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from numba import cfunc

from octavo.kernels.cpu import decode, prefill, prefill_matrix, prefill_matrix_products, rows
from octavo.kernels.cpu.native import call_of
from octavo.kernels.cpu.simd_dots import has_byte_tables, has_dot_products
from octavo.kernels.cpu.stored import BFLOAT16, COUNTING, DOTS, TAGS

_SOURCES = (
    "decode",
    "decode_dots",
    "decode_float",
    "decode_int8",
    "decode_tile",
    "jobs",
    "native",
    "prefill",
    "prefill_item",
    "prefill_matrix",
    "prefill_matrix_products",
    "prefill_matrix_tile",
    "prefill_tile",
    "rounding",
    "rows",
    "simd",
    "simd_base",
    "simd_dots",
    "simd_eight_bit",
    "simd_matrix",
    "stored",
)

_LOCK = threading.Lock()
_MADE: dict[str, Any] = {}


@cache
def attend(k_dtype: torch.dtype, v_dtype: torch.dtype, on_units: bool) -> str:
    """The name of the function that runs a launch over pages of these dtypes; on_units: prefill in squares of bfloat16,
    by what this machine has for them."""
    pages = (str(dtype).removeprefix("torch.") for dtype in (k_dtype, v_dtype))
    return "_".join(["attend", *pages, *([prefill_matrix_products.UNITS] if on_units else [])])


def compiled(name: str) -> Any:
    """A job's function ("append", "merge" or one that `attend` names) as machine code: a ctypes function of an address,
    which gives up the GIL while it runs."""
    made = _MADE.get(name)
    if made is None:
        with _LOCK:
            made = _MADE.get(name)
            if made is None:
                made = _MADE[name] = cfunc("void(int64)", cache=True, **COUNTING)(_functions()[name]).ctypes
    return made


@cache
def _functions() -> dict[str, Callable[[int], None]]:
    """What is compiled. Numba tells what it keeps of a function by the function's own code and by the variables that it
    closes over, which must be numbers and types: functions look different in every process. Hence `sources`, never
    0, so that a change anywhere in the kernels is noticed. One name a pair of dtypes, as two processes that compile two
    versions of one name at once can give both the same number."""
    sources = _checksum()

    def append(job):
        if sources:
            rows.append(job)

    def merge(job):
        if sources:
            rows.merge(job)

    kinds = product(TAGS, TAGS, (False, True))
    made = [append, merge, *(_attend_function(*kind, sources) for kind in kinds)]
    return {one.__name__: one for one in made}


def _attend_function(k_dtype: torch.dtype, v_dtype: torch.dtype, on_units: bool, sources: int) -> Callable[[int], None]:
    k_tag, v_tag, units = TAGS[k_dtype], TAGS[v_dtype], prefill_matrix_products.UNITS
    k_dots, v_dots = _decode_tag(k_dtype), _decode_tag(v_dtype)

    def run(job):
        if sources:
            call = call_of(job)
            if len(call.decode.items) > 0:
                decode.work(call, k_tag, v_tag)
            if len(call.prefill.items) > 0:
                prefill.work(call, k_tag, v_tag)

    def run_on_units(job):
        if sources:
            call = call_of(job)
            if len(call.decode.items) > 0:
                decode.work(call, k_dots, v_dots)
            if len(call.prefill.items) > 0:
                prefill_matrix.work(call, k_tag, v_tag)

    def run_on_units_or_not(job):
        if sources:
            call = call_of(job)
            if len(call.decode.items) > 0:
                if call.tensors.q_kind == BFLOAT16:
                    decode.work(call, k_dots, v_dots)
                else:
                    decode.work(call, k_tag, v_tag)
            if len(call.prefill.items) > 0:
                prefill_matrix.work(call, k_tag, v_tag)

    # "dots" are for bfloat16 queries alone, "tiles" for all.
    both = units == "tiles" and (k_dots, v_dots) != (k_tag, v_tag)
    made = run if not on_units else run_on_units_or_not if both else run_on_units
    made.__name__ = made.__qualname__ = attend(k_dtype, v_dtype, on_units)
    return made


def _decode_tag(dtype: torch.dtype) -> Any:
    """The tag that decode gets where queries are bfloat16 and prefill runs on units."""
    if dtype == torch.bfloat16:
        by_dots = has_dot_products() or prefill_matrix_products.UNITS == "dots"
    else:
        by_dots = has_byte_tables()
    return DOTS.get(dtype, TAGS[dtype]) if by_dots else TAGS[dtype]


def _checksum() -> int:
    """Of the kernels' sources."""
    total = 0
    for name in _SOURCES:
        total = zlib.crc32(Path(__file__).with_name(f"{name}.py").read_bytes(), total)
    return total or 1
