"""How the kernels see a layer's tensors of 8-bit numbers: as bytes or pairs of bytes, with scales by three strides."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Number = Literal["plain", "int8", "e4m3", "e5m2"]

NUMBERS: dict[torch.dtype, Number] = {
    torch.int8: "int8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def number(dtype: torch.dtype) -> Number:
    """What one stored number is."""
    return NUMBERS.get(dtype, "plain")


def as_bytes(x: Tensor) -> Tensor:
    """fp8 as bytes: Triton knows fp8 by name only where the GPU does."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.element_size() == 1 else x


def as_pairs(x: Tensor) -> Tensor:
    """Pages of bytes as int16, two columns in one; as bytes where an odd stride or address does not allow it."""
    even = all(n % 2 == 0 for n in (*x.stride()[:3], x.shape[3], x.storage_offset()))
    return x.view(torch.int16) if even and x.data_ptr() % 2 == 0 else as_bytes(x)


def scale_strides(scale: Tensor | None, by_channel: bool = False) -> tuple[int, int, int]:
    """Strides of (block, KV head, row), or of (sequence, KV head, channel); 0 for what a scale does not depend on."""
    if scale is None or not scale.ndim:
        return 0, 0, 0
    if scale.ndim == 1:
        return 0, scale.stride(0), 0
    if scale.ndim == 2:
        return (0, scale.stride(0), scale.stride(1)) if by_channel else (scale.stride(0), scale.stride(1), 0)
    return scale.stride(0), scale.stride(1), scale.stride(2)
