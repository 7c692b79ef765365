"""Octavo's 8-bit formats as values of vLLM's `--kv-cache-dtype`, from vLLM 0.33 on."""

from __future__ import annotations

import torch

KV_DTYPES = ("int8_kv", "int8_k", "int8_per_token")


def register_kv_dtypes() -> bool:
    """Register the formats by name; False: this vLLM knows a closed list of names."""
    try:
        from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype
    except ImportError:
        return False
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        def torch_dtype(self) -> torch.dtype:
            return torch.int8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.CUSTOM

    for name in KV_DTYPES:
        if get_kv_cache_dtype_handler(name) is None:
            register_kv_cache_dtype(name)(type(f"Handler_{name}", (Handler,), {"name": name}))
    return True
