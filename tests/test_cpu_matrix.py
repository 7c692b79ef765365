"""Prefill on matrix units: on those of this machine, if there are any, and on stand-ins everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.kernels.cpu import compiled
from octavo.kernels.cpu.simd_matrix import CONFIG_BYTES, describe_tiles, has_matrix_units, release_tiles, set_tiles
from octavo.spec import AttentionSpec

STAND_INS = """
import torch
import matrix_units
matrix_units.stand_in()
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.kernels.cpu import jobs
from octavo.spec import AttentionSpec
from tolerance import assert_attention
torch.set_num_threads(1)
for spec, name, lens in (
    (AttentionSpec(6, 2, 72, value_dim=40, window_left=33, sinks=True), "auto", ((1, 30, 65), (150, 31, 200))),
    (AttentionSpec(2, 1, 8, value_dim=88, logits_soft_cap=20.0, alibi="sqrt"), "auto", ((40,), (240,))),
    (AttentionSpec(3, 1, 32, softmax_scale=-0.3, causal=False, window_right=9), "auto", ((30,), (30,))),
    (AttentionSpec(6, 2, 40, value_dim=16, alibi="linear"), "int8_per_token", ((30, 9), (31, 90))),
):
    problem = build(Case("tiles", spec, *lens, kv_format=name, dtype=torch.bfloat16), poison=float("nan"))
    assert_attention(problem, *attend(problem, make_plan(problem)))
for largest in (23 * 2.0**27, 29 * 2.0**27, 31 * 2.0**29, 19 * 2.0**31):  # times log2(e), rounded up by 128 and more
    spec = AttentionSpec(1, 1, 8, causal=False, softmax_scale=1.0)
    problem = build(Case("huge", spec, (32,), (64,), dtype=torch.bfloat16))
    problem.q.zero_()[..., 0] = 1
    problem.cache.k_cache.zero_()
    problem.cache.k_cache[problem.batch.block_table[0, 0], 0, 0, 0] = largest
    out, lse = attend(problem, make_plan(problem))
    assert bool((lse / largest - 1).abs().max() < 1e-6)
    assert torch.equal(out, problem.values[0][:1].expand_as(out))
problem = build(Case("any NaN", AttentionSpec(1, 1, 8), (40,), (40,), kv_format="int8_per_token", dtype=torch.bfloat16))
problem.cache.v_descale.view(torch.int32)[problem.batch.block_table[0, 0], 0, 3] = -1
out, _ = attend(problem, make_plan(problem))
assert bool(out[3:].isnan().all()) and bool(out[:3].isfinite().all())
assert matrix_units.faults[0] == 0
assert set(jobs._MADE) == {"attend_bfloat16_bfloat16_tiles", "attend_int8_int8_tiles"}
"""


def test_stand_ins(tmp_path: Path) -> None:
    """The kernel with its products in plain terms: masks, biases, sinks, widths, scales of rows, negative scales."""
    tests = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", STAND_INS],
        check=True,
        timeout=300,
        env={
            "PYTHONPATH": f"{tests.parent / 'src'}:{tests}",
            "NUMBA_CACHE_DIR": str(tmp_path),
            "NUMBA_OPT": "0",
            "MALLOC_PERTURB_": "165",  # memory that was given back holds something else
        },
    )


def test_who_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 queries on pages whose numbers are bfloat16 too."""
    float32, float16, bfloat16, int8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
    monkeypatch.setattr(compiled, "has_matrix_units", lambda: True)
    for k in (bfloat16, int8, torch.float8_e4m3fn, torch.float8_e5m2):
        assert compiled.in_tiles(bfloat16, k, bfloat16)
        assert not compiled.in_tiles(float32, k, k)
        assert not compiled.in_tiles(bfloat16, k, float16)
    assert not compiled.in_tiles(bfloat16, float32, bfloat16)
    monkeypatch.setattr(compiled, "has_matrix_units", lambda: False)
    assert not compiled.in_tiles(bfloat16, bfloat16, bfloat16)


@njit
def _set(address):
    set_tiles(address)


@njit
def _describe(address):
    describe_tiles(address)


@njit
def _release():
    release_tiles()


@pytest.mark.skipif(not has_matrix_units(), reason="no matrix units")
def test_tiles_of_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's threads may have shaped their tiles for what comes next; and where nobody had, nobody has."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    problem = build(Case("others", AttentionSpec(4, 2, 16), (20,), (50,)))
    plan = make_plan(problem)
    theirs, found = np.zeros((2, CONFIG_BYTES), np.uint8)
    theirs[[0, 16, 18, 48, 49]] = 1, 64, 32, 16, 7
    for wanted in (theirs, np.zeros(CONFIG_BYTES, np.uint8)):
        if wanted.any():
            _set(np.int64(wanted.ctypes.data))
        attend(problem, plan)
        _describe(np.int64(found.ctypes.data))
        _release()
        assert found.tolist() == wanted.tolist()
