"""vLLM's CPU platform serves its own backend whatever a user selects; this one serves the selected one."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.platforms import cpu_platform_plugin
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_Own: Any = resolve_obj_by_qualname(cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform")


class CpuPlatform(_Own):
    """The CPU platform, with `--attention-backend CUSTOM`."""

    _kernels_replaced: ClassVar[bool] = False

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        # Once a process: for a second engine vLLM looks into all modules again and stumbles over llvmlite, which
        # Octavo's kernels have loaded by then ('_lib_fn_wrapper' object has no attribute 'get').
        if not cls._kernels_replaced:
            super().register_triton_kernel_overrides()
        cls._kernels_replaced = True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: AttentionBackendEnum | None, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        facts = attn_selector_config._asdict()
        reasons = selected_backend.get_class().validate_configuration(device_capability=DeviceCapability(0, 0), **facts)
        if reasons:
            raise ValueError(f"Octavo cannot serve this model or configuration: {'; '.join(reasons)}")
        return selected_backend.get_path()
