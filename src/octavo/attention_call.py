"""What a call of Transformers' attention function asks for: keyword arguments to an `AttentionSpec`, or the reason why
not.

Nothing of Transformers is imported: its models hand plain tensors and numbers to the function that is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from octavo.errors import Unsupported
from octavo.spec import AttentionSpec

IGNORED_ARGUMENTS = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "dropout",
        "encoder_hidden_states",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of an attention call that do not change what it computes, or that callers look at themselves."""

_KNOWN_ARGUMENTS = frozenset({"scaling", "softcap", "s_aux"})


def spec_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: Mapping[str, Any],
    *,
    causal: bool,
    window: tuple[int | None, int | None],
) -> tuple[AttentionSpec, Tensor | None]:
    """What a call computes, and its sinks [num_q_heads] or None.

    Args:
        query: [batch, num_q_heads, num_queries, head_dim].
        key, value: [batch, num_kv_heads, num_keys, head_dim | value_dim].
        arguments: the call's keyword arguments but `is_causal` and `sliding_window`.
        causal: no row sees later tokens.
        window: (window_left, window_right), what `sliding_window` or the mask says.

    Raises:
        Unsupported: an argument that Octavo does not know.
        ValueError: a size that no kernel takes.
    """
    unknown = sorted(
        name
        for name, given in arguments.items()
        if name not in IGNORED_ARGUMENTS and name not in _KNOWN_ARGUMENTS and given is not None and given is not False
    )
    if unknown:
        raise Unsupported(f"it passes {', '.join(unknown)} to its attention, which Octavo does not know")
    scale, sinks = arguments.get("scaling"), arguments.get("s_aux")
    spec = _spec(
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        None if scale is None else float(scale),
        causal,
        *window,
        arguments.get("softcap") or None,
        sinks is not None,
    )
    return spec, sinks


@lru_cache(maxsize=256)
def _spec(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    scale: float | None,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    soft_cap: float | None,
    sinks: bool,
) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        softmax_scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=soft_cap,
        sinks=sinks,
    )
