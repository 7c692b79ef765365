"""Launching a compiled kernel again, at what it costs the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.runtime import driver


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
