"""Kind C: windows, causal alignment, several query tokens; every mask key by key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import octavo
from conformance.backends import Backend
from conformance.common import CUTS
from conformance.harness import Cut, attend, groups, make_plan, over_ranks, rows_of, visible
from octavo.bench.cases import Case, build
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_within, eager, exact


def seen_keys(backend: Backend, case: Case, cut: Cut) -> list[list[int]]:
    """What each row attends to, found from outside: with q = 0 and V one-hot, out is 1/n at each seen key."""
    width = -(-max(case.seq_lens) // 8) * 8
    case = replace(case, spec=replace(case.spec, value_dim=width))
    parts = []
    for rank in range(cut.world):
        shard = KVShard(cut.world, rank, cut.interleave)
        problem = build(case, shard=shard, poison=float("nan"), device=backend.device)
        problem.q.zero_()
        for s, length in enumerate(case.seq_lens):
            j = torch.arange(shard.local_count(length))
            block = problem.batch.block_table[s, j // case.block_size]
            one_hot = torch.eye(width)[shard.global_position(j)].unsqueeze(1)
            problem.cache.v_cache[block, j % case.block_size] = one_hot.to(problem.cache.v_cache)
        parts.append(attend(problem, make_plan(problem, cut)))
    out, lse = over_ranks(parts)
    seen = out[:, 0] != 0  # [num_tokens, width]
    count = seen.sum(-1, keepdim=True).double()
    weights = seen / count.clamp(min=1)
    assert_within("out", out[:, 0], weights, weights.float())
    assert_within("lse", lse, count.log(), count.log().float())
    return [row.nonzero().flatten().tolist() for row in seen]


def wanted_keys(case: Case) -> list[list[int]]:
    return [[j for j in range(n) if visible(case.spec, p, j, n)] for _, p, n in rows_of(case)]


EDGES = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)
"""Round page and tile edges."""


@given(
    lengths=st.lists(st.tuples(st.sampled_from(EDGES), st.sampled_from((0, *EDGES))), min_size=1, max_size=3),
    causal=st.booleans(),
    left=st.sampled_from((None, 0, 1, 3, 4, 7, 8, 16, 40)),
    right=st.sampled_from((None, 0, 1, 3, 8)),
    block_size=st.sampled_from((1, 3, 8, 16)),
    cut=st.sampled_from([replace(cut, cascade=()) for cut in CUTS.values()]),
)
@settings(max_examples=80)
@example([(17, 17)], True, 3, None, 4, Cut())
@example([(9, 4), (33, 16)], False, 3, 3, 8, Cut(num_splits=5))
def test_each_row_sees_its_keys(
    backend: Backend,
    lengths: list[tuple[int, int]],
    causal: bool,
    left: int | None,
    right: int | None,
    block_size: int,
    cut: Cut,
) -> None:
    """C01, C03, C05, C12, D01, F16, J17: all lengths, query lengths and windows round the edges."""
    spec = AttentionSpec(1, 1, 8, causal=causal, window_left=left, window_right=right)
    query_lens, seq_lens = (tuple(q for _, q in lengths), tuple(n for n, _ in lengths))
    case = Case("mask", spec, query_lens, seq_lens, block_size, dtype=torch.float32)
    assert seen_keys(backend, case, cut) == wanted_keys(case)


@pytest.mark.parametrize("length", [4, 5, 6, 9])
def test_decode_window_moves_on(backend: Backend, length: int) -> None:
    """C04: a window of 4 at lengths round 4 sees keys [length - 4, length)."""
    case = Case("roll", AttentionSpec(1, 1, 8, window_left=3), (1,), (length,), 4, dtype=torch.float32)
    assert seen_keys(backend, case, Cut()) == [list(range(length - 4, length))]


def test_window_counts_the_query(backend: Backend) -> None:
    """C01, C03: window 4 over 16 keys, rows of 1, 2, 3, 4, 4, ... keys."""
    case = Case("count", AttentionSpec(1, 1, 8, window_left=3), (16,), (16,), 4, dtype=torch.float32)
    assert [len(keys) for keys in seen_keys(backend, case, Cut())] == [min(i + 1, 4) for i in range(16)]


def test_encoder_window_looks_both_ways(backend: Backend) -> None:
    """C05: |i - j| <= 3."""
    spec = AttentionSpec(1, 1, 8, causal=False, window_left=3, window_right=3)
    case = Case("both", spec, (16,), (16,), 4, dtype=torch.float32)
    assert seen_keys(backend, case, Cut()) == [[j for j in range(16) if abs(i - j) <= 3] for i in range(16)]


@pytest.mark.parametrize("cut", [Cut(), Cut(num_splits=4), Cut(world=2), Cut(invariant=True)])
def test_verification_sees_its_context(backend: Backend, cut: Cut) -> None:
    """C12, J17: 4 new tokens of 300, plain and windowed."""
    for left in (None, 63):
        case = Case("verify", AttentionSpec(1, 1, 8, window_left=left), (4,), (300,), dtype=torch.float32)
        keys = seen_keys(backend, case, cut)
        first = [0] * 4 if left is None else [296 + i - 63 for i in range(4)]
        assert keys == [list(range(first[i], 297 + i)) for i in range(4)]


def test_cascade_keeps_windows(backend: Backend) -> None:
    """A window that ends before, inside and after the shared prefix."""
    levels = (groups(((0, 2, 3), 30)), groups(((0, 3), 41)))
    for left in (None, 0, 5, 14, 25, 40):
        spec = AttentionSpec(1, 1, 8, window_left=left)
        case = Case(
            "prefix",
            spec,
            (2, 3, 1, 9),
            (44, 20, 31, 52),
            4,
            dtype=torch.float32,
            shared=levels[0] + levels[1],
        )
        for splits in (None, 3):
            assert seen_keys(backend, case, Cut(splits, cascade=levels)) == wanted_keys(case)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": True},
        {"causal": True, "window_left": 5},
        {"causal": False, "window_left": 4, "window_right": 2},
        {"causal": False, "window_right": 3},
    ],
    ids=str,
)
def test_a_row_is_a_call_on_its_own_keys(backend: Backend, cut: Cut, mask: dict) -> None:
    """C08, G16: row i of any call = a call of one token on the keys [lo, hi) cut out by hand."""
    case = Case("slice", AttentionSpec(6, 2, 16, **mask), (5, 1, 8, 6), (21, 17, 8, 40), 8, dtype=torch.float32)
    problem = build(case, device=backend.device)
    parts = []
    for rank in range(cut.world):
        share = build(case, shard=KVShard(cut.world, rank, cut.interleave), device=backend.device)
        parts.append(attend(share, make_plan(share, replace(cut, cascade=()))))
    out, lse = over_ranks(parts)
    (true_out, true_lse), (plain_out, plain_lse) = exact(problem), eager(problem)
    for row, (s, position, length) in enumerate(rows_of(case)):
        seen = [j for j in range(length) if visible(case.spec, position, j, length)]
        k, v = problem.keys[s][seen], problem.values[s][seen]
        one_out, one_lse = octavo.paged_attention(
            problem.q[row : row + 1],
            k.unsqueeze(1),
            v.unsqueeze(1),
            torch.arange(len(seen), dtype=torch.int32, device=backend.device).unsqueeze(0),
            torch.tensor([len(seen)], dtype=torch.int32, device=backend.device),
            torch.tensor([0, 1], dtype=torch.int32, device=backend.device),
            causal=False,
        )
        for name, whole, one, true, plain in (
            ("out", out, one_out, true_out, plain_out),
            ("lse", lse, one_lse, true_lse, plain_lse),
        ):
            assert_within(f"{name} of row {row}", whole[row], true[row], plain[row])
            assert_within(f"{name} of the call for row {row}", one[0], true[row], plain[row])


@pytest.mark.parametrize("q_len", [4, 5, 6, 8])
def test_equal_sequences_give_equal_results(backend: Backend, q_len: int) -> None:
    """C08: four equal sequences of several new tokens, one KV head."""
    case = Case("equal", AttentionSpec(8, 1, 64), (q_len,) * 4, (90,) * 4, dtype=torch.float32)
    problem = build(case, device=backend.device)
    problem.q.copy_(problem.q[:q_len].repeat(4, 1, 1))
    problem.batch.block_table.copy_(problem.batch.block_table[:1].expand(4, -1))
    out, lse = attend(problem, make_plan(problem))
    assert torch.equal(out.view(4, q_len, -1), out[:q_len].flatten(1).expand(4, -1, -1))
    assert torch.equal(lse.view(4, q_len, -1), lse[:q_len].expand(4, -1, -1))


@pytest.mark.parametrize("radius", [-1, -5])
def test_negative_windows_are_no_second_way_to_say_none(radius: int) -> None:
    """C11: None is the one name of an open window."""
    with pytest.raises(ValueError, match=r"window_left must be None \(open\)"):
        AttentionSpec(1, 1, 8, window_left=radius)
    with pytest.raises(ValueError, match=r"window_right must be None \(open\)"):
        AttentionSpec(1, 1, 8, causal=False, window_right=radius)
