"""vLLM's question "what can you do?", answered by `octavo.backend.Backend`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec as LayerSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from octavo import backend as core
from octavo.plugins.vllm.impl import Impl
from octavo.plugins.vllm.kv_dtypes import KV_DTYPES
from octavo.plugins.vllm.metadata import MetadataBuilder
from octavo.plugins.vllm.settings import NAMES, current
from octavo.spec import AttentionSpec

WHY_NOT = {
    "DCP": "context-parallel decode is planned, the plug-in does not wire it yet: "
    "leave --decode-context-parallel-size at 1",
    "batch invariance": "the plug-in does not wire Octavo's mode for it yet: unset VLLM_BATCH_INVARIANT",
    "block_size": "pages must hold a multiple of 16 tokens: choose such a --block-size",
    "kv_cache_dtype": "Octavo's docs/vllm.md lists the formats",
    "MLA": "latent attention stores no K and V: leave out --attention-backend CUSTOM",
    "sparse": "Octavo attends to every visible key: leave out --attention-backend CUSTOM",
    "partial multimodal": "spans that see both ways inside a causal prompt are not supported",
    "compute capability": "Octavo's GPU kernels need 8.0 or newer",
    "dtype": "use float16, bfloat16 or float32",
}
"""Beginning of a reason in vLLM's words to what a user can do about it."""


class Backend(AttentionBackend):
    """Octavo under the name CUSTOM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(core.Backend.dtypes)
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        *NAMES,
        *KV_DTYPES,
    ]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up among the names that it knows

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        return [MultipleOf(core.Backend.preferred_block_size)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A page is one run of bytes in each of these.
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def customize_spec(cls, spec: LayerSpec) -> LayerSpec:
        """Octavo's page record as vLLM describes pages: one head slot whose content is all of a token's bytes.

        The planes of a record do not divide by head, so vLLM must not think that they do.
        """
        if spec.state_content_bytes is not None:
            return spec
        heads = AttentionSpec(spec.num_kv_heads, spec.num_kv_heads, spec.head_size, spec.head_size_v)
        settings = current()
        kv_format = settings.format_of_spec(spec).name
        page = core.Backend.page_layout(heads, settings.model_dtype, kv_format, core.Backend.preferred_block_size)
        return dataclasses.replace(spec, dtype=torch.uint8, num_head_slots=1, state_content_bytes=page.token_bytes)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in core.Backend.kinds

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return current_platform.is_cpu() or capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_combination(cls, head_size: int, dtype: torch.dtype, *args: Any, **kwargs: Any) -> str | None:
        """What the core says; kernels that are not installed, head sizes."""
        try:
            spec = AttentionSpec(1, 1, head_size)
        except ValueError as error:
            return str(error)
        device = torch.device(current_platform.device_type)
        return core.Backend.supports(spec=spec, dtype=dtype, device=device)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against a configuration, each with the way out."""
        reasons = super().validate_configuration(*args, **kwargs)
        return [f"{reason} ({_way_out(reason)})" if _way_out(reason) else reason for reason in reasons]


def _way_out(reason: str) -> str | None:
    return next((way for start, way in WHY_NOT.items() if reason.startswith(start)), None)
