"""The mask as an interval, and the arithmetic of a shard."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec import AttentionSpec, KVShard

RADII = st.one_of(st.none(), st.integers(0, 40))
SHARDS = st.integers(1, 9).flatmap(
    lambda world: st.builds(KVShard, st.just(world), st.integers(0, world - 1), st.integers(1, 17))
)


@given(
    causal=st.booleans(),
    left=RADII,
    right=RADII,
    rows=st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 60)), min_size=1, max_size=8),
)
def test_bounds_are_the_visible_keys(
    causal: bool, left: int | None, right: int | None, rows: list[tuple[int, int]]
) -> None:
    """Key by key against SPEC section 1; also for positions outside the sequence."""
    spec = AttentionSpec(1, 1, 8, causal=causal, window_left=left, window_right=right)
    positions, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    lo, hi = spec.bounds(positions, seq_lens)
    assert bool(((lo >= 0) & (lo <= hi) & (hi <= seq_lens)).all())
    for (p, n), start, stop in zip(rows, lo.tolist(), hi.tolist(), strict=True):
        visible = [
            j
            for j in range(n)
            if (not causal or j <= p) and (left is None or j >= p - left) and (right is None or j <= p + right)
        ]
        assert list(range(start, stop)) == visible


def test_bounds_keep_any_shape() -> None:
    positions = torch.arange(6, dtype=torch.int32).view(2, 3)
    for left in (None, 1):
        lo, hi = AttentionSpec(1, 1, 8, window_left=left).bounds(positions, torch.full_like(positions, 9))
        assert lo.shape == hi.shape == (2, 3)


def test_derived_facts() -> None:
    spec = AttentionSpec(num_q_heads=21, num_kv_heads=3, head_dim=64)
    assert (spec.group_size, spec.v_dim, spec.scale) == (7, 64, 0.125)
    spec = AttentionSpec(2, 1, 192, 128, softmax_scale=0.5)
    assert (spec.group_size, spec.v_dim, spec.scale) == (2, 128, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.head_dim = 8
    assert hash(spec) == hash(AttentionSpec(2, 1, 192, 128, softmax_scale=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_q_heads": 0}, r"num_q_heads must be a positive multiple .* got 0 and 1"),
        ({"num_kv_heads": 0}, r"num_q_heads .* num_kv_heads, got 2 and 0"),
        ({"num_q_heads": 7, "num_kv_heads": 2}, r"got 7 and 2"),
        ({"head_dim": 0}, r"head_dim must be a positive multiple of 8, got 0"),
        ({"head_dim": 12}, r"head_dim must be .* got 12"),
        ({"value_dim": 4}, r"value_dim must be .* got 4"),
        ({"window_left": -1}, r"window_left must be None \(open\) or at least 0, got -1"),
        ({"window_right": -2}, r"window_right must be None \(open\) or at least 0, got -2"),
        ({"logits_soft_cap": 0.0}, r"logits_soft_cap must be None \(off\) or above 0 and finite, got 0"),
        ({"logits_soft_cap": -3.0}, r"logits_soft_cap .* got -3"),
        ({"logits_soft_cap": math.nan}, r"logits_soft_cap .* got nan"),
        # cap * tanh(s / cap) of an infinite cap is inf * 0, NaN.
        ({"logits_soft_cap": math.inf}, r"logits_soft_cap .* got inf"),
        ({"softmax_scale": math.nan}, r"softmax_scale .* got nan"),
        ({"softmax_scale": math.inf}, r"softmax_scale .* got inf"),
        ({"alibi": "quadratic"}, r"alibi must be None, 'linear' or 'sqrt', got 'quadratic'"),
    ],
)
def test_values_out_of_range(options: dict, message: str) -> None:
    """C11, D03, D04: None is the one name of "off"; what would compute NaN is refused."""
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8} | options)


@given(world=st.integers(1, 9), interleave=st.integers(1, 17), length=st.integers(0, 400))
def test_shards_are_a_partition(world: int, interleave: int, length: int) -> None:
    """F15, F16, F17: each token on exactly one rank, in order; counts and positions are inverse."""
    owners: dict[int, int] = {}
    for rank in range(world):
        shard = KVShard(world, rank, interleave)
        mine = [shard.global_position(j) for j in range(shard.local_count(length))]
        assert mine == sorted(mine)
        for j, t in enumerate(mine):
            assert t < length
            assert (t // interleave) % world == rank
            assert owners.setdefault(t, rank) == rank
            assert shard.local_count(t) == j
            assert shard.local_count(t + 1) == j + 1
        assert shard.local_count(length) <= shard.max_local_count(length)
    assert sorted(owners) == list(range(length))


@given(shard=SHARDS, xs=st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_tensors_count_as_numbers_do(shard: KVShard, xs: list[int]) -> None:
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor(xs, dtype=dtype)
        assert shard.local_count(tensor).tolist() == [shard.local_count(x) for x in xs]
        assert shard.global_position(tensor).tolist() == [shard.global_position(x) for x in xs]
        assert shard.local_count(tensor).dtype == shard.global_position(tensor).dtype == dtype


@given(shard=SHARDS, longest=st.integers(0, 400))
def test_the_bound_holds_on_every_rank_and_is_tight(shard: KVShard, longest: int) -> None:
    """SPEC section 7's bound covers all shorter lengths and is at most one run too large."""
    bound = shard.max_local_count(longest)
    assert all(shard.local_count(n) <= bound for n in range(longest + 1))
    first = KVShard(shard.dcp_world, 0, shard.interleave)
    assert bound - first.local_count(longest) < shard.interleave


def test_a_long_context_over_eight_ranks() -> None:
    """F15: 70000 tokens over 8 ranks, in chunks of a workspace: the chunks of each rank sum to its share."""
    for interleave in (1, 16, 64):
        for chunk in (65536 // 3, 65536 // 5, 65536 // 7):
            edges = [*range(0, 70000, chunk), 70000]
            total = 0
            for rank in range(8):
                count = KVShard(8, rank, interleave).local_count
                parts = [count(b) - count(a) for a, b in itertools.pairwise(edges)]
                assert min(parts) >= 0
                assert sum(parts) == count(70000)
                total += sum(parts)
            assert total == 70000


@pytest.mark.parametrize(
    ("world", "rank", "interleave", "message"),
    [
        (0, 0, 1, "dcp_world and interleave must be at least 1, got 0 and 1"),
        (2, 0, 0, "dcp_world and interleave must be at least 1, got 2 and 0"),
        (2, 2, 1, r"dcp_rank must lie in \[0, 2\), got 2"),
        (2, -1, 1, r"dcp_rank must lie in \[0, 2\), got -1"),
    ],
)
def test_shards_out_of_range(world: int, rank: int, interleave: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVShard(world, rank, interleave)
