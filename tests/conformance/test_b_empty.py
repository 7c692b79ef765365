"""Kind B: rows that see no key, parts without keys, extreme scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octavo
from conformance.backends import Backend
from conformance.common import CUTS, small
from conformance.harness import Cut, attend, make_plan, over_ranks, rows_of, solve, visible
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem, build
from octavo.cache import LayerCache
from octavo.planner import Planner
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention, assert_within, eager, exact

EMPTY = float("-inf")


def blind(case: Case) -> torch.Tensor:
    """[num_tokens] bool: the rows that see no key, counted key by key."""
    return torch.tensor([not any(visible(case.spec, p, j, n) for j in range(n)) for _, p, n in rows_of(case)])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_keys(backend: Backend, cut: Cut, sinks: bool, causal: bool) -> None:
    """B03, B04, B05, B13, F13: no keys, or more new tokens than keys, first, in the middle and last."""
    case = small(
        "empty",
        (1, 3, 2, 1, 3, 1),
        (0, 5, 0, 17, 1, 0),
        shared=(),
        causal=causal,
        window_left=2,
        sinks=sinks,
    )
    out, lse = solve(backend, case, replace(cut, cascade=()))
    problem = build(case)
    nothing = blind(case)
    assert int(nothing.sum()) == 4 + 2 * causal
    assert bool((out[nothing] == 0).all())
    wanted = torch.full_like(lse[nothing], EMPTY) if problem.sinks is None else problem.sinks.expand_as(lse[nothing])
    assert_within("lse of empty rows", lse[nothing], wanted.double(), wanted)
    assert_attention(problem, out, lse)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("q_len", [1, 2])
def test_sequences_without_keys_beside_others(backend: Backend, cut: Cut, q_len: int) -> None:
    """B05, A05: they share a tile with sequences that have keys; their table is all guards, block 0 holds NaN."""
    case = small("beside", (q_len,) * 5, (0, 5, 0, 17, 0), shared=())
    unused_first_blocks = 0
    for page_seed in range(4):
        parts = []
        for rank in range(cut.world):
            shard = KVShard(cut.world, rank, cut.interleave)
            problem = build(case, page_seed=page_seed, poison=float("nan"), shard=shard, device=backend.device)
            unused_first_blocks += not bool((problem.batch.block_table == 0).any())
            parts.append(attend(problem, make_plan(problem, replace(cut, cascade=()))))
        out, lse = over_ranks(parts)
        assert_attention(build(case), out, lse)
    assert unused_first_blocks > 0


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_block_of_empty_rows(backend: Backend, cut: Cut, sinks: bool) -> None:
    """B10: 14 rows before the first key, then 50 that see keys; the same in the middle and at the end."""
    for query_lens, seq_lens in (((64, 1), (50, 3)), ((5, 64, 2), (5, 50, 9)), ((3, 14), (9, 0))):
        case = Case("block", AttentionSpec(2, 1, 8, sinks=sinks), query_lens, seq_lens, dtype=torch.float32)
        out, lse = solve(backend, case, replace(cut, cascade=()))
        assert int(blind(case).sum()) == 14
        assert bool((out[blind(case)] == 0).all())
        assert_attention(build(case), out, lse)


@pytest.mark.parametrize("causal", [False, True])
def test_no_key_rows_at_all(backend: Backend, causal: bool) -> None:
    """B07: K and V have no rows, so that there is nothing to describe."""
    spec = AttentionSpec(2, 2, 64, causal=causal)
    pages = LayerCache(*(torch.zeros(0, 1, 2, 64, device=backend.device) for _ in "kv"))
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    batch = AttentionBatch.from_raw_keys(offsets, torch.zeros_like(offsets), device=backend.device)
    planner = Planner(num_q_heads=2, value_dim=64, block_size=1, num_blocks=0, device=backend.device)
    for num_splits in (None, 3):
        out = torch.full((4, 2, 64), 99.0, device=backend.device)
        lse = torch.full((4, 2), 99.0, device=backend.device)
        q = torch.randn(4, 2, 64, device=backend.device)
        octavo.run(planner.plan(batch, num_splits=num_splits), spec, q, pages, out, lse)
        assert bool((out == 0).all())
        assert bool((lse == EMPTY).all())


@pytest.mark.parametrize("query_lens", [(), (0,), (0, 0)])
@pytest.mark.parametrize("cut", [Cut(), Cut(num_splits=4), Cut(invariant=True), CUTS["cascade"]])
def test_no_rows_at_all(backend: Backend, query_lens: tuple[int, ...], cut: Cut) -> None:
    """B08: a batch without sequences, or without rows: an empty result."""
    case = Case("none", AttentionSpec(2, 1, 8), query_lens, (7,) * len(query_lens), dtype=torch.float32)
    out, lse = solve(backend, case, replace(cut, cascade=()))
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)


@given(
    empty=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6),
    junk=st.sampled_from([0.0, float("nan"), float("inf"), 99.0]),
)
def test_merge_with_empty_parts(backend: Backend, empty: list[list[bool]], junk: float) -> None:
    """B01, B02: empty parts give no weight, whatever their output holds; none left: the identity."""
    generator = torch.Generator().manual_seed(len(empty))
    outs = torch.randn(len(empty), 3, 2, 8, generator=generator)
    lses = 5 * torch.randn(len(empty), 3, 2, generator=generator)
    nothing = torch.tensor(empty)[..., None].expand(lses.shape)
    true_lse = lses.masked_fill(nothing, EMPTY).double().logsumexp(0)
    weights = (lses.double() - true_lse.masked_fill(true_lse == EMPTY, 0.0)).exp().masked_fill(nothing, 0.0)
    true_out = (weights[..., None] * outs.double()).sum(0)
    out, lse = octavo.merge_states(
        outs.masked_fill(nothing[..., None], junk).to(backend.device),
        lses.masked_fill(nothing, EMPTY).to(backend.device),
    )
    assert_within("out", out, true_out, true_out.float())
    assert_within("lse", lse, true_lse, true_lse.float())


def test_merge_identity_keeps_bits(backend: Backend) -> None:
    """B01, B02: merge(x, empty) = x from either side; merge(empty, empty) = empty, two and three parts."""
    out, lse = torch.randn(64, 8, 32, device=backend.device), torch.randn(64, 8, device=backend.device)
    none = torch.full_like(out, float("nan")), torch.full_like(lse, EMPTY)
    for parts in ([(out, lse), none], [none, (out, lse)], [none, (out, lse), none], [(out, lse)]):
        merged_out, merged_lse = octavo.merge_states(*(torch.stack(side) for side in zip(*parts, strict=True)))
        assert torch.equal(merged_out, out)
        assert torch.equal(merged_lse, lse)
    for count in (1, 2, 3):
        merged_out, merged_lse = octavo.merge_states(torch.stack([none[0]] * count), torch.stack([none[1]] * count))
        assert bool((merged_out == 0).all())
        assert bool((merged_lse == EMPTY).all())


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("shift", [-1e6, -1e4, -60.0, 60.0, 1e4, 1e6])
def test_a_constant_on_all_scores_moves_the_lse_only(backend: Backend, cut: Cut, shift: float) -> None:
    """B12: scores near +-1e6 are no mask; the output stays, the LSE moves by the constant."""
    case = small("shift", window_left=30, softmax_scale=0.25)
    true_out, true_lse = exact(with_constant(build(case), 0.0))
    plain_out, plain_lse = eager(with_constant(build(case), shift))
    parts = []
    for rank in range(cut.world):
        problem = build(case, shard=KVShard(cut.world, rank, cut.interleave), device=backend.device)
        parts.append(attend(with_constant(problem, shift), make_plan(problem, cut)))
    out, lse = over_ranks(parts)
    assert_within("out", out, true_out, plain_out)
    assert_within("lse", lse, true_lse + shift, plain_lse)


def with_constant(problem: Problem, shift: float) -> Problem:
    """Add `shift` to every score, through the last column of q and K."""
    problem.q[..., -1] = 1.0
    for k in (problem.cache.k_cache, *problem.keys):
        k[..., -1] = shift / problem.spec.scale
    return problem
