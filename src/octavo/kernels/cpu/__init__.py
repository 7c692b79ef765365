"""The embedded path: Numba for few rows a sequence (decode), PyTorch for many (prefill) and without Numba."""

from __future__ import annotations

import warnings

from octavo.kernels.cpu.append import append
from octavo.kernels.cpu.attend import attend_tiles
from octavo.kernels.cpu.merge import merge
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

__all__ = ["append", "attend", "merge"]

try:
    from octavo.kernels.cpu.few_rows import attend_few_rows
except (ImportError, RuntimeError) as error:  # RuntimeError: Numba finds no place for its compiled code
    HAS_NUMBA = False
    warnings.warn(
        f"decode runs in plain PyTorch, which is slower than Numba ({error}); pip install 'octavo[cpu]'",
        RuntimeWarning,
        stacklevel=2,
    )
else:
    HAS_NUMBA = True

FEW_ROWS = 8
"""Rows up to which a sequence goes to the Numba kernel: decode and speculative decode."""


def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        operands: the layer's tensors.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] and lse (or None) of this launch's
            splits; written at the launch's rows only.
    """
    if not HAS_NUMBA or operands.cache.k_cache.dtype != operands.cache.v_cache.dtype:
        attend_tiles(spec, plan, launch, operands, state, few_rows=0)
        return
    # The Numba kernel takes every row alone, always in the same order, so it is batch invariant as it stands.
    few_rows = None if plan.batch_invariant else FEW_ROWS
    attend_few_rows(spec, plan, launch, operands, state, few_rows)
    if few_rows is not None:
        attend_tiles(spec, plan, launch, operands, state, few_rows)
