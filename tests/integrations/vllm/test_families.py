"""Tiny random models with what SmolLM2 and Gemma 3 lack: tokens through vLLM with Octavo are those of Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from engine import tiny
from octavo.batch import AttentionBatch
from octavo.launch import Plan

from .conftest import OCTAVO, SENTENCE, SHORT, engine, generate

PROMPTS = tiny.prompts((5, 13, 1, 20, 64))
MAX_TOKENS = 12


def bloom() -> PreTrainedModel:
    config = transformers.BloomConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=tiny.EOS,
    )
    return tiny.from_config(transformers.BloomForCausalLM, config)


def gemma3n() -> PreTrainedModel:
    """Its last two layers read the pages of layers before."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=tiny.VOCAB,
        vocab_size_per_layer_input=tiny.VOCAB,
        hidden_size=64,
        hidden_size_per_layer_input=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        laurel_rank=8,
        altup_num_inputs=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=tiny.EOS,
        activation_sparsity_pattern=[0.0] * 6,
    )
    return tiny.from_config(transformers.Gemma3nForCausalLM, config)


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "soft cap": (lambda: tiny.make("Gemma2"), "logits_soft_cap=50.0"),
    "sinks": (lambda: tiny.make("GptOss"), "sinks=True"),
    "ALiBi": (bloom, "alibi='linear'"),
    "shared pages": (gemma3n, "window_left=7"),
}
"""What a family is here for: its model, and what Octavo must have understood of the first layer."""


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from vllm import SamplingParams

    make, understood = FAMILIES[name]
    model = make()
    model.save_pretrained(tmp_path)
    expected = tiny.stock_tokens(model, PROMPTS, MAX_TOKENS)
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that always says the same proves nothing"
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with engine(tmp_path, skip_tokenizer_init=True, max_model_len=256, **OCTAVO) as llm:
        results = llm.generate(prompts, greedy, use_tqdm=False)
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if hasattr(layer, "impl")]  # others are experts
    assert {type(layer.impl).__module__ for layer in layers} == {"octavo.plugins.vllm.impl"}
    assert understood in str(layers[0].impl.bind(layers[0]).spec)
    assert any(layer.impl.bind(layer).shares_kv for layer in layers) == (name == "shared pages")
    assert [list(result.outputs[0].token_ids) for result in results] == expected


def test_cross_attention(tmp_path: Path) -> None:
    """Whisper: its decoder attends to what the encoder left in pages."""
    from vllm import SamplingParams

    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    vocab = {letter: i for i, letter in enumerate([*sorted(ByteLevel.alphabet()), special[0]])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.WhisperTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    end, begin, *_ = tokenizer.convert_tokens_to_ids(special)
    features = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    transformers.WhisperProcessor(features, tokenizer).save_pretrained(tmp_path)
    config = transformers.WhisperConfig(
        vocab_size=280,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        init_std=0.3,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=begin,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = tiny.from_config(transformers.WhisperForConditionalGeneration, config)
    model.save_pretrained(tmp_path)

    draw = np.random.default_rng(0)
    sounds = [0.3 * draw.standard_normal(16_000).astype("float32") for _ in range(3)]
    starts = [[begin, begin + 1, begin + 3], [begin], [begin, begin + 1, begin + 3, 5, 9, 44]]
    expected = [transcribe(model, features, *both) for both in zip(sounds, starts, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) > 1
    prompts = [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, 16_000)}},
            "decoder_prompt": {"prompt_token_ids": start},
        }
        for sound, start in zip(sounds, starts, strict=True)
    ]
    with engine(tmp_path, max_model_len=64, limit_mm_per_prompt={"audio": 1}, **OCTAVO) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        kinds = {layer.impl.bind(layer).kind for layer in layers.values()}
    assert kinds == {"decoder", "encoder_decoder"}
    assert [list(result.outputs[0].token_ids) for result in results] == expected


@torch.inference_mode()
def transcribe(
    model: PreTrainedModel, features: transformers.WhisperFeatureExtractor, sound: np.ndarray, start: list[int]
) -> list[int]:
    """Greedy tokens after `start`, each from the whole sequence."""
    heard = features(sound, sampling_rate=16_000, return_tensors="pt").input_features
    tokens = list(start)
    for _ in range(MAX_TOKENS):
        logits = model(input_features=heard, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokens[len(start) :]


def test_drafts_do_not_change_tokens(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculative decode: drafts from the prompt, several new tokens a request and step."""
    from octavo.backend import MetadataBuilder

    prompts = [*SHORT, SENTENCE * 6]
    own = generate(smollm2, prompts)
    new_tokens: list[int] = []
    build = MetadataBuilder.build

    def noted(self: MetadataBuilder, common_prefix_len: int, metadata: AttentionBatch) -> Plan:
        new_tokens.append(metadata.max_query_len)
        return build(self, common_prefix_len, metadata)

    monkeypatch.setattr(MetadataBuilder, "build", noted)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    ours = generate(smollm2, prompts, speculative_config=drafts, **OCTAVO)
    assert ours.tokens == own.tokens
    assert new_tokens.count(4) > 3, "hardly any step had a request with three drafts"
