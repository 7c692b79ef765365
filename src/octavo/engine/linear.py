"""Linear layers on a CPU, their weights put into oneDNN's order once, not anew for every product.

PyTorch's operators for such packed weights are those that its compiler uses when it freezes a model. They read the
weights of a decode step two to three times as fast as `torch.nn.functional.linear`; docs/measured.md has the times.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn


def pack_linear_layers(model: nn.Module) -> bool:
    """Pack the weights of the model's float32 and bfloat16 linear layers on the CPU.

    A packed weight takes the place of the old one, so that the model needs no more memory, unless the old one is an
    embedding too, which stays as it is. Results differ in rounding only. The layers can then run and do nothing else:
    they cannot be trained, copied, moved, converted, saved or run under autocast.

    Returns:
        Whether any layer is packed now: not on a GPU, nor where PyTorch has no oneDNN for the processor.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]  # a subclass may compute anything
    for layer in layers:
        if _is_served(layer):
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            layer.weight = nn.Parameter(packed, requires_grad=False)
            setattr(layer, "forward", MethodType(_forward, layer))  # noqa: B010  mypy forbids the assignment
    return any(_is_packed(layer) for layer in layers)


def _has_kernels() -> bool:
    """Whether PyTorch has oneDNN here, with kernels for this processor's vectors."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    )


def _is_packed(layer: nn.Linear) -> bool:
    return bool(getattr(getattr(layer, "weight", None), "is_mkldnn", False))


def _is_served(layer: nn.Linear) -> bool:
    # A layer that somebody patched is theirs, so it is if we did, and a weight of another type may be anything.
    if "forward" in vars(layer) or type(layer.weight) is not nn.Parameter or layer.weight.device.type != "cpu":
        return False
    if layer.weight.dtype == torch.bfloat16:
        return _has_kernels() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return layer.weight.dtype == torch.float32 and _has_kernels()


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """What nn.Linear computes: [..., in_features] to [..., out_features]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return product
