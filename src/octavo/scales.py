"""Static scales of a model's layers, and the file that keeps them: what calibration writes and the engine reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.formats import KVFormat

KIND = "octavo.kv_scales.1"
"""What the header of a file of scales says it is; the number rises when files change."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A row of K and V of one attention layer."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVModel:
    """The model that scales belong to, or are to be used with.

    Args:
        name: for messages.
        fingerprint: of the sizes that its configuration gives; models that differ in the weights alone share it.
        layers: its attention layers, in the model's order.
    """

    name: str
    fingerprint: str
    layers: tuple[LayerShape, ...]


_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""What of a configuration tells one model from another; the rest changes with the versions of Transformers."""


def fingerprint(config: object) -> str:
    """The fingerprint of a model whose (text) configuration has these attributes, as Transformers names them."""
    facts = json.dumps({name: getattr(config, name, None) for name in _SIZES}, sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where scales come from.

    Args:
        num_tokens: tokens that were seen.
        text_sha256: of the text, as UTF-8.
        percentile: of |V| in each channel that the scale reaches; 100: the largest.
        octavo: version of the library.
    """

    num_tokens: int
    text_sha256: str
    percentile: float
    octavo: str


@dataclass(frozen=True, slots=True)
class KVScales:
    """The static scales of a model's attention layers, in the model's order.

    Args:
        format: name of the format that they are for.
        k: per layer, for fp8 float32 [] or [num_kv_heads]; None: K needs none.
        v: likewise; for int8_kv float32 [num_kv_heads, value_dim].
        k_offset: per layer, for the int8 formats float32 [num_kv_heads, head_dim], subtracted from K before it is
            stored; None: nothing is.
        model: whose they are; None: nobody says.
        provenance: where they come from; None: nobody says.
    """

    format: str
    k: tuple[Tensor, ...] | None
    v: tuple[Tensor, ...] | None
    k_offset: tuple[Tensor, ...] | None = None
    model: KVModel | None = None
    provenance: Provenance | None = None

    def of_layer(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """(k_descale, v_descale) of one layer."""
        return None if self.k is None else self.k[index], None if self.v is None else self.v[index]

    def offset_of_layer(self, index: int) -> Tensor | None:
        """k_offset of one layer."""
        return None if self.k_offset is None else self.k_offset[index]

    def check(self, model: KVModel, format: KVFormat) -> None:
        """Raise ValueError, which names every mismatch, unless these are `model`'s scales for `format`."""
        wrong: list[str] = []
        if self.format != format.name:
            wrong.append(f"the scales are for {self.format!r}, the cache's format is {format.name!r}")
        if self.model is not None:
            wrong += _shape_mismatches(self.model.layers, model.layers)
            if self.model.fingerprint != model.fingerprint:
                wrong.append(
                    f"they were made for another model, {self.model.name}, with configuration "
                    f"{self.model.fingerprint}, {model.name} has {model.fingerprint}"
                )
        if not wrong:
            wrong += self._tensor_mismatches(model, format)
        if wrong:
            raise ValueError(f"the scales do not fit: {'; '.join(wrong)}")

    def _tensor_mismatches(self, model: KVModel, format: KVFormat) -> list[str]:
        wrong: list[str] = []
        by_head = format.is_fp8
        groups = (
            ("k scales", self.k, by_head),
            ("v scales", self.v, by_head or format.v_scaled_by_channel),
            ("k offsets", self.k_offset, format.k_scaled_by_row),
        )
        for name, scales, allowed in groups:
            if scales is None:
                continue
            if not allowed:
                wrong.append(f"{format.name} has no static {name}, these have some")
                continue
            if len(scales) != len(model.layers):
                wrong.append(f"{name} are for {len(scales)} layers, the model has {len(model.layers)}")
                continue
            for i, (scale, layer) in enumerate(zip(scales, model.layers, strict=True)):
                width = layer.head_dim if name.startswith("k") else layer.value_dim
                shapes = [(), (layer.num_kv_heads,)] if by_head else [(layer.num_kv_heads, width)]
                if tuple(scale.shape) not in shapes or scale.dtype != torch.float32:
                    wrong.append(
                        f"layer {i}: {name} must be float32 {' or '.join(map(str, shapes))}, "
                        f"got {scale.dtype} {tuple(scale.shape)}"
                    )
        return wrong

    def save(self, path: Path) -> None:
        """Write one safetensors file, with model and provenance in its header.

        Raises:
            ValueError: model or provenance is unknown, or the file cannot be written.
        """
        from safetensors.torch import save_file

        if self.model is None or self.provenance is None:
            raise ValueError("scales are saved with their model and provenance; these have none")
        tensors = {
            f"layers.{i}.{name}": scale.float().contiguous().cpu()
            for name, scales in (("k_scale", self.k), ("v_scale", self.v), ("k_offset", self.k_offset))
            for i, scale in enumerate(scales or ())
        }
        header = {
            "kind": KIND,
            "format": self.format,
            "model": self.model.name,
            "fingerprint": self.model.fingerprint,
            "layers": json.dumps([asdict(layer) for layer in self.model.layers]),
            **{name: str(value) for name, value in asdict(self.provenance).items()},
        }
        try:
            save_file(tensors, path, metadata=header)
        except Exception as error:  # the library raises its own class for what the system says
            raise ValueError(f"{path} cannot be written: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> KVScales:
        """Read what `save` wrote.

        Raises:
            ValueError: the file cannot be read, or is no file of scales; says what is missing.
        """
        from safetensors import SafetensorError, safe_open

        how = "give a file that `octavo calibrate` wrote"
        if not Path(path).is_file():
            raise ValueError(f"no scales at {path}: there is no such file; {how}")
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no safetensors file ({error}); {how}") from error
        if header.get("kind") != KIND:
            raise ValueError(f"{path} holds no scales of this version ({KIND}) but {header.get('kind')!r}; {how}")
        try:
            layers = tuple(LayerShape(**layer) for layer in json.loads(header["layers"]))
            facts = {field.name: header[field.name] for field in fields(Provenance)}
            provenance = Provenance(
                int(facts["num_tokens"]), facts["text_sha256"], float(facts["percentile"]), facts["octavo"]
            )
            model = KVModel(header["model"], header["fingerprint"], layers)
            k, v, k_offset = (_of_layers(tensors, name, len(layers)) for name in ("k_scale", "v_scale", "k_offset"))
            return cls(header["format"], k, v, k_offset, model, provenance)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: its header or scales lack or spoil {error}; {how}") from error


def _of_layers(tensors: Mapping[str, Tensor], name: str, num_layers: int) -> tuple[Tensor, ...] | None:
    """The tensors of that name of all layers; None: no layer has one."""
    if not any(key.endswith(f".{name}") for key in tensors):
        return None
    return tuple(tensors[f"layers.{i}.{name}"] for i in range(num_layers))


def _shape_mismatches(made: Sequence[LayerShape], used: Sequence[LayerShape]) -> list[str]:
    """In words, what differs; the same difference of several layers is said once."""
    wrong = []
    if len(made) != len(used):
        wrong.append(f"they are for {len(made)} layers, the model has {len(used)}")
    differences: dict[tuple[str, Any, Any], list[int]] = {}
    for i, pair in enumerate(zip(made, used, strict=False)):
        for field in fields(LayerShape):
            ours, theirs = (getattr(layer, field.name) for layer in pair)
            if ours != theirs:
                differences.setdefault((field.name, ours, theirs), []).append(i)
    for (name, ours, theirs), layers in differences.items():
        where = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers from {layers[0]} on"
        wrong.append(f"they are for {name} {ours} in {where}, the model has {theirs}")
    return wrong
