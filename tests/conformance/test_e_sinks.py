"""Kind E: a sink is one more logit without a value, and counts exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import octavo
from conformance.backends import Backend
from conformance.common import CUTS, small
from conformance.harness import Cut, attend, groups, make_plan, over_ranks, solve
from octavo import reference
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem, build
from octavo.spec import AttentionSpec
from tolerance import assert_attention, assert_within, eager, exact

CASES = (
    small("sinks", sinks=True),
    small("window-sinks", sinks=True, window_left=4),
    small("cap-sinks", sinks=True, logits_soft_cap=1.0, alibi="linear"),
    small("encoder-sinks", sinks=True, causal=False),
    small("half-sinks", sinks=True, dtype=torch.float16),
)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_once_however_the_work_is_cut(backend: Backend, case: Case, cut: Cut) -> None:
    """E03, E06, E07: splits, cascade and ranks give the oracle's result, rows without keys included."""
    assert_attention(build(case), *solve(backend, case, cut))


def with_key_for_the_sink(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's result when the sink is a key of value 0, put before the others by hand.

    One more column of q and K gives that key the sink's score and leaves the others as they are; each query
    head gets a KV head of its own, since sinks differ among heads that share one.
    """
    spec = problem.spec
    assert (spec.causal, spec.window_left) == (True, None)  # a mask that an earlier key does not change
    heads = spec.num_q_heads
    wide = replace(
        spec,
        num_kv_heads=heads,
        head_dim=spec.head_dim + 8,
        value_dim=spec.v_dim,
        softmax_scale=spec.scale,
        sinks=False,
    )
    q = torch.nn.functional.pad(problem.q, (0, 8)).double()
    q[..., spec.head_dim] = 1.0
    keys, values = [], []
    for shared_k, shared_v in zip(problem.keys, problem.values, strict=True):
        k = torch.nn.functional.pad(shared_k.repeat_interleave(spec.group_size, 1), (0, 8)).double()
        v = shared_v.repeat_interleave(spec.group_size, 1).double()
        sink_key = torch.zeros(1, heads, wide.head_dim, dtype=torch.float64)
        sink_key[0, :, spec.head_dim] = problem.sinks.double() / spec.scale
        keys += [sink_key, k]
        values += [torch.zeros(1, heads, wide.v_dim, dtype=torch.float64), v]
    offsets = torch.tensor([0, *(n + 1 for n in problem.case.seq_lens)], dtype=torch.int32).cumsum(0)
    batch = AttentionBatch.from_raw_keys(problem.batch.query_start_loc, offsets.to(torch.int32))
    return reference.attention(wide, batch, q, torch.cat(keys).unsqueeze(1), torch.cat(values).unsqueeze(1))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (7, 1)])
def test_a_sink_is_a_key_of_value_zero(backend: Backend, cut: Cut, heads: tuple[int, int]) -> None:
    """E05: the same result as with one more key whose score is the sink and whose value is 0."""
    case = small("key", (1, 9, 0, 4, 1), sinks=True, heads=heads)
    problem = build(case)
    out, lse = solve(backend, case, cut)
    (true_out, true_lse), (plain_out, plain_lse) = with_key_for_the_sink(problem), eager(problem)
    assert_within("out", out, true_out, plain_out)
    assert_within("lse", lse, true_lse, plain_lse)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("sink", [-1e4, -100.0, 0.0, 120.0, 1e4])
def test_far_below_and_far_above_the_scores(backend: Backend, cut: Cut, sink: float) -> None:
    """E04: scores 0 under a sink of 120: LSE 120, out about 0, nothing overflows."""
    case = Case("far", AttentionSpec(2, 1, 8, sinks=True), (1, 2), (64, 5), 8, dtype=torch.float32)
    problems = [
        build(case, shard=octavo.KVShard(cut.world, rank, cut.interleave), device=backend.device)
        for rank in range(cut.world)
    ]
    whole = build(case)
    for problem in (*problems, whole):
        problem.q.zero_()
        problem.sinks.fill_(sink)
    out, lse = merged(problems, replace(cut, cascade=()))
    (true_out, true_lse), (plain_out, plain_lse) = exact(whole), eager(whole)
    assert_within("out", out, true_out, plain_out)
    assert_within("lse", lse, true_lse, plain_lse)


def merged(problems: list[Problem], cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [attend(problem, make_plan(problem, cut)) for problem in problems]
    return over_ranks(parts, problems[0].sinks)


@pytest.mark.parametrize("length", [40, 4000])
@pytest.mark.parametrize("num_splits", [None, 1, 7])
def test_short_and_long(backend: Backend, length: int, num_splits: int | None) -> None:
    """E03: one split and many, sink 2.0."""
    case = Case("long", AttentionSpec(2, 1, 16, sinks=True), (1,), (length,), dtype=torch.float32)
    problem = build(case, poison=float("nan"), device=backend.device)
    problem.sinks.fill_(2.0)
    out, lse = merged([problem], Cut(num_splits=num_splits))
    assert_attention(problem, out, lse)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_not_once_per_rank(backend: Backend, world: int, num_splits: int | None) -> None:
    """E06: 100 keys over 2 and 4 ranks, with a cascade besides."""
    shared = groups(((0, 1), 48))
    case = Case("rank", AttentionSpec(4, 2, 16, sinks=True), (1, 3), (100, 60), 8, dtype=torch.float32, shared=shared)
    assert_attention(build(case), *solve(backend, case, Cut(num_splits, (shared,), world)))
