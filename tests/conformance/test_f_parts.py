"""Kind F: the keys may be cut anywhere; the parts merge to the whole, in output and LSE."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import octavo
from conformance.backends import Backend
from conformance.common import CASES, CUTS, EIGHT_BIT_CASES, small
from conformance.harness import Cut, attend, groups, make_plan, solve
from octavo.bench.cases import Case, Problem, build
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention, assert_same_bits, assert_within, eager, exact

NAN = float("nan")


def part(backend: Backend, problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The state of the (only, not causal) sequence's keys [start, stop)."""
    k, v = (x[0][start:stop].unsqueeze(1) for x in (problem.keys, problem.values))
    return octavo.paged_attention(
        problem.q.float(),
        k,
        v,
        torch.arange(stop - start, dtype=torch.int32, device=backend.device).unsqueeze(0),
        torch.tensor([stop - start], dtype=torch.int32, device=backend.device),
        problem.batch.query_start_loc,
        causal=False,
        logits_soft_cap=problem.spec.logits_soft_cap,
        backend=backend.name,
    )


def as_view(tensor: Tensor, how: str) -> Tensor:
    """The same numbers in other memory: [parts, tokens, heads(, width)]."""
    if how == "contiguous":
        return tensor.contiguous()
    if how == "heads first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "parts last":
        return tensor.movedim(0, 2).contiguous().movedim(2, 0)
    wide = tensor.new_full((*tensor.shape[:2], tensor.shape[2] + 3, *tensor.shape[3:]), NAN)
    wide[:, :, 1:-2] = tensor
    return wide[:, :, 1:-2]


LAYOUTS = ("contiguous", "heads first", "parts last", "padded")


@given(
    cuts=st.lists(st.integers(0, 40), max_size=5).map(sorted),
    lse_layout=st.sampled_from(LAYOUTS),
    out_layout=st.sampled_from(LAYOUTS),
    sinks=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_any_cut_of_the_keys(
    backend: Backend, cuts: list[int], lse_layout: str, out_layout: str, sinks: bool, order: object
) -> None:
    """F03, F10: parts of any length, empty too, in any order, with LSE and output as any strided view."""
    spec = AttentionSpec(5, 1, 16, causal=False, logits_soft_cap=2.0, sinks=sinks)
    problem = build(Case("cut", spec, (3,), (40,), dtype=torch.float32), device=backend.device)
    edges = [0, *cuts, 40]
    pieces = list(itertools.pairwise(edges))
    order.shuffle(pieces)
    outs, lses = zip(*(part(backend, problem, *piece) for piece in pieces), strict=True)
    out, lse = octavo.merge_states(
        as_view(torch.stack(outs), out_layout), as_view(torch.stack(lses), lse_layout), problem.sinks
    )
    assert_attention(problem, out, lse)


def test_merge_is_associative(backend: Backend) -> None:
    """Merging two parts and then the third = merging three, up to rounding; many requests, 5 heads (F03)."""
    generator = torch.Generator().manual_seed(3)
    outs, lses = (
        torch.randn(3, 128, 5, 16, generator=generator).to(backend.device),
        4 * torch.randn(3, 128, 5, generator=generator).to(backend.device),
    )
    lses = as_view(lses, "heads first")
    at_once = octavo.merge_states(outs, lses)
    for first, second, third in ((0, 1, 2), (2, 0, 1)):
        pair = [first, second]
        out, lse = octavo.merge_states(outs[pair], lses[pair])
        out, lse = octavo.merge_states(torch.stack([out, outs[third]]), torch.stack([lse, lses[third]]))
        for name, step, whole in (("out", out, at_once[0]), ("lse", lse, at_once[1])):
            assert_within(name, step, whole.double(), whole)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 16), (3, 5), (8, 1)])
@pytest.mark.parametrize("case", [*CASES, *EIGHT_BIT_CASES], ids=lambda case: case.name)
def test_ranks_together_are_the_whole(backend: Backend, case: Case, world: int, interleave: int) -> None:
    """F16, C12: keys dealt by rank, empty shards too; windows and biases measure global distance."""
    assert_attention(build(case), *solve(backend, case, Cut(world=world, interleave=interleave)))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (10, 2), (6, 1), (14, 2), (8, 1), (71, 1), (28, 4)])
@pytest.mark.parametrize("cut", [Cut(), Cut(num_splits=4), Cut(world=2), CUTS["cascade"]])
def test_heads_per_kv_head(backend: Backend, heads: tuple[int, int], cut: Cut) -> None:
    """G11, F03: groups of 1, 3, 5, 6, 7, 8 and 71."""
    case = small("heads", (1, 2, 0, 1, 1), heads=heads, dtype=torch.float16)
    assert_attention(build(case), *solve(backend, case, cut))


@pytest.mark.parametrize("num_splits", [2, 4, 16])
def test_lse_has_one_layout(backend: Backend, num_splits: int) -> None:
    """F02: 1 new token, 8 heads over 2, 2048 keys: the same LSE for 1 and for more splits."""
    case = Case("splits", AttentionSpec(8, 2, 16), (1, 1), (2048, 700), dtype=torch.float32)
    _, whole = solve(backend, case, Cut(num_splits=1))
    _, parts = solve(backend, case, Cut(num_splits=num_splits))
    assert_within("lse", parts, whole.double(), whole)


@pytest.mark.parametrize("cut", [Cut(num_splits=4), CUTS["cascade"], CUTS["invariant"], CUTS["all"]])
def test_junk_in_the_workspace(backend: Backend, cut: Cut) -> None:
    """F12, F13: partial results start from what an earlier step left; lengths 0 and 1 among them."""
    case = small("junk", (1, 9, 2, 4, 3, 1), (45, 70, 0, 52, 1, 600), shared=groups(((0, 1, 3), 26)))
    cut = Cut(cut.num_splits, cut.cascade and (case.shared,), invariant=cut.invariant)
    results = []
    for junk in (0.0, NAN, float("inf")):
        problem = build(case, device=backend.device)
        plan = make_plan(problem, cut)
        assert plan.num_states > 1
        states = plan.workspace.states(plan.num_states, plan.num_tokens, 6, 16)
        states.out.fill_(junk)
        states.lse.fill_(junk)
        results.append(attend(problem, plan))
    assert_attention(build(case), *results[0])
    for out, lse in results[1:]:
        assert_same_bits("out", out, results[0][0])
        assert_same_bits("lse", lse, results[0][1])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_plan_serves_every_layer(backend: Backend, cut: Cut) -> None:
    """J03, J04, J05: the same plan twice, for layers of other windows, caps and dtypes, in any order."""
    layers = (small("a"), small("b", window_left=5), small("c", logits_soft_cap=1.0, dtype=torch.float16))
    cut = Cut(cut.num_splits, cut.cascade, invariant=cut.invariant)
    problems = [build(layer, device=backend.device) for layer in layers]
    plan = make_plan(problems[0], cut)
    for problem in (*problems, *reversed(problems)):
        assert_attention(problem, *attend(problem, plan))


@pytest.mark.parametrize("cut", [Cut(), Cut(num_splits=3), CUTS["cascade"]])
def test_an_older_plan_outlives_a_newer_one(backend: Backend, cut: Cut) -> None:
    """F08: a second plan of the same planner may grow the buffers; the first stays usable."""
    small_case, large_case = small("old"), small("new", (20, 30, 20, 20, 1), seq_lens=(45, 70, 38, 52, 1))
    problem, larger = build(small_case, device=backend.device), build(large_case, device=backend.device)
    planner = octavo.Planner(num_q_heads=6, value_dim=16, block_size=8, device=backend.device)
    levels = [small_case.shared[:1]] if cut.cascade else []
    old = planner.plan(problem.batch, num_splits=cut.num_splits, prefix_levels=levels and [groups((range(4), 19))])
    new = planner.plan(larger.batch, num_splits=7)
    for _ in range(2):
        assert_attention(problem, *attend(problem, old))
        assert_attention(larger, *attend(larger, new))


def test_uneven_lengths_under_splits(backend: Backend) -> None:
    """F07, F09, F13: lengths 0, 1 and 4096 together; ragged lengths that grow by one."""
    for num_splits in (1, 2, 5, 64):
        case = Case("uneven", AttentionSpec(2, 1, 8), (1, 1, 1), (0, 1, 4096), dtype=torch.float32)
        assert_attention(build(case), *solve(backend, case, Cut(num_splits=num_splits)))
    for step in range(30):
        lengths = tuple(3 * i + step for i in range(4))
        case = Case("grow", AttentionSpec(2, 1, 8), (1,) * 4, lengths, dtype=torch.float32)
        assert_attention(build(case), *solve(backend, case, Cut(num_splits=3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_splits_are_as_exact_as_no_splits(backend: Backend, dtype: torch.dtype) -> None:
    """F18: 8192 keys, V of 100: partial results are not rounded before the merge."""
    case = Case("exact", AttentionSpec(1, 1, 8), (1,), (8192,), dtype=dtype)
    problem = build(case, device=backend.device)
    problem.values[0].mul_(100)
    problem.cache.v_cache.mul_(100)
    true_out, true_lse = exact(problem)
    plain_out, plain_lse = eager(problem)
    errors = []
    for num_splits in (1, 16):
        out, lse = attend(problem, make_plan(problem, Cut(num_splits=num_splits)))
        assert_within("out", out, true_out, plain_out)
        assert_within("lse", lse, true_lse, plain_lse)
        errors.append(float((out.cpu().double() - true_out).abs().max()))
    assert errors[1] <= errors[0] + torch.finfo(dtype).eps * float(true_out.abs().max())


def test_position_x_sees_its_share(backend: Backend) -> None:
    """F16: world 2, 10 keys, 3 new tokens: position x sees ceil((x + 1 - rank) / 2) keys of a rank."""
    case = Case("share", AttentionSpec(1, 1, 8), (3,), (10,), 4, dtype=torch.float32)
    for rank in range(2):
        problem = build(case, shard=KVShard(2, rank), device=backend.device)
        problem.q.zero_()
        _, lse = attend(problem, make_plan(problem))
        assert lse[:, 0].exp().round().tolist() == [-(-(x + 1 - rank) // 2) for x in (7, 8, 9)]
