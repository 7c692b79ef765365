"""Tiny random models of many families, made from their configurations: no downloads, all of Transformers' code."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 200
EOS = 199

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
_WINDOW = {"sliding_window": 8}
_MOE = {"num_experts_per_tok": 2}
_MLA = {
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    **_MOE,
}

# Family (the prefix of its classes) to what its configuration says beyond _COMMON.
SERVED: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": _WINDOW,
    "Mixtral": _WINDOW,
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, **_MOE},
    "Gemma": {},
    "Gemma2": {"query_pre_attn_scalar": 32, **_WINDOW},
    "Gemma3": {"query_pre_attn_scalar": 32, **_WINDOW},
    "GptOss": {"num_local_experts": 4, **_WINDOW, **_MOE},
    "Phi3": {},
    "Cohere2": _WINDOW,
    "Granite": {},
    "Olmo2": {},
    "Olmo3": _WINDOW,
    "SmolLM3": {},
    "Starcoder2": {},
    "StableLm": {},
    "GPTNeoX": {},
    "DeepseekV3": _MLA,
}
_CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


def make(family: str, **changes: Any) -> PreTrainedModel:
    """A random model in float32, the same at every call."""
    config_class = getattr(transformers, _CONFIG_NAMES.get(family, f"{family}Config"))
    config = config_class(**{**_COMMON, **SERVED.get(family, {}), **changes})
    return from_config(getattr(transformers, f"{family}ForCausalLM"), config)


def from_config(model_class: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.sinks)
    return model


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts without special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(2, EOS - 1) for _ in range(n)] for n in lengths]


def stock_tokens(model: PreTrainedModel, batch: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """What Transformers' own greedy `generate` gives, one prompt at a time."""
    generated = []
    for prompt in batch:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        generated.append(out[0, len(prompt) :].tolist())
    return generated


REFUSED: Mapping[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "Bloom": (
        lambda: from_config(
            transformers.BloomForCausalLM,
            transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4),
        ),
        "does not let its attention be replaced",
    ),
    "Falcon": (
        lambda: from_config(
            transformers.FalconForCausalLM,
            transformers.FalconConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        ),
        "does not let its attention be replaced",
    ),
    "Llama4": (
        lambda: make("Llama4", attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=64),
        "mask is no causal window: query 8 does not see key 0",
    ),
    "Mamba": (
        lambda: from_config(
            transformers.MambaForCausalLM,
            transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2),
        ),
        "does not call Transformers' attention interface",
    ),
    "Jamba": (
        lambda: make(
            "Jamba",
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            use_mamba_kernels=False,
        ),
        "keep a state of their own",
    ),
    "Bert": (
        lambda: from_config(
            transformers.BertLMHeadModel,
            transformers.BertConfig(
                vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
            ),
        ),
        "attends to later tokens",
    ),
    "T5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCAB, d_model=32, d_ff=32, d_kv=8, num_layers=2, num_heads=4)
        ),
        "encoder-decoder",
    ),
    "dynamic rope": (
        lambda: make(
            "Llama",
            rope_parameters={
                "rope_type": "dynamic",
                "factor": 2.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            },
        ),
        "set max_model_len to at most 128",
    ),
}
"""Models that the probe refuses: how to make one, and what the refusal says."""
