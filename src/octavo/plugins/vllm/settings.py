"""What a user chose: which format each layer's pages have, and where its static scales are."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.config.vllm import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode, get_kv_quant_mode

from octavo.errors import Unsupported
from octavo.formats import KVFormat, how_to_calibrate
from octavo.scales import KVModel, KVScales, LayerShape, fingerprint

NAMES = {"int8_per_token_head": "int8_per_token"}
"""vLLM's name of a cache format to Octavo's, where they differ."""

OPTIONS = ("kv_format", "kv_scales")
"""What `--additional-config '{"octavo": {...}}'` may hold."""


class Settings(NamedTuple):
    """One engine's choices.

    cache_dtype: vLLM's `--kv-cache-dtype`.
    kv_format: a format of Octavo's, for the layers that vLLM calls "auto"; None: as the model.
    kv_scales: a file of `octavo calibrate`; None: none.
    model_dtype: of the model.
    """

    cache_dtype: str
    kv_format: str | None
    kv_scales: str | None
    model_dtype: torch.dtype

    @classmethod
    def of(cls, config: VllmConfig) -> Settings:
        """Read an engine's configuration.

        Raises:
            ValueError: an option is unknown, or contradicts another.
        """
        extra = config.additional_config if isinstance(config.additional_config, dict) else {}
        options = extra.get("octavo", {})
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"additional_config['octavo'] has unknown {unknown}; known options: {', '.join(OPTIONS)}")
        cache_config = config.cache_config
        settings = cls(
            cache_config.cache_dtype, options.get("kv_format"), options.get("kv_scales"), config.model_config.dtype
        )
        if settings.kv_format is not None:
            if settings.cache_dtype != "auto":
                raise ValueError(
                    f"kv_format={settings.kv_format!r} and --kv-cache-dtype {settings.cache_dtype} name two formats: "
                    f"give one of them"
                )
            if cache_config.kv_cache_dtype_skip_layers:
                raise ValueError(
                    "--kv-cache-dtype-skip-layers needs a format that vLLM knows by name: give it as --kv-cache-dtype "
                    "(Octavo's own from vLLM 0.33 on) and leave kv_format out"
                )
        return settings

    def format_of(self, cache_dtype: str) -> KVFormat:
        """The format of a layer of that `kv_cache_dtype`; "auto" also for layers that vLLM was told to skip."""
        name = NAMES.get(cache_dtype, cache_dtype)
        return KVFormat.parse(self.kv_format or name if name == "auto" else name, self.model_dtype)

    def format_of_spec(self, spec: AttentionSpec) -> KVFormat:
        """The same for a layer's spec, which knows its `kv_cache_dtype` no more, but whether it is quantised."""
        if spec.kv_quant_mode == get_kv_quant_mode(self.cache_dtype) != KVQuantMode.NONE:
            return self.format_of(self.cache_dtype)
        return self.format_of("auto") if self.kv_format is not None else KVFormat.of_dtype(spec.dtype)


_last_loaded: list[Settings] = []
"""vLLM asks for the spec of a layer without telling of which engine, right after it made the engine's layers. If that
is ever another engine's, the pages have the wrong size and the first use of the cache says so."""


def remember(settings: Settings) -> None:
    """These belong to the layers that are being made."""
    _last_loaded[:] = [settings]


def current() -> Settings:
    """The choices of the engine that is being set up."""
    config = get_current_vllm_config_or_none()
    return Settings.of(config) if config is not None and config.model_config is not None else _last_loaded[0]


class StaticScales(NamedTuple):
    """What a layer's pages need beside themselves; see `LayerCache` and `Impl`."""

    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    k_offset: Tensor | None = None


def static_scales(config: VllmConfig, layer_name: str, kv_format: KVFormat) -> StaticScales:
    """One layer's calibrated scales, checked against the model.

    Raises:
        ValueError: there are none and the format needs some, or they belong to another model or format.
        Unsupported: the model is cut over several ranks.
    """
    path = Settings.of(config).kv_scales
    if path is None:
        if kv_format.v_scaled_by_channel:
            raise ValueError(
                f"cache format {kv_format.name} needs the model's scales: "
                f"{how_to_calibrate(config.model_config.model)}; inside vLLM give the file as "
                f'--additional-config \'{{"octavo": {{"kv_scales": "scales.safetensors"}}}}\''
            )
        return StaticScales()
    if config.parallel_config.tensor_parallel_size > 1:
        raise Unsupported("calibrated scales are for whole models, not for tensor parallelism: use int8_per_token")
    layers = get_layers_from_vllm_config(config, Attention)
    shapes = tuple(LayerShape(layer.num_kv_heads, layer.head_size, layer.head_size_v) for layer in layers.values())
    model = KVModel(config.model_config.model, fingerprint(config.model_config.hf_text_config), shapes)
    scales, index, device = _load(path), list(layers).index(layer_name), layers[layer_name]._k_scale.device
    scales.check(model, kv_format)
    of_layer = (*scales.of_layer(index), scales.offset_of_layer(index))
    return StaticScales(*(None if scale is None else scale.to(device) for scale in of_layer))


@cache
def _load(path: str) -> KVScales:
    return KVScales.load(path)
