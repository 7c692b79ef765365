"""Tiny random models of all families that Octavo serves, every way that Transformers has to run them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import tiny
from integrations.transformers.batches import generate, generate_batch, padded
from octavo.errors import Unsupported
from octavo.plugins import transformers as plugin
from tolerance import assert_within

PROMPTS = tiny.prompts((5, 13, 1, 20, 64))
MAX_TOKENS = 12

NO_CONTINUOUS_BATCHING = {"DeepseekV3", "GPTNeoX", "StableLm"}
"""Transformers fails with these, whatever the attention."""


@pytest.mark.parametrize("family", tiny.SERVED)
@torch.inference_mode()
def test_generate(family: str) -> None:
    """Left padding, past the windows of 8; a cache that grows and one that does not."""
    model = tiny.make(family)
    model.set_attn_implementation("eager")
    expected = generate(model, PROMPTS, MAX_TOKENS)
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that always says the same proves nothing"
    plugin.use(model)
    assert generate(model, PROMPTS, MAX_TOKENS) == expected
    assert generate(model, PROMPTS, MAX_TOKENS, cache_implementation="static") == expected


@pytest.mark.parametrize("family", tiny.SERVED)
@torch.inference_mode()
def test_logits_of_batches_padded_on_the_right(family: str) -> None:
    """As near to float64 as eager attention without padding."""
    model, batch = tiny.make(family), padded(PROMPTS, "right")
    model.set_experts_implementation("eager")  # grouped products know no float64

    def alone() -> Tensor:
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])

    plugin.use(model)
    found = model(**batch).logits[batch["attention_mask"].bool()]
    model.set_attn_implementation("eager")
    plain = alone()
    model.double()
    assert_within(family, found, alone(), plain)


@pytest.mark.parametrize("family", sorted(set(tiny.SERVED) - NO_CONTINUOUS_BATCHING))
def test_generate_batch(family: str) -> None:
    model = tiny.make(family)
    expected = generate(model, PROMPTS, MAX_TOKENS)
    if family == "GptOss" and plugin.batched_name() != plugin.NAME:
        with pytest.raises(Unsupported, match="kernels of its own choice only"):
            plugin.use(model, batched=True)
        return
    plugin.use(model, batched=True)
    assert generate_batch(model, PROMPTS, MAX_TOKENS) == expected
    assert generate(model, PROMPTS, MAX_TOKENS) == expected, "the name for continuous batching serves generate too"


@torch.inference_mode()
def test_compiled_models_call_it_outside_of_graphs() -> None:
    model = tiny.make("Gemma3", num_hidden_layers=2)
    plugin.use(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for prompts in (PROMPTS, tiny.prompts((9, 3, 30))):
        batch = padded(prompts)
        assert torch.equal(compiled(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits)
    with pytest.raises(Exception, match="compile with fullgraph=False"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**padded(PROMPTS), use_cache=False)
