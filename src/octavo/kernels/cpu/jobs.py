"""What threads call, compiled on first use, then read from disk.

Threads get one address, of a job that `native.pack`, `rows.pack_append` or `rows.pack_merge` wrote, so that any thread
can call them, PyTorch's own among them, and Python hands over nothing else.

Decode is compiled for each pair of dtypes, as it spends its time on numbers as they are stored. Prefill is compiled
once: what differs, how tiles of keys and of values are filled, is compiled by itself for each dtype, and a job names
the code of its pages (`Pages`).
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from numba import cfunc

from octavo.kernels.cpu import (
    decode,
    native,
    prefill,
    prefill_matrix,
    prefill_matrix_products,
    prefill_matrix_tile,
    prefill_tile,
    rows,
)
from octavo.kernels.cpu.native import Pages, call_of
from octavo.kernels.cpu.simd_base import IS_ZEN, WIDE
from octavo.kernels.cpu.simd_dots import has_byte_tables, has_dot_products
from octavo.kernels.cpu.simd_eight_bit import HAS_PAIRS
from octavo.kernels.cpu.stored import COUNTING, DOTS, KINDS, TAGS

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

IN_PARTS = {torch.float32, torch.float16}
"""Dtypes of pages whose numbers are the sum of more than one bfloat16."""

_LOCK = threading.Lock()
_MADE: dict[str, Any] = {}

Code = Callable[..., None]


def names_of(q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype, on_units: bool) -> dict[str, str]:
    """What is compiled for these dtypes, by its place in `Pages`; on_units: prefill in squares of bfloat16, by what
    this machine has for them."""
    k, v = (str(dtype).removeprefix("torch.") for dtype in (k_dtype, v_dtype))
    by_dots = [_is_by_dots(q_dtype, dtype) for dtype in (k_dtype, v_dtype)]
    units, squares = "", ""
    if on_units:
        in_parts = "_in_parts" if {k_dtype, v_dtype} & IN_PARTS else ""
        units, squares = f"_in_{prefill_matrix_products.UNITS}{in_parts}", "_as_squares"
    return {
        "decode": _decode_name(k_dtype, v_dtype, *by_dots),
        "prefill": f"prefill{units}",
        "load_keys": f"load_keys_of_{k}{squares}",
        "load_values": f"load_values_of_{v}{squares}",
    }


@cache
def pages_of(
    q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype, on_units: bool, decodes: bool, prefills: bool
) -> Pages:
    """The code for these dtypes: of decode, of prefill, or of both."""
    code = {
        place: _made(name).address if (decodes if place == "decode" else prefills) else 0
        for place, name in names_of(q_dtype, k_dtype, v_dtype, on_units).items()
    }
    return Pages(KINDS[k_dtype], KINDS[v_dtype], **code)


def _is_by_dots(q_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether decode multiplies these numbers by dot products of bfloat16."""
    if q_dtype != torch.bfloat16 or dtype not in DOTS:
        return False
    if dtype == torch.bfloat16:
        return has_dot_products() or prefill_matrix_products.UNITS == "dots"
    return has_byte_tables()


def compiled(name: str) -> Any:
    """A function as machine code: a ctypes function of an address, which gives up the GIL while it runs."""
    return _made(name).ctypes


def _made(name: str) -> Any:
    made = _MADE.get(name)
    if made is None:
        with _LOCK:
            made = _MADE.get(name)
            if made is None:
                function = _functions()[name]
                made = _MADE[name] = cfunc(signature_of(function), cache=True, **COUNTING)(function)
    return made


def signature_of(function: Code) -> str:
    """Numba's signature of code: whole numbers, and no result."""
    return f"void({', '.join(['int64'] * len(inspect.signature(function).parameters))})"


@cache
def _functions() -> dict[str, Code]:
    """What can be compiled. Numba tells what it keeps of a function by the function's own code and by the variables
    that it closes over, which must be numbers and types: functions look different in every process. Hence `sources`,
    never 0, so that a change anywhere in the kernels is noticed. One name for each, as two processes that compile two
    versions of one name at once can give both the same number."""
    sources = _checksum()

    def append(job):
        if sources:
            rows.append(job)

    def merge(job):
        if sources:
            rows.merge(job)

    def attend(job):
        if sources:
            native.attend(job)

    def prefill_(job):
        if sources:
            prefill.work(call_of(job))

    made = {"append": append, "merge": merge, "attend": attend, "prefill": prefill_}
    if units := prefill_matrix_products.UNITS:
        made[f"prefill_in_{units}"] = _prefill_in_units(True, sources)
        made[f"prefill_in_{units}_in_parts"] = _prefill_in_units(False, sources)
    for dtype, tag in TAGS.items():
        made |= _tiles(str(dtype).removeprefix("torch."), tag, sources)
    for k_dtype, v_dtype, *by_dots in product(TAGS, TAGS, (False, True), (False, True)):
        tags = [
            DOTS.get(dtype) if dots else TAGS[dtype] for dtype, dots in zip((k_dtype, v_dtype), by_dots, strict=True)
        ]
        if None not in tags:
            made[_decode_name(k_dtype, v_dtype, *by_dots)] = _decode(tags[0], tags[1], sources)
    for name, function in made.items():
        function.__name__ = function.__qualname__ = name
    return made


def _prefill_in_units(in_one: bool, sources: int) -> Code:
    def prefill_in_units(job):
        if sources:
            prefill_matrix.work(call_of(job), in_one)

    return prefill_in_units


def _decode_name(k_dtype: torch.dtype, v_dtype: torch.dtype, k_by_dots: bool, v_by_dots: bool) -> str:
    k, v = (str(dtype).removeprefix("torch.") for dtype in (k_dtype, v_dtype))
    return f"decode_of_{k}{'_by_dots' * k_by_dots}_and_{v}{'_by_dots' * v_by_dots}"


def _decode(k_tag: Any, v_tag: Any, sources: int) -> Code:
    def decode_(job):
        if sources:
            decode.work(call_of(job), k_tag, v_tag)

    return decode_


def _tiles(name: str, tag: Any, sources: int) -> dict[str, Code]:
    def load_keys(found, start, end, offset, head_dim, k, depth):
        if sources:
            prefill_tile.load_keys(found, start, end, offset, head_dim, k, depth, tag)

    def load_values(found, start, end, offset, value_dim, v):
        if sources:
            prefill_tile.load_values(found, start, end, offset, value_dim, v, tag)

    def load_keys_as_squares(found, start, end, offset, head_dim, k, depth):
        if sources:
            prefill_matrix_tile.load_keys(found, start, end, offset, head_dim, k, depth, tag)

    def load_values_as_squares(found, start, end, offset, value_dim, v):
        if sources:
            prefill_matrix_tile.load_values(found, start, end, offset, value_dim, v, tag)

    return {
        f"load_keys_of_{name}": load_keys,
        f"load_values_of_{name}": load_values,
        f"load_keys_of_{name}_as_squares": load_keys_as_squares,
        f"load_values_of_{name}_as_squares": load_values_as_squares,
    }


def _checksum() -> int:
    """Of the kernels' sources, and of what they are told of the machine: code for one answer must not meet that for
    another."""
    facts = WIDE, IS_ZEN, HAS_PAIRS, prefill_matrix_products.UNITS, has_dot_products(), has_byte_tables()
    total = zlib.crc32(repr(facts).encode())
    for name in _SOURCES:
        total = zlib.crc32(Path(__file__).with_name(f"{name}.py").read_bytes(), total)
    return total or 1
