"""How kernels are started: compiled for the first call, for many calls at once, or launched again at little cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime import driver

MAX_THREADS = 16
"""Threads that compile: each needs some 200 MB, and a layer has about 20 kernels."""

_only_compile: ContextVar[bool] = ContextVar("octavo_only_compile", default=False)


@contextmanager
def compiling() -> Iterator[None]:
    """Calls in this context compile their kernels, several at a time, and launch none; it ends when all are ready.

    What the calls would write stays as it is.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "octavo-compile") as pool, triton.AsyncCompileMode(pool):
        token = _only_compile.set(True)
        try:
            yield
        finally:
            _only_compile.reset(token)


def invoke(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """Call a kernel as `kernel[grid](...)` does.

    Returns:
        The compiled kernel; None if there is none: it is interpreted, or compiled later (`compiling`).
    """
    if _only_compile.get() and isinstance(kernel, triton.JITFunction):
        kernel.warmup(*arguments, grid=grid, **options)
        return None
    return kernel[grid](*arguments, **options)


def current_stream(device: torch.device) -> int:
    """The stream that a launch goes to."""
    if device.type == "cpu":  # interpreted
        return 0
    stream: int = driver.active.get_current_stream(device.index)
    return stream


def again(compiled: Any, grid: tuple[int, int, int], stream: int) -> Callable[..., None]:
    """A launch of a compiled kernel that wants the kernel's arguments, constants included; tensors may be addresses.

    It is what Triton's own launch ends with. The hooks of Triton's profiler do not hear of it: looking for them
    costs the host time at every launch.
    """
    run = compiled.run  # loads the kernel
    return partial(run, *grid, stream, compiled.function, compiled.packed_metadata, None, None, None)
