"""The one dispatch: which kernels serve a problem, and why some do not."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from octavo.errors import Unsupported
from octavo.formats import FP8_FORMATS, KVFormat
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

BACKENDS = ("cpu", "triton", "gluon")
"""Kernel families, by name."""

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Kernels(Protocol):
    """What a kernel family offers; arguments are checked by the callers in `octavo.run`."""

    def attend(
        self,
        spec: AttentionSpec,
        plan: Plan,
        launch: Launch,
        operands: Operands,
        state: State,
        memo: dict[tuple[Any, ...], Any],
    ) -> None:
        """Run one launch: state.out [num_splits, ...] and state.lse of the launch's own splits, or a final result.

        Launches may be kept in `memo`, which calls of one plan share whose arguments differ in addresses and numbers.
        """

    def append(self, cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write row i of k and v to slot_mapping[i], where that is not negative."""

    def merge(
        self,
        parts: State,
        sinks: Tensor | None,
        result: State,
        query_start_loc: Tensor | None = None,
        memo: dict[tuple[Any, ...], Any] | None = None,
    ) -> None:
        """Merge parts [num_parts, ...] into a result; rows from query_start_loc[-1] on stay as they are.

        Launches may be kept in `memo`, as in `attend`.
        """


def unsupported(
    spec: AttentionSpec,
    device: torch.device,
    q_dtype: torch.dtype,
    backend: str | None = None,
    kv_format: KVFormat | None = None,
) -> str | None:
    """Why `backend` (None: the best for the device) cannot compute this; None: it can.

    A `kv_format` of None stands for K and V as plain 16- or 32-bit numbers.
    """
    if backend is not None and backend not in BACKENDS:
        return f"unknown backend {backend!r}; known backends: {', '.join(BACKENDS)}, and for paged_attention reference"
    if backend == "gluon":
        return "backend 'gluon' needs GPU kernels, which this version does not have; leave backend out"
    if backend == "triton" and device.type != "cuda":
        return f"backend 'triton' needs GPU kernels, which do not run on device {device}; leave backend out"
    if backend == "cpu" and device.type != "cpu":
        return f"backend 'cpu' reads the memory of the CPU, the tensors are on {device}; leave backend out"
    reason = _device_reason(device)
    if reason is not None:
        return reason
    if q_dtype in FP8_FORMATS.values():
        if kv_format is None or not kv_format.is_fp8:
            stored = "plain numbers" if kv_format is None else kv_format.name
            return f"q of {q_dtype} needs an fp8 cache, this one holds {stored}; use float16, bfloat16 or float32"
    elif q_dtype not in FLOAT_DTYPES:
        return f"q of {q_dtype} is not supported; use float16, bfloat16 or float32"
    if spec.head_dim > 512 or spec.v_dim > 512:
        return f"head_dim {spec.head_dim} and value_dim {spec.v_dim} must be at most 512"
    return None


def select(
    spec: AttentionSpec,
    device: torch.device,
    q_dtype: torch.dtype,
    backend: str | None = None,
    kv_format: KVFormat | None = None,
) -> Kernels:
    """The kernels for a problem; arguments as for `unsupported`.

    Raises:
        Unsupported: with the reason that `unsupported` gives.
    """
    reason = unsupported(spec, device, q_dtype, backend, kv_format)
    if reason is not None:
        raise Unsupported(reason)
    return for_device(device)


def for_device(device: torch.device) -> Kernels:
    """The kernels for work that needs no spec (append, merge).

    Raises:
        Unsupported: no kernels run on this device.
    """
    reason = _device_reason(device)
    if reason is not None:
        raise Unsupported(reason)
    if device.type == "cpu":
        from octavo.kernels import cpu

        return cpu
    from octavo.kernels import triton

    return triton


@cache
def _device_reason(device: torch.device) -> str | None:
    """Why no kernels run on a device, from what is installed and plugged in; that does not change in a process."""
    if device.type == "cpu":
        return None
    needs = f"device {device} needs GPU kernels"
    if device.type != "cuda":
        return f"{needs}, which this version does not have; move the tensors to the CPU or a CUDA device"
    if not torch.cuda.is_available():
        return f"{needs} and a GPU, and torch finds none; move the tensors to the CPU"
    if device.index is not None and device.index >= torch.cuda.device_count():
        return f"{needs} and a GPU, and torch finds {torch.cuda.device_count()}; give a number below that"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8 and torch.version.hip is None:
        return f"{needs}, which need compute capability 8.0, it has {major}.{minor}; move the tensors to the CPU"
    try:
        from octavo.kernels import triton  # noqa: F401
    except ImportError as error:
        return f"{needs}, which need Triton ({error}); pip install 'octavo[gpu]'"
    return None
