"""Kind A: what the arguments do not name has no influence, not even NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.backends import Backend
from conformance.common import CASES, CUTS, EIGHT_BIT_CASES, small
from conformance.harness import Cut, attend, groups, make_plan, seen_slots, solve
from octavo.bench.cases import GUARD, Case, Problem, build, poison_rows
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention, assert_same_bits, assert_within

POISON = [float("nan"), float("inf"), float("-inf"), 1e4]


def spoil(problem: Problem, poison: float) -> Problem:
    """Overwrite all cache rows that no query of the batch sees: pages that left a window are among them."""
    poison_rows(problem.cache, ~seen_slots(problem), poison)
    return problem


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", [*CASES, *EIGHT_BIT_CASES], ids=lambda case: case.name)
def test_poison_changes_no_bit(backend: Backend, case: Case, cut: Cut) -> None:
    """A01, A02, A03, A05: unused rows, pages, padding rows, rows outside every window."""
    for rank in range(cut.world):
        shard = KVShard(cut.world, rank, cut.interleave)
        clean = spoil(build(case, shard=shard, padding_rows=3, device=backend.device), 0.0)
        out, lse = attend(clean, make_plan(clean, cut))
        assert not bool(out.isnan().any())
        for poison in POISON:
            dirty = build(case, shard=shard, padding_rows=3, poison=poison, device=backend.device)
            spoil(dirty, poison)
            poisoned_out, poisoned_lse = attend(dirty, make_plan(dirty, cut))
            assert_same_bits(f"out with {poison}", poisoned_out, out)
            assert_same_bits(f"lse with {poison}", poisoned_lse, lse)


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("poison", POISON)
def test_keys_between_the_windows_of_a_group(backend: Backend, num_splits: int | None, poison: float) -> None:
    """A shared prefix that two windows meet at different places: no row sees what lies between them."""
    shared = groups((range(4), 26))
    spec = AttentionSpec(6, 2, 16, window_left=3)
    case = Case("gap", spec, (2, 3, 1, 1), (12, 28, 20, 45), 8, dtype=torch.float32, shared=shared)
    results = []
    for filling in (0.0, poison):
        problem = spoil(build(case, poison=filling, device=backend.device), filling)
        results.append(attend(problem, make_plan(problem, Cut(num_splits, cascade=(shared,)))))
    assert_attention(build(case), *results[1])
    assert_same_bits("out", results[1][0], results[0][0])
    assert_same_bits("lse", results[1][1], results[0][1])


@pytest.mark.parametrize("length", [1, 3, 12, 13, 16])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("poison", POISON)
def test_the_rest_of_the_last_page_is_not_read(backend: Backend, length: int, block_size: int, poison: float) -> None:
    """A01, A02, A03: page 16 and 4, lengths 13 and 12 as control."""
    case = Case("tail", AttentionSpec(2, 1, 64), (1,), (length,), block_size, dtype=torch.float16)
    assert_attention(build(case), *solve(backend, case, poison=poison))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_table_padding_may_name_a_poisoned_page(backend: Backend, cut: Cut) -> None:
    """A05: graphs pad tables with page 0, which padding rows have filled with NaN."""
    case = small("null-page", window_left=9)
    results = []
    for poison in (0.0, float("nan")):
        problem = build(case, poison=poison, shard=KVShard(cut.world, 0, cut.interleave), device=backend.device)
        table = problem.batch.block_table
        in_use = set(table[table != GUARD].tolist())
        unused = next(block for block in range(problem.cache.num_blocks) if block not in in_use)
        padded = replace(problem.batch, block_table=table.where(table != GUARD, unused))
        results.append(attend(problem, make_plan(replace(problem, batch=padded), cut)))
    assert_same_bits("out", results[1][0], results[0][0])
    assert_same_bits("lse", results[1][1], results[0][1])


@pytest.mark.parametrize("num_splits", [None, 1, 2, 5])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_ends_of_splits_are_masked(backend: Backend, num_splits: int | None, batch: int) -> None:
    """A06: few sequences, lengths 17 to 40, pieces that are no multiple of any tile."""
    case = Case("short", AttentionSpec(2, 2, 128), (1,) * batch, (17, 25, 33, 40)[:batch], dtype=torch.float16)
    assert_attention(build(case), *solve(backend, case, Cut(num_splits=num_splits)))


@pytest.mark.parametrize("length", [16, 64, 200])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_padding_does_not_join_the_denominator(
    backend: Backend, length: int, q_len: int, num_splits: int | None
) -> None:
    """A07: q = 0 and V = 1, not causal: 1.0 everywhere, exactly so where nothing is merged."""
    case = Case("ones", AttentionSpec(4, 2, 32, causal=False), (q_len,), (length,), dtype=torch.float32)
    problem = build(case, poison=float("nan"), device=backend.device)
    problem.q.zero_()
    problem.cache.v_cache[seen_slots(problem)] = 1.0
    out, lse = attend(problem, make_plan(problem, Cut(num_splits=num_splits)))
    if num_splits is None:
        assert bool((out == 1.0).all())
    log = torch.full_like(lse, length).double().log()
    assert_within("out", out, torch.ones_like(out).double(), torch.ones_like(out))
    assert_within("lse", lse, log, log.float())
