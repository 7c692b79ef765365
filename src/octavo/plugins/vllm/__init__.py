"""Octavo as vLLM's attention backend; docs/vllm.md says how to use it.

vLLM calls `register` and `platform` in each of its processes (entry points in pyproject.toml). Neither changes what
vLLM does until a user selects the backend CUSTOM.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.plugins.vllm.backend import Backend as Backend

OLDEST, NEWEST = (0, 31), (0, 33)
"""Versions of vLLM, as (major, minor), between which the plug-in is tested."""


def register() -> None:
    """Make Octavo the backend CUSTOM, by name: nothing more is imported until it is selected."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")
    from octavo.plugins.vllm.kv_dtypes import register_kv_dtypes

    register_kv_dtypes()


def platform() -> str | None:
    """vLLM's CPU platform, taught to honour a selected backend; None where vLLM runs on something else."""
    from vllm.platforms import cpu_platform_plugin

    return None if cpu_platform_plugin() is None else f"{__name__}.cpu.CpuPlatform"


def wrong_version(version: str) -> str | None:
    """Why the plug-in does not work with a version of vLLM; None: it does, or it is newer than all that are known."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST:
        return None
    oldest, newest = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
    return (
        f"Octavo's plug-in needs vLLM {oldest} or newer (tested up to {newest}), this is {version}: pages of a "
        f"backend's own came with that interface; upgrade vLLM, or leave out --attention-backend CUSTOM"
    )


def __getattr__(name: str) -> object:
    # vLLM looks the registered name up when the backend is selected: the time to refuse.
    if name == "Backend":
        import vllm

        reason = wrong_version(vllm.__version__)
        if reason is not None:
            raise ImportError(reason)
        from octavo.plugins.vllm.backend import Backend

        return Backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
