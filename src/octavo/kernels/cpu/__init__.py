"""The embedded path: compiled by Numba, or in plain PyTorch where Numba is missing."""

from __future__ import annotations

import warnings

from octavo.kernels.cpu.append import append
from octavo.kernels.cpu.attend import attend_tiles
from octavo.kernels.cpu.merge import merge
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

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


def attend(spec: AttentionSpec, plan: Plan, launch: Launch, operands: Operands, state: State) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        operands: the layer's tensors.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] and lse (or None) of this launch's
            splits; written at the launch's rows only.
    """
    if HAS_NUMBA and operands.cache.k_cache.dtype == operands.cache.v_cache.dtype:
        compiled.attend(spec, plan, launch, operands, state)
    else:
        attend_tiles(spec, plan, launch, operands, state)
