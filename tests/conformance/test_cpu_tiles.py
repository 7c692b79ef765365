"""The PyTorch kernel's tiles and chunks, made small so that small problems cross their edges."""

from __future__ import annotations

import pytest
import torch

import octavo.kernels.cpu
from conformance.backends import Backend
from conformance.common import CASES, CUTS, EIGHT_BIT_CASES
from conformance.harness import Cut, attend, make_plan, solve
from octavo.bench.cases import Case, build
from octavo.kernels.cpu.plain import tiles
from octavo.spec import AttentionSpec
from tolerance import assert_attention, assert_within

CPU = Backend("cpu", device="cpu")
CHUNK = 64
"""The smallest chunk that the kernel takes."""


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo.kernels.cpu, "HAS_NUMBA", False)
    monkeypatch.setattr(tiles, "MAX_SCORES", 1)
    monkeypatch.setattr(tiles, "MAX_TILE_ROWS", 3)
    monkeypatch.setattr(tiles, "MAX_BATCHED_ROWS", 2)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", [*CASES, *EIGHT_BIT_CASES], ids=lambda case: case.name)
def test_small_tiles(case: Case, cut: Cut) -> None:
    assert_attention(build(case), *solve(CPU, case, cut))


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("window", [None, 0, 20, 63, 64, 65])
@pytest.mark.parametrize("causal", [True, False])
def test_a_chunk_without_a_key_for_some_rows(causal: bool, window: int | None, num_splits: int | None) -> None:
    """B11: a row may see nothing in one chunk and something in the next; the running maximum survives."""
    spec = AttentionSpec(2, 1, 8, causal=causal, window_left=window, window_right=window if not causal else None)
    case = Case("chunks", spec, (130, 3, 70), (200, 193, 70), dtype=torch.float32)
    assert_attention(build(case), *solve(CPU, case, Cut(num_splits=num_splits)))


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_a_tail_of_few_keys(length: int) -> None:
    """B12: 65 keys in chunks of 64; the lanes past the last key have no weight, whatever the scores."""
    case = Case("tail", AttentionSpec(2, 1, 8, softmax_scale=1.0), (2,), (length,), dtype=torch.float32)
    problem = build(case, poison=float("nan"))
    problem.q.fill_(1000.0)
    for k in (*problem.keys, problem.cache.k_cache):
        k.fill_(-125.0)
    out, lse = attend(problem, make_plan(problem))
    assert_attention(problem, out, lse)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_stays_with_the_rows_that_see_it(bad: float) -> None:
    """0 * NaN is NaN: what one row of a tile attends to must not reach its neighbours."""
    case = Case("stray", AttentionSpec(2, 1, 8, window_left=4), (20,), (90,), 8, dtype=torch.float32)
    problem = build(case)
    clean, _ = attend(problem, make_plan(problem))
    position = 80
    block = problem.batch.block_table[0, position // 8].long()
    problem.cache.v_cache[block, position % 8] = bad
    dirty, _ = attend(problem, make_plan(problem))
    rows = torch.arange(70, 90)
    sees = (rows >= position) & (rows - 4 <= position)
    assert not bool(dirty[sees].isfinite().any())
    assert bool(dirty[~sees].isfinite().all())
    assert_within("the other rows", dirty[~sees], clean[~sees].double(), clean[~sees])
