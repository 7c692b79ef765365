"""Octavo as Transformers' attention: tiny random models give the tokens of Transformers' own attention.

All families, real models and continuous batching are in tests/integrations/transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from engine import tiny
from octavo.errors import Unsupported
from octavo.plugins.transformers import status, use
from tolerance import assert_within

FAMILIES = ("Gemma2", "Gemma3", "GptOss", "DeepseekV3")
"""Soft cap, windows, sinks, and values of another width than keys."""


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Prompts as a batch, padding on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_generate_the_same_tokens(family: str) -> None:
    """Longer than the windows of 8, with a cache that grows and one that does not."""
    model, prompts = tiny.make(family), tiny.prompts((5, 13, 1, 20))
    expected = tiny.stock_tokens(model, prompts, 12)
    use(model)
    for cache in (None, "static"):
        out = model.generate(
            **padded(prompts), max_new_tokens=12, do_sample=False, pad_token_id=0, cache_implementation=cache
        )
        for row, tokens in zip(out[:, 20:].tolist(), expected, strict=True):
            assert row[: len(tokens)] == tokens, cache


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_packed_sequences_do_not_see_each_other(kind: str) -> None:
    """A batch row whose positions start again gives what its sequences give alone."""
    model, options = (tiny.make("Gemma3"), {"use_cache": False}) if kind == "decoder" else (bert(), {})
    prompts = tiny.prompts((5, 13, 1, 20))

    def run(prompts: list[list[int]]) -> Tensor:
        """[tokens, width] of one batch row."""
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        ids = torch.tensor([[token for prompt in prompts for token in prompt]])
        return model(input_ids=ids, position_ids=positions[None], **options)[0][0]

    with torch.inference_mode():
        plain = torch.cat([run([prompt]) for prompt in prompts])
        use(model)
        packed = run(prompts)
        model.set_attn_implementation("eager")
        true = torch.cat([run([prompt]) for prompt in prompts]) if model.double() else packed
    assert_within(kind, packed, true, plain)


def bert() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tiny.from_config(transformers.BertModel, transformers.BertConfig(vocab_size=tiny.VOCAB, **sizes))


def t5() -> PreTrainedModel:
    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": tiny.VOCAB}
    return tiny.from_config(transformers.T5EncoderModel, transformers.T5Config(**sizes))


IDS = torch.tensor([tiny.prompts((20,))[0]])
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "gradients": (lambda: used("Llama")(input_ids=IDS), r"has no backward: .* torch.inference_mode\(\)"),
    "dropout": (lambda: used("Llama", attention_dropout=0.1).train()(input_ids=IDS), r"call model.eval\(\)"),
    "a drawn mask": (
        lambda: used("Llama")(input_ids=IDS, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool)),
        r"a mask of its own, \(1, 1, 20, 20\): give a padding mask",
    ),
    "chunks": (lambda: used("Llama4", attention_chunk_size=8)(input_ids=IDS), "the model's holds chunked_overlay"),
    "position bias": (lambda: serve(t5())(input_ids=IDS), "position_bias|stays with its"),
    "a head width": (lambda: used("Llama", head_dim=12)(input_ids=IDS), "multiple of 8, got 12; or use another"),
    "fixed attention": (lambda: used("Bloom"), "stays with its 'eager' attention"),
}


def serve(model: PreTrainedModel) -> PreTrainedModel:
    use(model)
    return model


def used(family: str, **changes: object) -> PreTrainedModel:
    return serve(tiny.REFUSED["Bloom"][0]() if family == "Bloom" else tiny.make(family, **changes))


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_way_out(what: str) -> None:
    call, reason = REFUSED[what]
    grad = torch.enable_grad() if what == "gradients" else torch.no_grad()
    with grad, pytest.raises(Unsupported, match=reason):
        call()


def test_images_that_see_both_ways_are_refused_and_their_absence_is_not() -> None:
    from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

    from octavo.plugins.transformers.masks import mask, masked_step

    def draw(blocks: list[int]) -> Tensor:
        function = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([blocks])))
        return mask(1, 4, 4, mask_function=function)

    assert masked_step(draw([-1, -1, -1, -1])).causal
    with pytest.raises(Unsupported, match="the model's holds or_masks"):
        draw([-1, 0, 0, -1])
    with pytest.raises(Unsupported, match=r"the model's holds .*<lambda>"):
        mask(1, 4, 4, mask_function=lambda *indices: True)


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "not installed: pip install"), ("4.57.1", "5.17 or newer, this is 4.57.1"), ("5.24.0", None)],
)
def test_versions(version: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "version", lambda: version)
    found = status.why_inactive()
    assert found is reason is None or (found is not None and reason is not None and reason in found)
