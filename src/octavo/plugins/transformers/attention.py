"""The attention function: what Transformers' layers call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention_call import spec_of_call
from octavo.backend import window_radii
from octavo.dense import DenseStep, attend_dense, dense_planner
from octavo.errors import Unsupported
from octavo.planner import Planner
from octavo.plugins.transformers.masks import MaskedStep, masked_step, whole
from octavo.spec import AttentionSpec


def attention(
    module: nn.Module,
    query: Tensor,  # [batch, num_q_heads, num_queries, head_dim]
    key: Tensor,  # [batch, num_kv_heads, num_keys, head_dim]
    value: Tensor,  # [batch, num_kv_heads, num_keys, value_dim]
    attention_mask: Tensor | None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: [batch, num_queries, num_q_heads, value_dim], and no weights.

    Where a mask arrives it says all of what rows see; `is_causal` and `sliding_window` are for layers without.

    Raises:
        Unsupported: the call asks for something that Octavo does not compute.
    """
    try:
        _refuse((query, key, value), arguments)
        if attention_mask is None:
            found = _without_mask(module, query, key, is_causal, sliding_window)
        else:
            found = masked_step(attention_mask)
        step = found.step
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            if query.shape[0] != 1 or not found.plain:
                raise Unsupported("it has cu_seq_lens_q beside other batch rows or padding: leave one of them out")
            step = _varlen(
                tuple(cu_seq_lens_q.tolist()), tuple(cu_seq_lens_k.tolist()), query.shape[2], key.shape[2], query.device
            )
        elif found.plain and not found.causal and query.shape[0] == 1:
            step = _by_positions(step, arguments.get("position_ids"))
        spec, sinks = spec_of_call(query, key, value, arguments, causal=found.causal, window=found.window)
    except (Unsupported, ValueError) as reason:
        raise Unsupported(
            f"{type(module).__name__} cannot run on Octavo: {reason}; or use another attn_implementation"
        ) from None
    return attend_dense(step, _planner(spec, query.device), spec, query, key, value, sinks), None


def _refuse(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise Unsupported("it has no backward: call the model under torch.inference_mode() or torch.no_grad()")
    if arguments.get("dropout"):
        raise Unsupported(f"dropout of {arguments['dropout']} is for training: call model.eval()")
    if arguments.get("output_attentions"):
        raise Unsupported('it makes no weights: output_attentions=True needs attn_implementation="eager"')


def _without_mask(
    module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None
) -> MaskedStep:
    """All rows count; queries are the last of the keys."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    step = whole(query.shape[0], query.shape[2], key.shape[2], device=query.device)
    return MaskedStep(step, causal, window_radii(sliding_window, "decoder" if causal else "encoder"), plain=True)


def _by_positions(step: DenseStep, position_ids: Tensor | None) -> DenseStep:
    """An encoder's batch row whose positions [1, num_keys] start again holds several sequences."""
    _, num_queries, num_keys = step.shape
    if position_ids is None or position_ids.shape != (1, num_keys) or num_queries != num_keys:
        return step
    starts = (position_ids[0].diff() <= 0).nonzero()[:, 0] + 1
    if not len(starts):
        return step
    offsets = (0, *starts.tolist(), num_keys)
    return _varlen(offsets, offsets, num_keys, num_keys, position_ids.device)


@lru_cache(maxsize=8)
def _varlen(
    query_offsets: tuple[int, ...], key_offsets: tuple[int, ...], num_queries: int, num_keys: int, device: torch.device
) -> DenseStep:
    """One batch row with sequences at these offsets, the same for all layers."""
    query_start_loc, key_start_loc = (torch.tensor(x, device=device) for x in (query_offsets, key_offsets))
    return DenseStep.varlen(query_start_loc, key_start_loc, num_queries, num_keys)


@lru_cache(maxsize=64)
def _planner(spec: AttentionSpec, device: torch.device) -> Planner:
    """Planners own memory that layers and steps use again."""
    return dense_planner(spec, device)
