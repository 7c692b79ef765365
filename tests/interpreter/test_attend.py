"""`attend` in Triton: every feature of the contract, on problems of a few tiles."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance.common import CASES, CUTS, EIGHT_BIT_CASES, small
from conformance.harness import Cut, groups, make_plan, over_ranks, seen_slots
from octavo.bench.cases import Case, Problem, build
from octavo.kernels import triton as family
from octavo.kernels.triton.tiles import Tile
from octavo.launch import Operands, Plan, State
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention, assert_same_bits, assert_within

attend_module = importlib.import_module("octavo.kernels.triton.attend")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows and 16 keys: short problems then have whole tiles, edges and several tiles of rows."""
    monkeypatch.setattr(attend_module, "choose", lambda shape: Tile(16, 16, 4, 2))


def run(problem: Problem, plan: Plan, want_lse: bool = True) -> tuple[Tensor, Tensor]:
    """What `octavo.run` does with a kernel family; rows that nobody writes are 99."""
    spec, n = problem.spec, plan.num_tokens
    sharded = problem.shard.dcp_world > 1
    dtype = torch.float32 if sharded else problem.case.dtype
    sinks = None if sharded else problem.sinks
    rows = problem.q.shape[0]
    out = torch.full((rows, spec.num_q_heads, spec.v_dim), 99.0, dtype=dtype)
    lse = torch.full((rows, spec.num_q_heads), 99.0)
    operands = Operands(problem.q, problem.cache, problem.alibi_slopes, sinks, problem.q_descale)
    result, memo = State(out, lse if want_lse else None), {}
    if plan.num_states == 1:
        for launch in plan.launches:
            family.attend(spec, plan, launch, operands, result, memo)
    else:
        parts = plan.workspace.states(plan.num_states, n, spec.num_q_heads, spec.v_dim)
        parts.out.fill_(NAN)
        parts.lse.fill_(-INF)
        for launch in plan.launches:
            mine = slice(launch.first_state, launch.first_state + launch.num_splits)
            state = State(parts.out[mine], parts.lse[mine])
            family.attend(spec, plan, launch, operands._replace(sinks=None), state, memo)
        family.merge(parts, sinks, result, plan.launches[-1].query_start_loc, memo)
    assert bool((out[n:] == 99).all()), "a padding row was written"
    return out[:n], lse[:n]


def solve(case: Case, cut: Cut = Cut()) -> tuple[Tensor, Tensor]:
    """Attention of a case under a cut, with NaN in all that no key owns."""
    parts = []
    for rank in range(cut.world):
        shard = KVShard(cut.world, rank, cut.interleave)
        problem = build(case, page_seed=rank, poison=NAN, padding_rows=2, shard=shard)
        parts.append(run(problem, make_plan(problem, cut)))
    out, lse = over_ranks(parts, problem.sinks)
    return out.to(case.dtype), lse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_masks_scores_and_dtypes(case: Case) -> None:
    narrow = replace(case, spec=replace(case.spec, num_q_heads=3, num_kv_heads=1))
    assert_attention(build(narrow), *solve(narrow))


@pytest.mark.parametrize("case", EIGHT_BIT_CASES, ids=lambda case: case.name)
def test_eight_bit(case: Case) -> None:
    assert_attention(*eight_bit(case, Cut()))


@pytest.mark.parametrize("case", EIGHT_BIT_CASES[::2], ids=lambda case: case.name)
def test_eight_bit_in_parts(case: Case) -> None:
    assert_attention(*eight_bit(case, Cut(num_splits=2, cascade=CUTS["all"].cascade)))


def eight_bit(case: Case, cut: Cut) -> tuple[Problem, Tensor, Tensor]:
    """A case with few heads, and what it gives. (The interpreter's bfloat16 is wrong where rows of V have scales.)"""
    dtype = torch.float16 if case.dtype == torch.bfloat16 else case.dtype
    narrow = replace(case, spec=replace(case.spec, num_q_heads=3, num_kv_heads=1), dtype=dtype)
    return build(narrow), *solve(narrow, cut)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_cuts(cut: Cut) -> None:
    """Splits, cascade levels, ranks and the invariant mode, with every transform of the scores at once."""
    case = small("everything", heads=(3, 1), window_left=20, logits_soft_cap=2.0, alibi="linear", sinks=True)
    assert_attention(build(case), *solve(case, cut))


@pytest.mark.parametrize(
    ("heads", "dims", "block_size"),
    [
        ((3, 1), (8, 8), 1),
        ((5, 1), (80, 80), 16),
        ((7, 1), (24, 16), 256),
        ((71, 1), (16, 16), 4),
        ((4, 4), (16, 72), 8),
        ((2, 1), (48, 16), 12),
    ],
)
def test_groups_widths_and_pages(heads: tuple[int, int], dims: tuple[int, int], block_size: int) -> None:
    case = Case("shape", AttentionSpec(*heads, *dims), (1, 3), (40, 18), block_size, "NHD", torch.float16)
    assert_attention(build(case), *solve(case))


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_scales_that_are_not_positive(scale: float, cap: float | None) -> None:
    """The kernel folds a positive scale into the exponent; others it must not."""
    spec = AttentionSpec(2, 1, 16, softmax_scale=scale, logits_soft_cap=cap)
    case = Case("scale", spec, (3,), (37,), dtype=torch.float32)
    assert_attention(build(case), *solve(case))


@pytest.mark.parametrize(
    ("score", "cap"), [(0.2, 1.0), (0.3, 1.0), (1.7, 1000.0), (300.0, 1000.0), (-500.0, 1.0), (1e6, 1.0)]
)
def test_tanh(score: float, cap: float) -> None:
    """Small scores keep their digits under a large cap, large ones do not overflow."""
    spec = AttentionSpec(1, 1, 8, softmax_scale=1.0, logits_soft_cap=cap, causal=False)
    problem = build(Case("cap", spec, (1,), (1,), dtype=torch.float32))
    problem.q.fill_(score / 8)
    problem.cache.k_cache.fill_(1.0)
    _, lse = run(problem, make_plan(problem))
    true = cap * (torch.full_like(lse, score).double() / cap).tanh()
    assert_within("lse", lse, true, true.float())


def test_queries_of_another_dtype_than_the_cache() -> None:
    case = Case("mixed", AttentionSpec(4, 2, 16), (2,), (21,), dtype=torch.float32, cache_dtype=torch.bfloat16)
    assert_attention(build(case), *solve(case))


def test_no_lse_wanted() -> None:
    problem = build(small("sinks", (2, 1), (9, 20), sinks=True, shared=()))
    plan = make_plan(problem)
    wanted, _ = run(problem, plan)
    out, lse = run(problem, plan, want_lse=False)
    assert_same_bits("out", out, wanted)
    assert bool((lse == 99).all())


def spoiled(case: Case, poison: float) -> Problem:
    """A problem with `poison` in every row of the cache that no query sees."""
    problem = build(case, padding_rows=2, poison=poison)
    unseen = ~seen_slots(problem)
    problem.cache.k_cache[unseen] = poison
    problem.cache.v_cache[unseen] = poison
    return problem


@pytest.mark.parametrize("poison", [NAN, INF, 1e4])
@pytest.mark.parametrize("cut", [Cut(), Cut(cascade=(groups((range(4), 26)),))], ids=["whole", "cascade"])
def test_what_no_row_sees_changes_no_bit(poison: float, cut: Cut) -> None:
    """In the cascade two windows meet one tile at different places: no row sees the keys between them."""
    case = small("gap", (2, 3, 1, 1), (12, 28, 20, 45), heads=(3, 1), window_left=3, shared=groups((range(4), 26)))
    clean, dirty = spoiled(case, 0.0), spoiled(case, poison)
    wanted = run(clean, make_plan(clean, cut))
    actual = run(dirty, make_plan(dirty, cut))
    assert_attention(build(case), *wanted)
    for name, a, w in zip(("out", "lse"), actual, wanted, strict=True):
        assert_same_bits(name, a, w)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("channels", [slice(None), slice(2, 3)])
def test_a_value_stays_with_the_rows_that_see_it(bad: float, channels: slice) -> None:
    """0 * NaN is NaN: what one row of a tile attends to must not reach its neighbours, nor other channels."""
    case = Case("stray", AttentionSpec(2, 1, 8, window_left=4), (20,), (50,), 8, dtype=torch.float32)
    problem = build(case)
    clean, _ = run(problem, make_plan(problem))
    position = 40
    block = problem.batch.block_table[0, position // 8].long()
    problem.cache.v_cache[block, position % 8, :, channels] = bad
    dirty, _ = run(problem, make_plan(problem))
    rows = torch.arange(30, 50)
    sees = torch.zeros_like(dirty, dtype=torch.bool)
    sees[(rows >= position) & (rows - 4 <= position), :, channels] = True
    assert not bool(dirty[sees].isfinite().any())
    assert_within("the rest", dirty[~sees], clean[~sees].double(), clean[~sees])


def test_strided_views() -> None:
    """q, out and the pages may be views with gaps."""
    problem = build(small("views", (2, 1), (9, 20), shared=()))
    wanted, _ = run(problem, make_plan(problem))

    def spread(x: Tensor) -> Tensor:
        wide = x.new_full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 8), NAN)
        view = wide[..., ::2, : x.shape[-1]]
        view.copy_(x)
        return view

    cache = replace(problem.cache, k_cache=spread(problem.cache.k_cache), v_cache=spread(problem.cache.v_cache))
    views = replace(problem, q=spread(problem.q), cache=cache)
    out, _ = run(views, make_plan(views))
    assert_same_bits("out", out, wanted)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("positions", [range(17, 20), range(20)], ids=["some", "all"])
def test_scores_of_minus_infinity_have_no_weight(positions: range, num_splits: int) -> None:
    problem = build(Case("low", AttentionSpec(2, 1, 16), (1,), (20,), 1, dtype=torch.float32))
    problem.q.abs_()
    for position in positions:
        problem.keys[0][position, 0, 5] = -INF
        problem.cache.k_cache[problem.batch.block_table[0, position].long(), 0, 0, 5] = -INF
    out, lse = run(problem, make_plan(problem, Cut(num_splits=num_splits)))
    if len(positions) < 20:
        assert_attention(problem, out, lse)
    else:
        assert bool((out == 0).all())
        assert bool((lse == -INF).all())
