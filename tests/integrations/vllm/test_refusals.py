"""What Octavo cannot serve inside vLLM is refused before a token is made, with the reason and the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import OCTAVO, engine

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "pages of 8 tokens": ({"block_size": 8}, "block_size not supported.*multiple of 16"),
    "a format of nobody's": ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported.*docs/vllm.md"),
    "an unknown option": (
        {"additional_config": {"octavo": {"format": "int8_k"}}},
        r"unknown \['format'\]; known options: kv_format, kv_scales",
    ),
    "an unknown format": (
        {"additional_config": {"octavo": {"kv_format": "int7"}}},
        "unknown cache format 'int7'; known formats: auto",
    ),
    "two formats": (
        {"kv_cache_dtype": "fp8", "additional_config": {"octavo": {"kv_format": "int8_k"}}},
        "name two formats: give one of them",
    ),
    "calibrated scales that are not there": (
        {"additional_config": {"octavo": {"kv_format": "int8_kv"}}},
        "octavo calibrate .* or use int8_per_token",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_way_out(name: str, smollm2: Path) -> None:
    options, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message), engine(smollm2, **options, **OCTAVO):
        pytest.fail("the engine started")


def test_the_batch_invariant_mode_is_refused(smollm2: Path) -> None:
    """In a process of its own: in this one vLLM would keep its invariant operators for all tests to come."""
    start = f"from vllm import LLM; LLM({str(smollm2)!r}, dtype='float32', attention_backend='CUSTOM')"
    environment = os.environ | {"VLLM_BATCH_INVARIANT": "1"}
    done = subprocess.run([sys.executable, "-c", start], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "does not wire Octavo's mode for it yet: unset VLLM_BATCH_INVARIANT" in done.stdout + done.stderr


def test_nothing_changes_without_being_asked(smollm2: Path) -> None:
    with engine(smollm2) as llm:
        config = llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        assert {type(layer.impl).__module__.partition(".")[0] for layer in layers} == {"vllm"}


def test_an_old_vllm_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from octavo.plugins import vllm as plugin

    monkeypatch.setattr(vllm, "__version__", "0.28.1")
    with pytest.raises(ImportError, match=r"needs vLLM 0\.31 or newer .* this is 0\.28\.1.*upgrade vLLM"):
        plugin.Backend  # noqa: B018  looking it up is what vLLM does
