"""Every family that Octavo serves gives Transformers' own tokens; every other one is refused with the reason."""

from __future__ import annotations

import pytest
import torch

from engine import tiny
from octavo.engine.errors import ModelError
from octavo.engine.llm import LLM
from octavo.engine.request import SamplingParams

LENGTHS = (3, 17, 40, 9, 1, 25)  # windows of 8, pages of 4 and chunks of 24 all have edges among them


@pytest.mark.parametrize("family", tiny.SERVED)
def test_tokens_equal_transformers(family: str) -> None:
    """Mixed and chunked prefill, four requests at a time, pages of 4: every token as from `generate`."""
    model = tiny.make(family)
    batch = tiny.prompts(LENGTHS)
    expected = tiny.stock_tokens(model, batch, 12)
    llm = LLM(model, block_size=4, num_blocks=100, max_num_batched_tokens=24, max_num_seqs=4)
    results = llm.generate(batch, SamplingParams(max_tokens=12))
    assert [list(result.token_ids) for result in results] == expected
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that always says the same proves nothing"


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    make, reason = tiny.REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        LLM(make(), num_blocks=10)


def test_a_probe_leaves_a_refused_model_as_it_was() -> None:
    model = tiny.make("Llama4", attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=64)
    ids = torch.tensor([tiny.prompts([20])[0]])
    before = model(ids).logits
    with pytest.raises(ModelError):
        LLM(model, num_blocks=10)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)


def test_dynamic_rope_is_served_within_its_limit() -> None:
    make, _ = tiny.REFUSED["dynamic rope"]
    model = make()
    batch = tiny.prompts((5, 30))
    expected = tiny.stock_tokens(model, batch, 6)
    results = LLM(model, max_model_len=128, num_blocks=20).generate(batch, SamplingParams(max_tokens=6))
    assert [list(result.token_ids) for result in results] == expected


def test_a_mask_of_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose mask differs from its window argument would be served wrongly in silence."""
    model = tiny.make("Mistral")
    for layer in model.model.layers:
        forward = layer.self_attn.forward

        def without_window(*args, forward=forward, module=layer.self_attn, **kwargs):
            module.config.sliding_window = None
            try:
                return forward(*args, **kwargs)
            finally:
                module.config.sliding_window = 8

        monkeypatch.setattr(layer.self_attn, "forward", without_window)
    with pytest.raises(ModelError, match="mask is no causal window"):
        LLM(model, num_blocks=10)
