"""Linear layers for few rows on a CPU: the same product the other way round, which the library does faster.

A decode step multiplies a handful of rows by every weight. PyTorch asks its library for x W^T with the rows of x as
the columns of a matrix that is a few numbers wide; asked for (W x^T)^T instead, the library reads W as it lies.
docs/measured.md has the times.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FEW_ROWS = 64
"""Rows up to which the other way round was faster."""


def speed_up_few_rows(model: nn.Module) -> None:
    """Let the model's float32 linear layers on the CPU serve few rows faster; results differ in rounding only."""
    for module in model.modules():
        # A subclass may compute something else; a layer that somebody patched already is theirs.
        if type(module) is nn.Linear and "forward" not in vars(module) and _is_served(module.weight):
            setattr(module, "forward", MethodType(_forward, module))  # noqa: B010  mypy forbids the assignment


def _is_served(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    """What nn.Linear computes: [..., in_features] to [..., out_features]."""
    num_rows = x.numel() // x.shape[-1]
    if not 0 < num_rows <= FEW_ROWS or x.dtype != torch.float32 or not _is_served(module.weight):
        return linear(x, module.weight, module.bias)
    product = torch.mm(module.weight, x.reshape(num_rows, -1).t())
    rows = product.t().contiguous()
    if module.bias is not None:
        rows += module.bias
    return rows.view(*x.shape[:-1], -1)
