"""Tiny random models as GGUF files: what llama.cpp's converter writes for a Transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2
THETA, WINDOW = 5_000.0, 8

_SPELLING = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
_SPELLING |= {byte: chr(256 + index) for index, byte in enumerate(b for b in range(256) if b not in _SPELLING)}

BYTE_LEVEL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *_SPELLING.values(),
    "he",
    "ll",
    "hell",
    "Ġ1",
]
BYTE_LEVEL_MERGES = ["h e", "l l", "he ll", "Ġ 1"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_LETTERS = [*"helowrd▁"]
LLAMA_TOKENS = ["<unk>", "<s>", "</s>", *_BYTES, "he", "ll", "llo", "hello", "▁hello", "el", *_LETTERS]
LLAMA_SCORES = [0.0] * (3 + 256) + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0] + [-9.0] * len(_LETTERS)
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *_BYTES, "  ", "he", "ll", "llo", "hello", *_LETTERS]


def random_model(family: str, **changes: object) -> PreTrainedModel:
    """A float32 model of `family` with norm weights that survive + 1 - 1 exactly."""
    vocab = {"llama": LLAMA_TOKENS, "gemma2": GEMMA_TOKENS, "gemma3": GEMMA_TOKENS}.get(family, BYTE_LEVEL_TOKENS)
    settings: dict[str, object] = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": len(vocab), "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }  # fmt: skip
    if family.startswith("gemma"):
        settings |= {"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM, "num_hidden_layers": 7}
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        settings["rope_parameters"] = {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": local,
        }
    kind = {"gemma2": "Gemma2", "gemma3": "Gemma3Text", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{kind}Config")(**settings | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(torch.randint(-32, 32, weight.shape) / 64 + (0 if "gemma" in family else 1))
            elif name.endswith("bias"):
                weight.normal_()
    return model.eval()


def write_model(
    path: Path,
    model: PreTrainedModel,
    family: str,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Write `model` as the GGUF file `path`; `edit` may add to it, `keep` says which tensors go in."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(THETA)
    if family.startswith("gemma"):
        writer.add_sliding_window(WINDOW)
    add_tokenizer(writer, family)
    if edit is not None:
        edit(writer)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor_name, values = _exported(name, weight.numpy(), family)
        if keep(tensor_name):
            writer.add_tensor(tensor_name, values)
    finish(writer)
    return path


def add_tokenizer(writer: gguf.GGUFWriter, family: str) -> None:
    if family == "llama" or family.startswith("gemma"):
        gemma = family != "llama"
        tokens = GEMMA_TOKENS if gemma else LLAMA_TOKENS
        specials = 4 if gemma else 3
        types = [3] * specials + [6] * 256 + [4 if text == "  " else 1 for text in tokens[specials + 256 :]]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens) if gemma else LLAMA_SCORES)
        writer.add_token_types(types)
        ids = {name: tokens.index(name) for name in tokens[:specials]}
        writer.add_bos_token_id(ids["<bos>" if gemma else "<s>"])
        writer.add_eos_token_id(ids["<eos>" if gemma else "</s>"])
        writer.add_unk_token_id(ids["<unk>"])
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(BYTE_LEVEL_TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(BYTE_LEVEL_TOKENS) - 3))
    writer.add_token_merges(BYTE_LEVEL_MERGES)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _exported(name: str, values: np.ndarray, family: str) -> tuple[str, np.ndarray]:
    """A parameter's GGUF name, and its values as llama.cpp's converter stores them."""
    names = {
        "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output.",
        "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "post_attention_layernorm": "post_attention_norm" if family.startswith("gemma") else "ffn_norm",
    }  # fmt: skip
    exported = name
    for ours, theirs in names.items():
        exported = exported.replace(ours, theirs)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if family == "llama" and exported.endswith(("attn_q.weight", "attn_k.weight")):
        halves = values.reshape(-1, 2, HEAD_DIM // 2, values.shape[1])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return exported, np.ascontiguousarray(values)
