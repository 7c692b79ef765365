"""Kind G: page order, page size, layout, strides and widths are storage; the result is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import octavo
from conformance.backends import Backend
from conformance.common import CASES, CUTS, EIGHT_BIT_CASES, small
from conformance.harness import Cut, attend, make_plan, solve
from octavo.bench.cases import GUARD, Case, Problem, build
from octavo.cache import LayerCache
from octavo.spec import AttentionSpec
from tolerance import assert_attention, assert_same_bits

NAN = float("nan")


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", [*CASES[:5], *EIGHT_BIT_CASES], ids=lambda case: case.name)
def test_order_of_pages_changes_no_bit(backend: Backend, case: Case, cut: Cut) -> None:
    """G08: shuffled pages and table, guards of 2^30 past each sequence's blocks."""
    shard = octavo.KVShard(cut.world, cut.world - 1, cut.interleave)
    results = []
    for page_seed in range(3):
        problem = build(case, page_seed=page_seed, poison=NAN, shard=shard, device=backend.device)
        assert bool((problem.batch.block_table == GUARD).any())
        results.append(attend(problem, make_plan(problem, cut)))
    for out, lse in results[1:]:
        assert_same_bits("out", out, results[0][0])
        assert_same_bits("lse", lse, results[0][1])


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("block_size", [1, 3, 5, 16, 32, 128])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_page_size_and_layout(backend: Backend, cut: Cut, block_size: int, order: str) -> None:
    """G03, G07: any page size, also none that divides a tile, in both layouts."""
    case = small("page", block_size=block_size, order=order, window_left=20)
    assert_attention(build(case), *solve(backend, case, cut))


def restrided(problem: Problem, how: str) -> Problem:
    """The same problem behind other strides."""

    def spread(x: Tensor, dim: int) -> Tensor:
        """Every other index of a tensor twice as long, NaN between."""
        wide = x.new_full((*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 :]), NAN)
        view = wide.unflatten(dim, (x.shape[dim], 2)).select(dim + 1, 0)
        return view.copy_(x)

    q, k, v = problem.q, problem.cache.k_cache, problem.cache.v_cache
    if how == "q":
        q = spread(spread(q, 0), 1)
    elif how == "wide rows":
        k, v = (_padded(x) for x in (k, v))
    elif how == "K beside V":
        fused = k.new_full((*k.shape[:3], 2 * k.shape[3] + 8), NAN)
        fused[..., : k.shape[3]], fused[..., k.shape[3] + 8 :] = k, v
        k, v = fused[..., : k.shape[3]], fused[..., k.shape[3] + 8 :]
    elif how == "K, V, K, V":
        both = torch.stack([k, v], 1)
        k, v = both[:, 0], both[:, 1]
    elif how == "blocks innermost":
        k, v = (x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (k, v))
    else:
        k, v = (spread(x, int(how[-1])) for x in (k, v))
    return replace(problem, q=q, cache=LayerCache(k, v))


def _padded(x: Tensor) -> Tensor:
    wide = x.new_full((*x.shape[:3], x.shape[3] + 8), NAN)
    wide[..., : x.shape[3]] = x
    return wide[..., : x.shape[3]]


HOWS = (
    "q",
    "wide rows",
    "K beside V",
    "K, V, K, V",
    "blocks innermost",
    "every other of dimension 0",
    "every other of dimension 1",
    "every other of dimension 2",
)


@pytest.mark.parametrize("cut", [Cut(), Cut(num_splits=3), CUTS["cascade"], CUTS["invariant"]])
@pytest.mark.parametrize("how", HOWS)
def test_strides_change_no_bit(backend: Backend, how: str, cut: Cut) -> None:
    """G01, G02, G03, G19: q and the cache as views."""
    problem = build(small("views", window_left=12), poison=NAN, device=backend.device)
    plan = make_plan(problem, cut)
    out, lse = attend(problem, plan)
    view = restrided(problem, how)
    assert (view.q.stride(), view.cache.k_cache.stride()) != (
        problem.q.stride(),
        problem.cache.k_cache.stride(),
    )
    viewed_out, viewed_lse = attend(view, plan)
    assert_same_bits("out", viewed_out, out)
    assert_same_bits("lse", viewed_lse, lse)


@pytest.mark.parametrize("cut", [Cut(), Cut(num_splits=3), CUTS["cascade"]])
def test_strided_results(backend: Backend, cut: Cut) -> None:
    """Out and lse may be views; what lies between their rows stays."""
    problem = build(small("results"), device=backend.device)
    plan = make_plan(problem, cut)
    out, lse = attend(problem, plan)
    n = plan.num_tokens
    wide_out = torch.full((n + 1, 2, 6, 24), 99.0, device=backend.device)
    wide_lse = torch.full((6, n + 1), 99.0, device=backend.device)
    octavo.run(plan, problem.spec, problem.q, problem.cache, wide_out[:, 0, :, 4:20], wide_lse.T)
    assert_same_bits("out", wide_out[:n, 0, :, 4:20], out)
    assert_same_bits("lse", wide_lse.T[:n], lse)
    wide_out[:n, 0, :, 4:20], wide_lse[:, :n] = 99.0, 99.0
    assert bool((wide_out == 99).all())
    assert bool((wide_lse == 99).all())
    octavo.run(plan, problem.spec, problem.q, problem.cache, wide_out[:, 1, :, 4:20])
    assert_same_bits("out without lse", wide_out[:n, 1, :, 4:20], out)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_fused_query_key_value(backend: Backend, order: str) -> None:
    """G19, G02: q, K and V are columns of one buffer; appended to pages, or read as raw keys."""
    length, heads, dim = 21, (4, 2), 16
    fused = torch.randn(length, (heads[0] + 2 * heads[1]) * dim, device=backend.device)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in fused.split([n * dim for n in (heads[0], heads[1], heads[1])], 1))
    assert not q.is_contiguous()
    case = Case("fused", AttentionSpec(*heads, dim), (length,), (length,), 8, order, torch.float32)
    problem = build(case, poison=NAN, device=backend.device)
    octavo.append(problem.cache, k, v, problem.batch.slot_mapping)
    problem = replace(problem, q=q, keys=(k,), values=(v,))
    assert_attention(problem, *attend(problem, make_plan(problem)))
    offsets = problem.batch.query_start_loc.cpu()
    raw = octavo.AttentionBatch.from_raw_keys(offsets, offsets, device=backend.device)
    raw_problem = replace(
        problem,
        batch=raw,
        cache=LayerCache(k.unsqueeze(1), v.unsqueeze(1)),
        case=replace(case, block_size=1),
    )
    assert_attention(problem, *attend(raw_problem, make_plan(raw_problem)))


@pytest.mark.parametrize("length", range(1, 17))
def test_fewer_keys_than_a_tile(backend: Backend, length: int) -> None:
    """G06: 14 heads over 2, 64 columns, page 16, 1 to 16 keys, up to 8 new."""
    case = Case("few", AttentionSpec(14, 2, 64), (min(length, 8),), (length,), dtype=torch.bfloat16)
    assert_attention(build(case), *solve(backend, case))


@pytest.mark.parametrize("num_splits", [None, 4])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size", "length"),
    [
        *((dim, dim, 16, 33) for dim in (8, 16, 80, 96, 112, 120, 128, 160, 192)),
        (256, 256, 16, 200),
        (256, 256, 32, 200),
        (192, 128, 16, 600),
        (8, 256, 16, 40),
        (512, 512, 16, 20),
    ],
)
def test_widths(
    backend: Backend, head_dim: int, value_dim: int, block_size: int, length: int, num_splits: int | None
) -> None:
    """G07, G09, G10, G15: head sizes that are no power of two; K and V of different widths."""
    spec = AttentionSpec(4, 2, head_dim, value_dim)
    case = Case("width", spec, (1,), (length,), block_size, dtype=torch.bfloat16)
    assert_attention(build(case), *solve(backend, case, Cut(num_splits=num_splits)))


def test_a_table_as_wide_as_it_must_be(backend: Backend) -> None:
    """G08: page 16, 129 keys, 9 columns; the next row of the table is 2^30."""
    case = Case("exact", AttentionSpec(2, 1, 8), (3, 1), (129, 0), dtype=torch.float32)
    problem = build(case, poison=NAN, device=backend.device)
    table = problem.batch.block_table[:, :9].contiguous()
    assert table[1].tolist() == [GUARD] * 9
    problem = replace(problem, batch=replace(problem.batch, block_table=table))
    for cut in (Cut(), Cut(num_splits=4), Cut(invariant=True)):
        assert_attention(problem, *attend(problem, make_plan(problem, cut)))


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (4, 4, 4), (3, 3, 3), (2, 4, 1)])
@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
def test_heads_folded_into_rows(backend: Backend, query_lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    """G12, G13, G16: one new token; as many new tokens as heads in a group; a table row per request."""
    case = Case("fold", AttentionSpec(*heads, 128), query_lens, (200, 40, 7), dtype=torch.float16)
    assert_attention(build(case), *solve(backend, case))


def test_page_numbers_past_16_bits(backend: Backend) -> None:
    """H05: pages 65535, 65536 and 69999 of 70000."""
    case = Case("far", AttentionSpec(1, 1, 8), (1,), (11,), 4, dtype=torch.float32)
    problem = build(case, device=backend.device)
    pages = torch.tensor([65536, 69999, 65535])
    caches = []
    for view in (problem.cache.k_cache, problem.cache.v_cache):
        large = view.new_full((70000, *view.shape[1:]), NAN)
        large[pages] = view[problem.batch.block_table[0, :3].long()]
        caches.append(large)
    problem = replace(
        problem,
        cache=LayerCache(*caches),
        batch=replace(problem.batch, block_table=pages.to(backend.device, torch.int32).unsqueeze(0)),
    )
    assert_attention(problem, *attend(problem, make_plan(problem)))
