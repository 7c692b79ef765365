"""The functions that threads call: compiled on first use, then read from disk.

Each takes one address, of a job that `native.pack`, `rows.pack_append` or `rows.pack_merge` wrote, so that any thread
can call it, PyTorch's own among them, and Python hands over nothing else.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import cfunc, njit

from octavo.kernels.cpu import decode, prefill, rows
from octavo.kernels.cpu.native import OPTIONS, call_of

ATTEND = {torch.float32: "attend_float32", torch.float16: "attend_float16", torch.bfloat16: "attend_bfloat16"}
"""The function that runs a launch over pages of a dtype."""

_SOURCES = ("decode", "jobs", "native", "prefill", "rows", "simd")

_LOCK = threading.Lock()
_MADE: dict[str, Any] = {}


def compiled(name: str) -> Any:
    """A job's function ("append", "merge" or one of ATTEND) as machine code: a ctypes function of an address, which
    gives up the GIL while it runs."""
    made = _MADE.get(name)
    if made is None:
        with _LOCK:
            made = _MADE.get(name)
            if made is None:
                made = _MADE[name] = cfunc("void(int64)", cache=True, **OPTIONS)(_functions()[name]).ctypes
    return made


@njit(**OPTIONS)
def _attend(job, tag, _sources):
    call = call_of(job)
    decode.work(call, tag)
    prefill.work(call, tag)


@njit(**OPTIONS)
def _append(job, _sources):
    rows.append(job)


@njit(**OPTIONS)
def _merge(job, _sources):
    rows.merge(job)


@cache
def _functions() -> dict[str, Callable[[int], None]]:
    """What is compiled. Numba tells what it keeps of a function by the function's own code and the variables that it
    closes over: hence `sources`, so that a change anywhere in the kernels is noticed. One function a dtype, as two
    processes that compile two dtypes of one function at once can give both the same number."""
    sources = _checksum()

    def attend_float32(job):
        _attend(job, np.float32, sources)

    def attend_float16(job):
        _attend(job, np.int16, sources)

    def attend_bfloat16(job):
        _attend(job, np.uint16, sources)

    def append(job):
        _append(job, sources)

    def merge(job):
        _merge(job, sources)

    return {made.__name__: made for made in (attend_float32, attend_float16, attend_bfloat16, append, merge)}


def _checksum() -> int:
    """Of the kernels' sources."""
    total = 0
    for name in _SOURCES:
        total = zlib.crc32(Path(__file__).with_name(f"{name}.py").read_bytes(), total)
    return total
