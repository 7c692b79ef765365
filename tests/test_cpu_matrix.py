"""Prefill on matrix units and with dot products: on those of this machine, and on stand-ins everywhere."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from apart import run_apart
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.kernels.cpu import compiled, prefill_matrix_products
from octavo.kernels.cpu.simd_matrix import CONFIG_BYTES, describe_tiles, has_matrix_units, release_tiles, set_tiles
from octavo.spec import AttentionSpec

STAND_INS = """
import sys
import torch
import matrix_units
units = sys.argv[1]
matrix_units.stand_in(units)
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, build
from octavo.kernels.cpu import compiled, jobs
from octavo.kernels.cpu.jobs import has_dot_products
from octavo.spec import AttentionSpec
from tolerance import assert_attention
torch.set_num_threads(1)
class Counting:
    def __init__(self, workers):
        self.workers, self.least_bytes, self.runs = workers, workers.least_bytes, 0
    def run(self, *job):
        self.runs += 1
        self.workers.run(*job)
counting = compiled._WORKERS = Counting(compiled._WORKERS)
float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
numbers, lens = AttentionSpec(6, 2, 40, value_dim=16, alibi="linear"), ((30, 9), (31, 90))
window = AttentionSpec(6, 2, 72, value_dim=40, window_left=33, sinks=True), "auto"
cases = [
    (*window, bfloat16, ((1, 30, 65), (150, 31, 200))),
    (AttentionSpec(5, 1, 24, value_dim=104, logits_soft_cap=20.0), "auto", bfloat16, ((3, 1, 40), (45, 1, 240))),
    (AttentionSpec(2, 1, 8, value_dim=88, logits_soft_cap=20.0, alibi="sqrt"), "auto", bfloat16, ((40,), (240,))),
    (AttentionSpec(3, 1, 32, softmax_scale=-0.3, causal=False, window_right=9), "auto", bfloat16, ((30,), (30,))),
]
dtypes = {"bfloat16": "_by_dots" if units == "dots" or has_dot_products() else ""}
if units == "tiles":
    cases += [
        (numbers, "int8_per_token", bfloat16, lens),
        (*window, float32, ((1, 30, 65), (150, 31, 200))),
        (AttentionSpec(3, 1, 64, softmax_scale=-0.3, logits_soft_cap=20.0), "auto", float32, ((40,), (240,))),
        (AttentionSpec(4, 1, 256, window_left=3), "auto", float32, ((100,), (160,))),  # needs small products first
        (*window, float16, ((65,), (200,))),
        (numbers, "int8_per_token", float32, lens),
        (numbers, "int8_per_token", float16, lens),
    ]
    dtypes |= dict.fromkeys(("float32", "float16", "int8"), "")
for spec, name, dtype, lens in cases:
    problem = build(Case("squares", spec, *lens, kv_format=name, dtype=dtype), poison=float("nan"))
    counting.runs = 0
    assert_attention(problem, *attend(problem, make_plan(problem)))
    assert counting.runs == 1, "outputs that were not finite hide what the products gave"
for largest in (23 * 2.0**27, 29 * 2.0**27, 31 * 2.0**29, 19 * 2.0**31):  # times log2(e), rounded up by 128 and more
    spec = AttentionSpec(1, 1, 8, causal=False, softmax_scale=1.0)
    problem = build(Case("huge", spec, (32,), (64,), dtype=bfloat16))
    problem.q.zero_()[..., 0] = 1
    problem.cache.k_cache.zero_()
    problem.cache.k_cache[problem.batch.block_table[0, 0], 0, 0, 0] = largest
    out, lse = attend(problem, make_plan(problem))
    assert bool((lse / largest - 1).abs().max() < 1e-6)
    assert torch.equal(out, problem.values[0][:1].expand_as(out))
if units == "tiles":
    spec = AttentionSpec(1, 1, 8)
    problem = build(Case("any NaN", spec, (40,), (40,), kv_format="int8_per_token", dtype=bfloat16))
    problem.cache.v_descale.view(torch.int32)[problem.batch.block_table[0, 0], 0, 3] = -1
    out, _ = attend(problem, make_plan(problem))
    assert bool(out[3:].isnan().all()) and bool(out[:3].isfinite().all())
    # Of an infinity nothing is left to split, and numbers near float32's largest are split as all are.
    problem = build(Case("infinite", AttentionSpec(2, 1, 32), (40,), (40,), dtype=float32))
    block = problem.batch.block_table[0, 0]
    for pages, rows in ((problem.cache.k_cache, problem.keys), (problem.cache.v_cache, problem.values)):
        for row, number in ((5, 3e38), (9, -3.4e38)):
            pages[block, row, 0, 7] = rows[0][row, 0, 7] = number
    problem.q[..., 7] = 1e-38
    assert_attention(problem, *attend(problem, make_plan(problem)))
    problem.cache.v_cache[block, 3, 0, 1] = float("inf")
    out, _ = attend(problem, make_plan(problem))
    assert bool((out[3:, :, 1] == torch.inf).all()) and bool(out[:3].isfinite().all())
    assert bool(out[3:, :, 2].isfinite().all())
    problem.q[..., 7] = -1
    problem.cache.k_cache[block, 3, 0, 7] = float("inf")  # a score of -inf: the key has no weight
    out, lse = attend(problem, make_plan(problem))
    assert bool(lse.isfinite().all())
assert matrix_units.faults[0] == 0
wanted = {"attend", f"prefill_in_{units}"} | ({"prefill_in_tiles_in_parts"} if units == "tiles" else set())
for of, by_dots in dtypes.items():
    wanted |= {f"load_{what}_of_{of}_as_squares" for what in ("keys", "values")}
    if of != "float16":  # which no sequence is decoded in
        wanted.add(f"decode_of_{of}{by_dots}_and_{of}{by_dots}")
assert set(jobs._MADE) == wanted, set(jobs._MADE) ^ wanted
"""


@pytest.mark.parametrize("units", ["tiles", "dots"])
def test_stand_ins(units: str, tmp_path: Path) -> None:
    """The kernel with its products in plain terms: masks, biases, sinks, widths, scales of rows, numbers in parts."""
    run_apart(STAND_INS, tmp_path, units, MALLOC_PERTURB_="165")  # memory that was given back holds something else


def test_who_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix units all; dot products bfloat16 queries on pages whose numbers are bfloat16 too."""
    float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
    all_pages = (float32, float16, bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    for units in ("tiles", "dots", ""):
        monkeypatch.setattr(prefill_matrix_products, "UNITS", units)
        for q, k, v in product((float32, float16, bfloat16), all_pages, all_pages):
            whole = q == bfloat16 and not {k, v} & {float32, float16}
            assert compiled.on_units(q, k, v) == (units == "tiles" or (units == "dots" and whole))


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
