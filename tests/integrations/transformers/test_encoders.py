"""Encoders, and encoder-decoders with cross attention: tiny random models against eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from engine import tiny
from integrations.transformers.batches import padded
from octavo.plugins import transformers as plugin
from tolerance import assert_within

PROMPTS = tiny.prompts((24, 7, 15, 3))
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"vocab_size": tiny.VOCAB, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0}
BOTH = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "init_std": 0.3}
BOTH |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": tiny.VOCAB}
BOTH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": tiny.EOS, "decoder_start_token_id": 1}

ENCODERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: tiny.from_config(hf.BertModel, hf.BertConfig(**SIZES)),
    "roberta": lambda: tiny.from_config(hf.RobertaModel, hf.RobertaConfig(**SIZES)),
    "modernbert, windows": lambda: tiny.from_config(
        hf.ModernBertModel, hf.ModernBertConfig(**SIZES, local_attention=8, global_attn_every_n_layers=2)
    ),
    "distilbert": lambda: tiny.from_config(
        hf.DistilBertModel, hf.DistilBertConfig(vocab_size=tiny.VOCAB, dim=64, n_heads=4, n_layers=2, hidden_dim=64)
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
@torch.inference_mode()
def test_padded_encoders(name: str) -> None:
    model, batch = ENCODERS[name](), padded(PROMPTS, "right")

    def alone() -> Tensor:
        return torch.cat([model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS])

    plain = alone()
    plugin.use(model)
    found = model(**batch).last_hidden_state[batch["attention_mask"].bool()]
    model.double().set_attn_implementation("eager")
    assert_within(name, found, alone(), plain)


@torch.inference_mode()
def test_packed_encoder_with_offsets() -> None:
    """What data collators give: offsets beside positions that start again, here with a gap of their own."""
    model, lens = ENCODERS["bert"](), [len(prompt) for prompt in PROMPTS]
    plugin.use(model)
    flat, positions = (
        torch.tensor([[token for prompt in PROMPTS for token in prompt]]),
        torch.cat([torch.arange(n) for n in lens])[None],
    )
    offsets = torch.tensor([0, *lens]).cumsum(0).int()
    by_offsets = model(
        input_ids=flat, position_ids=positions, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=24,
        max_length_k=24,
    )  # fmt: skip
    by_positions = model(input_ids=flat, position_ids=positions)
    assert torch.equal(by_offsets.last_hidden_state, by_positions.last_hidden_state)


@torch.inference_mode()
def test_encoder_decoder_text() -> None:
    """Bart: padded encoder, cross attention, greedy and beams, both caches."""
    model = tiny.from_config(hf.BartForConditionalGeneration, hf.BartConfig(**BOTH, forced_eos_token_id=None))
    batch = padded(PROMPTS, "right")
    assert_same_tokens(model, lambda **how: model.generate(**batch, max_new_tokens=12, do_sample=False, **how))


@torch.inference_mode()
def test_encoder_decoder_sound() -> None:
    """Whisper: no mask at all reaches its encoder and its cross attention."""
    sizes = BOTH | {"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 64}
    config = hf.WhisperConfig(**sizes, begin_suppress_tokens=None, suppress_tokens=None)
    model = tiny.from_config(hf.WhisperForConditionalGeneration, config)
    sound = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor(tiny.prompts((9, 9)))
    assert_as_eager("whisper", model, lambda: model(input_features=sound.to(model.dtype), decoder_input_ids=ids).logits)
    assert_same_tokens(model, lambda **how: model.generate(input_features=sound, max_new_tokens=12, do_sample=False))


@torch.inference_mode()
def test_images() -> None:
    config = hf.ViTConfig(**{key: SIZES[key] for key in list(SIZES)[:4]}, image_size=32, patch_size=8)
    model, images = tiny.from_config(hf.ViTModel, config), torch.randn(2, 3, 32, 32)
    assert_as_eager("vit", model, lambda: model(pixel_values=images.to(model.dtype)).last_hidden_state)


def assert_as_eager(name: str, model: PreTrainedModel, run: Callable[[], Tensor]) -> None:
    plugin.use(model)
    found = run()
    model.set_attn_implementation("eager")
    plain, true = run(), None
    model.double()
    true = run()
    model.float()
    assert_within(name, found, true, plain)


def assert_same_tokens(model: PreTrainedModel, run: Callable[..., Any]) -> None:
    for how in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        model.set_attn_implementation("eager")
        expected = run(**how)
        plugin.use(model)
        assert torch.equal(run(**how), expected), how
