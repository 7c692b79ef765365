"""The embedded path: Numba for few rows a sequence (decode), PyTorch for many (prefill) and without Numba."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from octavo.kernels.cpu.append import append
from octavo.kernels.cpu.attend import attend_tiles
from octavo.kernels.cpu.merge import merge
from octavo.launch import Launch, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

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
    q: Tensor,
    cache: LayerCache,
    state: State,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        q: [>= num_tokens, num_q_heads, head_dim].
        cache: one layer's views.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] and lse (or None) of this launch's
            splits; written at the launch's rows only.
        alibi_slopes: [num_q_heads] float32, given iff spec.alibi.
        sinks: [num_q_heads] float32, given iff this launch writes the final result of a layer with sinks.
    """
    if not HAS_NUMBA or cache.k_cache.dtype != cache.v_cache.dtype:
        attend_tiles(spec, plan, launch, q, cache, state, alibi_slopes, sinks, few_rows=0)
        return
    # The Numba kernel takes every row alone, always in the same order, so it is batch invariant as it stands.
    few_rows = None if plan.batch_invariant else FEW_ROWS
    attend_few_rows(spec, plan, launch, q, cache, state, alibi_slopes, sinks, few_rows)
    if few_rows is not None:
        attend_tiles(spec, plan, launch, q, cache, state, alibi_slopes, sinks, few_rows)
