"""How kernels are started: compiled for one call, ahead for many of them, or launched again at little cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver

from octavo.cpus import usable_cpus

MAX_THREADS = 16
"""Threads that compile: each needs some 200 MB, and a layer has about 20 kernels."""


class Call(NamedTuple):
    """A kernel with all that a launch names.

    Args:
        kernel: Triton's.
        grid: programs in each dimension.
        arguments: tensors and numbers, in the order of the kernel's parameters.
        constants: by the names of its parameters.
        options: of the compiler.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def start(self) -> Any:
        """Compile if need be, and launch. Returns the compiled kernel; None: it is interpreted."""
        return self.kernel[self.grid](*self.arguments, **self.constants, **self.options)


def compile_ahead(calls: Sequence[Call]) -> None:
    """Compile what calls need, several kernels at a time, and launch nothing.

    A kernel that does not compile is left to the call that needs it, which raises then.
    """
    with (
        ThreadPoolExecutor(min(MAX_THREADS, usable_cpus()), "octavo-compile") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for call in calls:
            call.kernel.warmup(*call.arguments, grid=call.grid, **call.constants, **call.options)


def current_stream(device: torch.device) -> int:
    """The stream that a launch goes to."""
    if device.type == "cpu":  # interpreted
        return 0
    stream: int = driver.active.get_current_stream(device.index)
    return stream


def misaligned(*addresses: int) -> tuple[int, ...] | None:
    """What a kernel depends on of addresses: how far each is from 16 bytes, which Triton would load at once.

    None: all are multiples of 16.
    """
    together = 0
    for address in addresses:
        together |= address
    return tuple(address % 16 for address in addresses) if together % 16 else None


def again(compiled: Any, grid: tuple[int, int, int], stream: int) -> Callable[..., None]:
    """A launch of a compiled kernel that wants the kernel's arguments, constants included; tensors may be addresses.

    It is what Triton's own launch ends with. The hooks of Triton's profiler do not hear of it: looking for them
    costs the host time at every launch.
    """
    run = compiled.run  # loads the kernel
    return partial(run, *grid, stream, compiled.function, compiled.packed_metadata, None, None, None)
