"""The embedded path: compiled by Numba, or in plain PyTorch where Numba is missing."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels.cpu import plain
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

__all__ = ["append", "attend", "merge"]

try:
    from octavo.kernels.cpu import compiled
except (ImportError, RuntimeError) as error:  # RuntimeError: Numba finds no place for its compiled code
    HAS_NUMBA = False
    warnings.warn(
        f"attention runs in plain PyTorch, which is slower than Numba ({error}); pip install 'octavo[cpu]'",
        RuntimeWarning,
        stacklevel=2,
    )
else:
    HAS_NUMBA = True


@torch.no_grad()
def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
    memo: dict[tuple[Any, ...], Any],
) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        operands: the layer's tensors.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] and lse (or None) of this launch's
            splits, or a final result; written at the launch's rows only.
        memo: not used, as nothing is launched here.
    """
    state = state.in_parts()
    if HAS_NUMBA:
        compiled.attend(spec, plan, launch, operands, state)
    else:
        plain.attend(spec, plan, launch, operands, state, merge)


@torch.no_grad()
def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots.

    Args:
        cache: one layer's views.
        k, v: [>= num_slots, num_kv_heads, head_dim | value_dim]; rows past num_slots are padding.
        slot_mapping: [num_slots] int64; negative: the row is not stored.
    """
    if HAS_NUMBA and compiled.can_append(cache, k, v):
        compiled.append(cache, k, v, slot_mapping)
    else:
        plain.append(cache, k, v, slot_mapping)


@torch.no_grad()
def merge(
    parts: State,
    sinks: Tensor | None,
    result: State,
    query_start_loc: Tensor | None = None,
    memo: dict[tuple[Any, ...], Any] | None = None,
) -> None:
    """Merge parts by their LSE, the sink as one more part without a value.

    Parts are added one after another, so that empty parts at the end (a longer neighbour in the batch
    brings them) leave every bit as it is.

    Args:
        parts: out [num_parts, num_tokens, num_q_heads, value_dim], lse [num_parts, num_tokens, num_q_heads]
            float32, any strides. The output of a part with lse = -inf is not read as a number.
        sinks: [num_q_heads] float32 or None.
        result: one part, out of any float dtype, lse float32 or None; written in place.
        query_start_loc: [num_seqs + 1] int32; rows from its last entry on belong to no sequence and stay as
            they are. None: all rows are written.
        memo: not used, as nothing is launched here.
    """
    result = result.in_parts()
    num_rows = parts.out.shape[1] if query_start_loc is None else int(query_start_loc[-1])
    if HAS_NUMBA and compiled.can_merge(parts, result):
        compiled.merge(parts, sinks, result, num_rows)
    else:
        plain.merge(parts, sinks, result, num_rows)
