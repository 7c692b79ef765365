"""The portable GPU path: NVIDIA from compute capability 8.0, AMD by compilation.

Importing it loads Triton, so the dispatch does that only for tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec, KVShard

if TYPE_CHECKING:
    from octavo.cache import LayerCache

__all__ = [
    "Call",
    "Cut",
    "append",
    "attend",
    "call_of",
    "compile_ahead",
    "fill_step",
    "merge",
    "step_size",
    "variant",
    "view_step",
]

NEEDED = (3, 6)
"""The oldest Triton whose language the kernels are written in."""

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < NEEDED:
    raise ImportError(f"triton {triton.__version__} is too old, the kernels need {'.'.join(map(str, NEEDED))}")

from octavo.kernels.triton.append import append as _append  # noqa: E402
from octavo.kernels.triton.attend import attend as _attend  # noqa: E402
from octavo.kernels.triton.attend import call_of, variant  # noqa: E402
from octavo.kernels.triton.launching import Call  # noqa: E402
from octavo.kernels.triton.launching import compile_ahead as _compile_ahead  # noqa: E402
from octavo.kernels.triton.merge import merge as _merge  # noqa: E402
from octavo.kernels.triton.schedule import Cut, Step, step_size, view_step  # noqa: E402
from octavo.kernels.triton.schedule import fill_step as _fill_step  # noqa: E402


def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
    memo: dict[tuple[Any, ...], Any],
) -> None:
    """Run one launch; arguments as in `octavo.kernels.triton.attend`."""
    device = operands.q.device
    if device.type == "cpu" or device.index == torch.cuda.current_device():  # a context would cost 1 us a layer
        _attend(spec, plan, launch, operands, state, memo)
        return
    with torch.cuda.device(device):
        _attend(spec, plan, launch, operands, state, memo)


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots; arguments as in `octavo.kernels.triton.append`."""
    device = k.device
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        _append(cache, k, v, slot_mapping)
        return
    with torch.cuda.device(device):
        _append(cache, k, v, slot_mapping)


def merge(
    parts: State,
    sinks: Tensor | None,
    result: State,
    query_start_loc: Tensor | None = None,
    memo: dict[tuple[Any, ...], Any] | None = None,
) -> None:
    """Merge parts; arguments as in `octavo.kernels.triton.merge`."""
    with _on(parts.out.device):
        _merge(parts, sinks, result, query_start_loc, memo)


def fill_step(
    step: Step,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    shard: KVShard,
    cut: Cut,
    block_size: int,
    kernels: dict[tuple[Any, ...], Any],
) -> None:
    """What a plan knows of rows and keys; arguments as in `octavo.kernels.triton.schedule`."""
    with _on(query_start_loc.device):
        _fill_step(step, query_start_loc, seq_lens, shard, cut, block_size, kernels)


def compile_ahead(device: torch.device, calls: Sequence[Call]) -> None:
    """Compile what calls on a device need; as in `octavo.kernels.triton.launching`."""
    with _on(device):
        _compile_ahead(calls)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
