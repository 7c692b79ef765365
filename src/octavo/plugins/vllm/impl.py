"""A layer of vLLM's as a layer of Octavo's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionImpl

from octavo import backend as core
from octavo.cache import LayerCache
from octavo.errors import Unsupported
from octavo.launch import Plan
from octavo.plugins.vllm.settings import Settings, StaticScales, remember, static_scales
from octavo.rotation import hadamard
from octavo.spec import AttentionSpec


class Impl(AttentionImpl[Plan]):
    """Holds what vLLM says of a layer until the layer is there, then an `octavo.backend.Impl`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: core.AttentionKind = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        **others: Any,
    ) -> None:
        given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
        if given:
            raise Unsupported(
                f"Octavo does not know what a layer means by {', '.join(given)}: leave out --attention-backend CUSTOM"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.use_alibi_sqrt, self.sinks = alibi_slopes, use_alibi_sqrt, sinks
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.kv_cache_dtype, self.kind = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._config = get_current_vllm_config()
        settings = Settings.of(self._config)
        remember(settings)
        self._format = settings.format_of(kv_cache_dtype)
        self._core: core.Impl | None = None
        self._scales = StaticScales()
        self._pages: tuple[Tensor, LayerCache] | None = None

    def do_kv_cache_update(
        self, layer: Attention, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.kind not in ("encoder", "encoder_only"):
            self.bind(layer).append(key, value, self.pages(layer, kv_cache), slot_mapping)

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Plan | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("Octavo writes 16- or 32-bit output: switch the fusion of output quantisation off")
        has_pages = attn_metadata is not None and self.kind not in ("encoder", "encoder_only")
        cache = self.pages(layer, kv_cache) if has_pages else None
        self.bind(layer).forward(query, key, value, cache, attn_metadata, output)
        return output

    def bind(self, layer: Attention) -> core.Impl:
        """The layer as Octavo's, made when all that vLLM knows of it is there, weights and scales included."""
        if self._core is None:
            device, model_dtype = layer._k_scale.device, self._config.model_config.dtype
            left, right = core.window_radii(self.sliding_window, self.kind)
            slopes = self.alibi_slopes
            spec = AttentionSpec(
                num_q_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                value_dim=layer.head_size_v,
                softmax_scale=self.scale,
                causal=self.kind == "decoder",
                window_left=left,
                window_right=right,
                logits_soft_cap=self.logits_soft_cap or None,
                alibi=None if slopes is None else "sqrt" if self.use_alibi_sqrt else "linear",
                sinks=self.sinks is not None,
            )
            self._scales = static_scales(
                self._config, self.kv_sharing_target_layer_name or layer.layer_name, self._format
            )
            self._core = core.Impl(
                spec,
                kind=self.kind,
                alibi_slopes=None if slopes is None else torch.tensor(slopes, device=device),
                sinks=self.sinks,
                shares_kv=self.kv_sharing_target_layer_name is not None,
                k_offset=self._scales.k_offset,
                rotation=hadamard(spec.head_dim, model_dtype, device) if self._format.k_scaled_by_row else None,
            )
        return self._core

    def pages(self, layer: Attention, kv_cache: Tensor) -> LayerCache:
        """The layer's views of kv_cache, which is uint8 [num_blocks, 1, block_size, bytes of a token]."""
        if self._pages is None or self._pages[0] is not kv_cache:
            spec, model_dtype = self.bind(layer).spec, self._config.model_config.dtype
            page = core.Backend.page_layout(spec, model_dtype, self._format.name, kv_cache.shape[2])
            k_descale, v_descale = self._scales.k_descale, self._scales.v_descale
            if self._format.is_fp8 and k_descale is None:
                k_descale, v_descale = layer._k_scale, layer._v_scale
            self._pages = kv_cache, page.views(kv_cache.flatten(1), k_descale=k_descale, v_descale=v_descale)
        return self._pages[1]
