"""What a Transformers model's attention layers compute, found out by running one token through it.

A recorder stands in for the attention function and a mask function that is kept instead of drawn, so that
the facts come from the model's own calls. What Octavo would compute differently is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from octavo.attention_call import spec_of_call
from octavo.backend import window_radii
from octavo.engine.errors import ModelError
from octavo.errors import Unsupported
from octavo.spec import AttentionSpec

PROBE = "octavo_probe"
_RECORD = "octavo_record"
_MASK = "octavo_mask_function"

MAX_MASK_PROBE = 1 << 15
"""Masks are compared up to this position."""


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One attention module and what it computes.

    Args:
        module: the module that calls the attention function.
        spec: what it computes.
        sinks: [num_q_heads] float or None.
    """

    module: nn.Module
    spec: AttentionSpec
    sinks: Tensor | None


@dataclass(slots=True)
class _Record:
    """An attention call as it arrived."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]
    calls: int = 1


def probe(model: PreTrainedModel, max_model_len: int) -> list[ProbedLayer]:
    """The attention layers of a decoder model, in the order of the model's modules.

    Args:
        model: a causal language model, in eval mode.
        max_model_len: longest sequence that will be served.

    Raises:
        ModelError: the model's attention cannot be replaced without changing its results; says why.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model; the engine serves decoders")
    _check_rope(name, config, max_model_len)
    modules = _run_one_token(model)
    if not modules:
        raise ModelError(f"{name} does not call Transformers' attention interface, so its attention cannot be replaced")
    expected = getattr(config, "num_hidden_layers", len(modules))
    if len(modules) != expected:
        raise ModelError(
            f"{name} has {expected} layers, {len(modules)} of them call Transformers' attention interface; "
            f"the others keep a state of their own, which pages do not hold"
        )
    return [_layer(f"{name}, attention layer {i}", m, r, max_model_len) for i, (m, r) in enumerate(modules)]


def _run_one_token(model: PreTrainedModel) -> list[tuple[nn.Module, _Record]]:
    before = model.config._attn_implementation
    model.set_attn_implementation(PROBE)
    try:
        if model.config.get_text_config()._attn_implementation != PROBE:
            raise ModelError(f"{type(model).__name__} does not let its attention be replaced")
        one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        try:
            with torch.inference_mode():
                model(input_ids=one, position_ids=one, use_cache=False)
        except Exception as error:  # a model's own code may fail in any way
            raise ModelError(f"{type(model).__name__} cannot run one token as serving would: {error}") from error
        recorded = [(m, getattr(m, _RECORD)) for m in model.modules() if hasattr(m, _RECORD)]
    finally:
        for module in model.modules():
            if hasattr(module, _RECORD):
                delattr(module, _RECORD)
        model.set_attn_implementation(before)
    return recorded


def _layer(where: str, module: nn.Module, record: _Record, max_model_len: int) -> ProbedLayer:
    arguments = dict(record.arguments)
    causal, window = arguments.pop("is_causal", None), arguments.pop("sliding_window", None)
    try:
        spec, sinks = spec_of_call(
            record.query, record.key, record.value, arguments, causal=True, window=window_radii(window)
        )
    except (Unsupported, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(f"{where} attends to later tokens too: it is an encoder, the engine serves decoders")
    if record.calls > 1:
        raise ModelError(f"{where} is called {record.calls} times a token; its calls would share their pages")
    _check_mask(where, spec, record.mask, max_model_len)
    return ProbedLayer(module, spec, sinks)


def _check_mask(where: str, spec: AttentionSpec, mask: Tensor | None, max_model_len: int) -> None:
    """Compare the model's own mask function with the spec's interval at edges up to max_model_len."""
    if mask is None:
        return
    function: Callable[..., Tensor] | None = getattr(mask, _MASK, None)
    if function is None:
        raise ModelError(f"{where} makes a mask of its own ({tuple(mask.shape)}), which pages do not know")
    end = min(max_model_len, MAX_MASK_PROBE)
    edges = {0, end - 1}
    for width in (1 << b for b in range(end.bit_length())):
        edges |= {width - 1, width, width + 1}
    if spec.window_left is not None:
        edges |= {spec.window_left, spec.window_left + 1, spec.window_left + 2}
    zero = torch.zeros((), dtype=torch.long)
    q = torch.tensor(sorted(p for p in edges if p < end))
    j = torch.arange(end)
    try:
        model_sees = torch.as_tensor(function(zero, zero, q[:, None], j[None])).expand(len(q), end)
    except (IndexError, RuntimeError) as error:
        raise ModelError(f"{where}: its mask depends on the prompt, not on positions alone") from error
    lo, hi = spec.bounds(q, torch.full_like(q, end))
    differs = model_sees != ((j >= lo[:, None]) & (j < hi[:, None]))
    if bool(differs.any()):
        row, key = differs.nonzero()[0].tolist()
        sees = "sees" if model_sees[row, key] else "does not see"
        raise ModelError(
            f"{where}: its mask is no causal window: query {int(q[row])} {sees} key {key} "
            f"(window_left {spec.window_left})"
        )


def _check_rope(name: str, config: Any, max_model_len: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest sequence of the batch."""
    for rope in _rope_settings(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", config.max_position_embeddings
        )
        if max_model_len > limit:
            raise ModelError(
                f"{name} has {kind!r} rotary embeddings, whose frequencies change for all sequences of a batch "
                f"once one passes {limit} tokens; set max_model_len to at most {limit}"
            )


def _rope_settings(rope: Any) -> Iterable[dict[str, Any]]:
    """The settings of all layer types: one dict, or a dict of dicts."""
    if not isinstance(rope, dict):
        return
    nested = [value for value in rope.values() if isinstance(value, dict)]
    yield from nested or [rope]


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Stands in for the attention function: keeps the call on the module and returns zeros."""
    seen: _Record | None = getattr(module, _RECORD, None)
    if seen is not None:
        seen.calls += 1
    else:
        setattr(module, _RECORD, _Record(query, key, value, attention_mask, arguments))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _keep_mask_function(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **_: Any
) -> Tensor:
    """Stands in for Transformers' mask makers: an empty mask that carries the function it would be drawn from."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)
    setattr(mask, _MASK, mask_function)
    return mask


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _keep_mask_function)
