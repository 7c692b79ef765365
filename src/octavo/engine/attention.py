"""Octavo behind Transformers' attention interface: each attention module carries its own paged layer.

Transformers finds an attention function by name and hands it the module, so the step's plan travels on the
module and nothing is global but the name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from octavo.backend import Impl
from octavo.cache import LayerCache
from octavo.launch import Plan

IMPLEMENTATION = "octavo_paged"
_ATTRIBUTE = "octavo_layer"


@dataclass(slots=True)
class CurrentStep:
    """The plan that the layers of one model run on; None outside a step."""

    plan: Plan | None = None


class PagedLayer:
    """One attention module's share: what it computes, its pages, and the step that it reads.

    `observer`, if there is one, sees the k and v of every call before they are stored.
    """

    def __init__(self, impl: Impl, cache: LayerCache, step: CurrentStep) -> None:
        self.impl = impl
        self.cache = cache
        self.step = step
        self.observer: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v, attend with q.

        Args:
            q: [num_tokens, num_q_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim | value_dim].

        Returns:
            [num_tokens, num_q_heads, value_dim] in q's dtype.
        """
        plan = self.step.plan
        if plan is None:
            raise RuntimeError("call LLM.generate (of the newest LLM made on this model), not the model itself")
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        if self.observer is not None:
            self.observer(k, v)
        self.impl.update_cache(k, v, self.cache, plan)
        self.impl.forward(q, None, None, self.cache, plan, out)
        return out


def attach(model: PreTrainedModel, layers: dict[nn.Module, PagedLayer]) -> None:
    """Make the model's attention modules read and write pages."""
    for module, layer in layers.items():
        setattr(module, _ATTRIBUTE, layer)
    model.set_attn_implementation(IMPLEMENTATION)


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_q_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    **_facts_known_from_the_probe: object,
) -> tuple[Tensor, None]:
    """What Transformers calls. Scale, window, cap and sinks do not change from call to call; the probe read
    them once and refused what it did not know."""
    if attention_mask is not None:
        raise ValueError("a mask reached paged attention; the plan alone says which keys a row sees")
    layer: PagedLayer = getattr(module, _ATTRIBUTE)
    out = layer.forward(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
