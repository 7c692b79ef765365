"""What a GGUF file's metadata says about a model, as the `config.json` that Transformers reads.

Five architectures are known: llama (Mistral's files say llama too), qwen2, qwen3, gemma2 and gemma3 (text).
A file that asks for something its Transformers model would not compute is refused: wrong logits are worse
than none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.engine.errors import ModelError
from octavo.engine.gguf import GGUFFile

Config = dict[str, Any]  # what json.dump writes

# Llama 3.1 and later: Meta's published constants; the file stores only the factors that follow from them
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp scales queries by hidden_size / heads instead of head_dim in the 27B models, told by their depth
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA3_LOCAL_THETA = 10_000.0  # the sliding layers' base; a constant of the architecture, not in the file


@dataclass(frozen=True)
class Architecture:
    """How GGUF's architecture `name` becomes a Transformers model.

    `build` gives the fields of config.json that are not common to all. `paired_rotary`: rows of Q and K are
    stored with rotary pairs adjacent, where Transformers has the halves one after the other. `norm_offset`
    is what was added to each norm weight when the file was written.
    """

    name: str
    model_class: str
    build: Callable[[_Facts], Config]
    paired_rotary: bool = False
    norm_offset: float = 0.0


def architecture_of(file: GGUFFile) -> Architecture:
    """The architecture of `file`. Raises ModelError, with the known ones, if it is not among them."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{file.path} holds no language model: its metadata have no 'general.architecture'")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of architecture {name!r}; GGUF files are read for "
            f"{', '.join(sorted(ARCHITECTURES))}. Use the model's Transformers folder or hub name instead"
        )
    return ARCHITECTURES[name]


def model_config(file: GGUFFile, arch: Architecture) -> Config:
    """The content of config.json for `file`.

    `dtype` is the float type of the file's matrices. A quantised file has none, and gets bfloat16: these
    models were trained in it, and its rounding lies far below the quantisation step.

    Raises ModelError if metadata is missing, of the wrong type, or asks for what the Transformers model
    lacks.
    """
    facts = _Facts(file, arch.name)
    heads = facts.integer("attention.head_count")
    hidden = facts.integer("embedding_length")
    head_dim = facts.integer("attention.key_length", default=hidden // max(heads, 1))
    facts.require("attention.value_length", head_dim)
    facts.require("rope.dimension_count", head_dim)
    facts.require("expert_count", 0)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} is incomplete: it has no tensor 'token_embd.weight'")
    common: Config = {
        "architectures": [arch.model_class],
        "dtype": _float_type(file),
        "hidden_size": hidden,
        "intermediate_size": facts.integer("feed_forward_length"),
        "num_hidden_layers": facts.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        # not the number of tokens: some models pad the embedding
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return common | arch.build(facts) | token_ids(file)


def token_ids(file: GGUFFile) -> Config:
    """The ids of the special tokens that the file names: bos_token_id, eos_token_id and pad_token_id."""
    ids: Config = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(value, int):
            ids[f"{ours}_token_id"] = value
    return ids


@dataclass(frozen=True)
class _Facts:
    """Typed access to the metadata under an architecture's prefix."""

    file: GGUFFile
    prefix: str

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some converters write one entry a layer, all the same
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(name, value, "a whole number, the same for all layers")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(name, value, "a number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, value, "a string")
        return value

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.file.metadata

    def require(self, name: str, wanted: int) -> None:
        """Refuse the file if it gives `name` another value than the one our model computes with."""
        if self.has(name) and self.integer(name) != wanted:
            raise self.refuse(name, self.integer(name), f"{wanted} in Transformers' model of {self.prefix!r}")

    def refuse(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(
            f"{self.file.path}: '{self.prefix}.{name}' is {value!r}, and has to be {wanted}. "
            "Use the model's Transformers folder instead"
        )

    def _get(self, name: str, default: object) -> object:
        value = self.file.metadata.get(f"{self.prefix}.{name}", default)
        if value is None:
            raise ModelError(f"{self.file.path} is incomplete: its metadata have no '{self.prefix}.{name}'")
        return value


def _float_type(file: GGUFFile) -> str:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    kinds = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    return names.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _llama(facts: _Facts) -> Config:
    config = {"hidden_act": "silu", "rope_parameters": _rope(facts, default_theta=10_000.0)}
    if facts.has("attention.sliding_window"):  # Mistral 0.1; the same weights, with a window
        window = facts.integer("attention.sliding_window")
        names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        return config | names | {"sliding_window": window}
    return config | {"model_type": "llama", "attention_bias": False, "mlp_bias": False}


def _qwen2(facts: _Facts) -> Config:
    rope = _rope(facts, default_theta=1_000_000.0)
    return {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False, "rope_parameters": rope}


def _qwen3(facts: _Facts) -> Config:
    return _qwen2(facts) | {"model_type": "qwen3", "attention_bias": False}


def _gemma(facts: _Facts, full_every: int) -> Config:
    """What Gemma 2 and 3 share. Every `full_every`-th layer sees everything, the others a window."""
    layers, heads = facts.integer("block_count"), facts.integer("attention.head_count")
    hidden = facts.integer("embedding_length")
    is_27b = layers == _GEMMA_27B_LAYERS[facts.prefix]
    pattern = facts.integer("attention.sliding_window_pattern", default=full_every)
    if not pattern:
        raise facts.refuse("attention.sliding_window_pattern", pattern, "at least 1")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": hidden // heads if is_27b else facts.integer("attention.key_length"),
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)
        ],
    }


def _gemma2(facts: _Facts) -> Config:
    return _gemma(facts, full_every=2) | {
        "model_type": "gemma2",
        "rope_parameters": _rope(facts, default_theta=10_000.0),
        "attn_logit_softcapping": facts.real("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": facts.real("final_logit_softcapping", default=30.0),
    }


def _gemma3(facts: _Facts) -> Config:
    soft_cap = facts.real("final_logit_softcapping", default=0.0)
    return _gemma(facts, full_every=6) | {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": _rope(facts, default_theta=1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": soft_cap or None,
    }


def _rope(facts: _Facts, default_theta: float) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": facts.real("rope.freq_base", default=default_theta)}
    if _ROPE_FACTORS in facts.file.tensors:
        return rope | _llama3_scaling(facts, rope["rope_theta"])
    kind = facts.text("rope.scaling.type", default="none")
    if kind == "none":
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": facts.real("rope.scaling.factor")}
    if kind == "yarn":
        original = facts.integer("rope.scaling.original_context_length")
        factor = facts.real("rope.scaling.factor")
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise facts.refuse("rope.scaling.type", kind, "'none', 'linear' or 'yarn'")


def _llama3_scaling(facts: _Facts, theta: float) -> Config:
    """Find Llama 3's scaling in the factors that the file stores instead of it: one a rotary pair."""
    stored = facts.file.read(_ROPE_FACTORS).astype(np.float64).ravel()
    wavelength = 2 * np.pi * theta ** (np.arange(stored.size) / stored.size)
    factor = float(stored.max())
    # 1 for short wavelengths, `factor` for long ones, and 1 / f interpolated in between
    smooth = np.clip((_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(
            f"{facts.file.path}: the rotary factors in {_ROPE_FACTORS!r} are not those of Llama 3.1 and "
            "later, the only ones known. Use the model's Transformers folder instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("llama", "LlamaForCausalLM", _llama, paired_rotary=True),
        Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
        Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
        Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, norm_offset=1.0),
        Architecture("gemma3", "Gemma3ForCausalLM", _gemma3, norm_offset=1.0),
    )
}
