"""`append` and `merge` compile for every GPU that we name, without spills and within its shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiling import TARGETS, compile_call
from octavo.cache import PagedKVCache
from octavo.launch import State

pytest.importorskip("triton", reason="Triton is not installed")

APPENDS = {
    "bf16": (torch.bfloat16, torch.bfloat16, 8, 128, 128),
    "to half": (torch.float32, torch.float16, 71, 80, 96),
    "from double": (torch.float64, torch.bfloat16, 1, 512, 512),
    "wide": (torch.float16, torch.float32, 2, 192, 128),
}
"""dtypes of the new rows and of the pages, KV heads, head_dim, value_dim."""

EIGHT_BIT_APPENDS = {"sm_80": "fp8_e4m3", "sm_90": "int8_kv", "sm_100": "fp8_e5m2", "gfx942": "int8_per_token"}

MERGES = {
    "bf16": (torch.bfloat16, 128, True),
    "half": (torch.float16, 80, False),
    "float": (torch.float32, 512, True),
}
"""dtype of the result, value_dim, whether there are sinks, padding and an LSE."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("gpu", TARGETS)
@pytest.mark.parametrize("name", APPENDS)
def test_append(name: str, gpu: str) -> None:
    from octavo.kernels.triton.append import append

    new, stored, heads, head_dim, value_dim = APPENDS[name]
    shape = {"num_layers": 1, "num_blocks": 2, "block_size": 16, "num_kv_heads": heads, "head_dim": head_dim}
    cache = PagedKVCache(**shape, value_dim=value_dim, dtype=stored).layer(0)
    k, v = (torch.zeros(3, heads, dim, dtype=new) for dim in (head_dim, value_dim))
    check(gpu, compile_call(gpu, lambda: append(cache, k, v, torch.arange(3))))


@pytest.mark.parametrize("gpu", TARGETS)
def test_append_of_eight_bit_pages(gpu: str) -> None:
    from octavo.kernels.triton.append import append

    name = EIGHT_BIT_APPENDS[gpu]
    pages = PagedKVCache(num_layers=1, num_blocks=2, block_size=16, num_kv_heads=8, head_dim=128, format=name)
    cache = pages.layer(0, v_descale=torch.ones(8, 128) if name == "int8_kv" else None)
    k, v = torch.zeros(2, 3, 8, 128, dtype=torch.bfloat16)
    check(gpu, compile_call(gpu, lambda: append(cache, k, v, torch.arange(3))))


@pytest.mark.parametrize("gpu", TARGETS)
@pytest.mark.parametrize("name", MERGES)
def test_merge(name: str, gpu: str) -> None:
    from octavo.kernels.triton.merge import merge

    dtype, width, full = MERGES[name]
    parts = State(torch.zeros(3, 4, 8, width), torch.zeros(3, 4, 8))
    result = State(torch.zeros(1, 4, 8, width, dtype=dtype), torch.zeros(1, 4, 8) if full else None)
    sinks = torch.zeros(8) if full else None
    starts = torch.zeros(3, dtype=torch.int32) if full else None
    check(gpu, compile_call(gpu, lambda: merge(parts, sinks, result, starts)))


def check(gpu: str, binaries: list[Any]) -> None:
    assert len(binaries) == 1
    for binary in binaries:
        assert binary.spilled == 0, binary
        assert binary.shared <= TARGETS[gpu], binary
