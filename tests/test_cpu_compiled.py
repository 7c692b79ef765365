"""The compiled CPU kernels: vector widths, numbers at the edges, what is kept on disk, and what falls to PyTorch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

import octavo
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.kernels import cpu
from octavo.kernels.cpu import compiled, plain, simd
from octavo.launch import State
from octavo.spec import AttentionSpec
from tolerance import assert_attention, assert_same_bits, assert_within


@njit
def _exp2_all(source, target, count):
    for i in range(0, count, 8):
        simd.store(target + i * 4, simd.exp2(simd.load_f32(source + i * 4)))


@njit
def _tanh_all(source, target, count):
    for i in range(0, count, 8):
        simd.store(target + i * 4, simd.tanh(simd.load_f32(source + i * 4)))


def apply(function: Callable[..., None], x: np.ndarray) -> np.ndarray:
    """A vector operation on [n] float32, n a multiple of eight."""
    y = np.full_like(x, 99)
    function(np.int64(x.ctypes.data), np.int64(y.ctypes.data), len(x))
    return y


def ulps(found: np.ndarray, true: np.ndarray) -> float:
    return float(np.max(np.abs(found - true) / np.spacing(np.abs(true).astype(np.float32))))


def test_exp2() -> None:
    x = np.linspace(-126, 127, 80_000, dtype=np.float32)
    assert ulps(apply(_exp2_all, x), np.exp2(x.astype(np.float64))) < 3
    edges = np.array([0, -0.0, -126, -126.5, -1e30, -np.inf, np.nan, -1], np.float32)
    assert apply(_exp2_all, edges).tolist()[:6] == [1, 1, 2.0**-126, 0, 0, 0]
    assert math.isnan(apply(_exp2_all, edges)[6])


def test_tanh() -> None:
    x = np.concatenate([np.linspace(-12, 12, 40_000), np.logspace(-30, 1, 40_000)]).astype(np.float32)
    assert ulps(apply(_tanh_all, x), np.tanh(x.astype(np.float64))) < 5
    assert np.all(np.abs(apply(_tanh_all, np.array([1e30, -1e30, np.inf, -np.inf] * 2, np.float32))) <= 1)


@njit
def _store_all(source, halves, brains, count):
    for i in range(0, count, 8):
        simd.store_f16(halves + i * 2, simd.load_f32(source + i * 4))
        simd.store_bf16(brains + i * 2, simd.load_f32(source + i * 4))


def test_rounding_to_sixteen_bits_is_torch_s() -> None:
    """Ties, numbers that overflow, infinities; NaN stays NaN."""
    bits = torch.randint(0, 2**31, (1 << 14,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ties = torch.arange(1 << 14, dtype=torch.int32) * 0x8000 + 0x3F000000
    x = torch.cat([bits, -bits, ties, ties + 1, ties - 1]).view(torch.float32)
    halves, brains = (torch.empty(len(x), dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    _store_all(*(np.int64(each.data_ptr()) for each in (x, halves, brains)), len(x))
    for found in (halves, brains):
        assert torch.equal(found.nan_to_num(123.0), x.to(found.dtype).nan_to_num(123.0))


LAYERS = [
    AttentionSpec(6, 2, 72, value_dim=40),
    AttentionSpec(4, 4, 8, value_dim=88, window_left=70, sinks=True),
    AttentionSpec(5, 1, 104, value_dim=24, logits_soft_cap=20.0, alibi="sqrt"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", LAYERS)
def test_widths_that_are_odd_multiples_of_eight(spec: AttentionSpec, dtype: torch.dtype) -> None:
    """The sixteen-wide loops leave a rest of eight in K, in V, or in both."""
    problem = build(Case("odd", spec, (1, 3, 30, 65), (150, 3, 31, 200), dtype=dtype), poison=float("nan"))
    assert_attention(problem, *attend(problem, make_plan(problem)))


WIDE = """
import os
import llvmlite.binding
found = llvmlite.binding.get_host_cpu_features()
os.environ["NUMBA_CPU_FEATURES"] = found.flatten()  # code for this machine, in vectors of two registers
llvmlite.binding.get_host_cpu_features = lambda: type(found)({**found, "avx512f": True})
from octavo.kernels.cpu import simd
assert simd.WIDE == 16
import torch
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.spec import AttentionSpec
from tolerance import assert_attention
torch.set_num_threads(1)
for spec in (AttentionSpec(6, 2, 72, value_dim=40, window_left=33, sinks=True),
             AttentionSpec(4, 1, 64, logits_soft_cap=20.0, alibi="linear")):
    problem = build(Case("wide", spec, (1, 30, 65), (150, 31, 200), dtype=torch.float32), poison=float("nan"))
    assert_attention(problem, *attend(problem, make_plan(problem)))
"""


def test_vectors_of_sixteen(tmp_path: Path) -> None:
    """The kernels of a machine with AVX-512, computed with two registers a vector where this one has none."""
    tests = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", WIDE],
        check=True,
        timeout=300,
        env={"PYTHONPATH": f"{tests.parent / 'src'}:{tests}", "NUMBA_CACHE_DIR": str(tmp_path)},
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize(("which", "bad"), [("v", torch.nan), ("v", torch.inf), ("k", torch.nan)])
def test_a_value_that_is_not_a_number_stays_with_its_rows(
    which: str, bad: float, group: int, window: int | None
) -> None:
    """Rows of a prefill tile share vectors of keys; a bad V (or K) reaches the rows that see it and no others."""
    spec = AttentionSpec(2 * group, 2, 16, window_left=window)
    problem = build(Case("bad", spec, (20,), (90,), 8, dtype=torch.float32))
    plan = make_plan(problem)
    clean, _ = attend(problem, plan)
    pages, position = getattr(problem.cache, f"{which}_cache"), 80
    pages[problem.batch.block_table[0, position // 8].long(), position % 8, 1] = bad  # of the second KV head
    rows = torch.arange(70, 90)
    sees = torch.zeros(20, 2 * group, dtype=torch.bool)
    sees[(rows >= position) & (rows - (window or 90) <= position), group:] = True
    for _ in range(3):
        dirty, _ = attend(problem, plan)
        assert not dirty[sees].isfinite().any()
        assert_within("the other rows", dirty[~sees], clean[~sees].double(), clean[~sees])


def test_kernels_are_kept_on_disk_until_their_sources_change(tmp_path: Path) -> None:
    """Numba watches one file; ours call functions of six."""
    package = Path(octavo.__file__).parent
    shutil.copytree(package, tmp_path / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
from octavo.kernels.cpu import jobs
made = jobs.cfunc("void(int64)", cache=True, **jobs.OPTIONS)(jobs._functions()["append"])
print(made.cache_hits)
"""
    env = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def hits() -> str:
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    assert [hits(), hits()] == ["0\n", "1\n"]
    with (tmp_path / "octavo/kernels/cpu/simd.py").open("a") as source:
        source.write("# changed\n")
    assert hits() == "0\n"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_is_pytorch_s(sinks: bool, dtype: torch.dtype) -> None:
    """Empty parts (whose output may be anything), rows without any key, strides, and rows that must stay."""
    random = torch.Generator().manual_seed(0)
    out = torch.randn(9, 3, 4, 24, generator=random).transpose(0, 1)[..., 8:]  # [3, 9, 4, 16]
    lse = 4 * torch.randn(3, 9, 4, generator=random)
    lse[1, :4] = lse[:, 5, 1] = -torch.inf
    out[1, :4], out[:, 5, 1] = torch.nan, torch.inf
    given = torch.randn(4, generator=random) if sinks else None
    results = []
    for kernels in (compiled, plain):
        result = State(torch.full((1, 9, 4, 16), 7, dtype=dtype), torch.full((1, 9, 4), 7.0))
        kernels.merge(State(out, lse), given, result, 8)
        results.append(result)
    (found, found_lse), (true, true_lse) = results
    assert_within("out", found, true.double(), true)
    assert_within("lse", found_lse, true_lse.double(), true_lse)
    assert bool((found[0, 8] == 7).all())
    assert bool((found_lse[0, 8] == 7).all())


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_append_is_pytorch_s(source: torch.dtype, target: torch.dtype, layout: str) -> None:
    random = torch.Generator().manual_seed(0)
    new = torch.randn(2, 50, 3, 48, generator=random).to(source)
    k, v = new[0, :, :, :16], new[1].transpose(0, 1).contiguous().transpose(0, 1)[..., 16:40]
    slots = torch.randperm(64, generator=random)[:45]
    slots[::7] = -1
    caches = []
    for kernels in (compiled, plain):
        cache = octavo.PagedKVCache(
            num_layers=1,
            num_blocks=8,
            block_size=8,
            num_kv_heads=3,
            head_dim=16,
            value_dim=24,
            dtype=target,
            layout=layout,
        ).layer(0)
        cache.k_cache.fill_(7), cache.v_cache.fill_(7)
        kernels.append(cache, k[:45], v[:45], slots)
        caches.append(cache)
    assert_same_bits("k", caches[0].k_cache, caches[1].k_cache)
    assert_same_bits("v", caches[0].v_cache, caches[1].v_cache)
    assert int((caches[0].k_cache[:, :, 0, 0] != 7).sum()) == int((slots >= 0).sum())


def test_what_the_compiled_kernels_do_not_serve_goes_to_pytorch() -> None:
    """Rows that are not contiguous, widths that are no multiple of eight."""
    cache = octavo.PagedKVCache(
        num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, value_dim=12, dtype=torch.float32
    ).layer(0)
    new, slots = torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 2])
    assert not compiled.can_append(cache, new[..., :8], new)
    cpu.append(cache, new[..., :8], new, slots)
    assert torch.equal(cache.v_cache.flatten(0, 1)[slots], new)
    outs = torch.randn(2, 3, 1, 12, generator=torch.Generator().manual_seed(0))
    merged, _ = octavo.merge_states(outs, torch.zeros(2, 3, 1))
    assert_within("merged", merged, outs.double().mean(0), outs.mean(0))
