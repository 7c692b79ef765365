"""Kind D: scale, soft cap, ALiBi, range: closed forms with a few keys of known score."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import octavo
from conformance.backends import Backend
from conformance.common import small
from conformance.harness import solve
from octavo.bench.cases import build
from tolerance import assert_within

NAN = float("nan")


def attend_scores(
    backend: Backend, scores: Sequence[float], *, new: int = 1, **options: object
) -> tuple[Tensor, Tensor]:
    """The weights of keys whose q . k is given: out [new, num_keys] (V is one-hot) and lse [new].

    The keys stand in one page of 16 rows whose rest is NaN.
    """
    n = len(scores)
    k, v = torch.full((2, 1, 16, 1, 16), NAN)
    k[0, :n] = 0.0
    k[0, :n, 0, 0] = torch.tensor(scores)
    v[0, :n] = 0.0
    v[0, :n, 0, :n] = torch.eye(n)
    q = torch.zeros(new, 1, 16)
    q[..., 0] = 1.0
    moved = {name: x.to(backend.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    out, lse = octavo.paged_attention(
        *(x.to(backend.device) for x in (q, k, v)),
        torch.tensor([[0]], dtype=torch.int32, device=backend.device),
        torch.tensor([n], dtype=torch.int32, device=backend.device),
        torch.tensor([0, new], dtype=torch.int32, device=backend.device),
        backend=backend.name,
        **{"softmax_scale": 1.0} | moved,
    )
    return out[:, 0, :n], lse[:, 0]


def closed_form(scores: list[float], sink: float | None = None) -> tuple[list[float], float]:
    """Softmax by hand: weights of the keys and the natural LSE."""
    everything = scores if sink is None else [*scores, sink]
    peak = max(everything)
    total = sum(math.exp(s - peak) for s in everything)
    return [math.exp(s - peak) / total for s in scores], peak + math.log(total)


def check(out: Tensor, lse: Tensor, weights: list[float], log: float) -> None:
    true_out, true_lse = torch.tensor([weights]).double(), torch.tensor([log]).double()
    assert_within("weights", out, true_out, true_out.float())
    assert_within("lse", lse, true_lse, true_lse.float())


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("alibi", [None, "linear", "sqrt"])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_transforms_by_hand(
    backend: Backend,
    scale: float,
    cap: float | None,
    alibi: str | None,
    sink: float | None,
    causal: bool,
    num_splits: int | None,
) -> None:
    """D05, D06: scale, then cap, then bias by distance (0 on the own key), then the sink; base e."""
    products, slope = [4.0, -2.5, 1.0], 0.3
    scores = []
    for j, product in enumerate(products):
        s = product * scale
        s = s if cap is None else cap * math.tanh(s / cap)
        distance = 2 - j
        s -= 0.0 if alibi is None else slope * (distance if alibi == "linear" else math.sqrt(distance))
        scores.append(s)
    out, lse = attend_scores(
        backend,
        products,
        softmax_scale=scale,
        causal=causal,
        logits_soft_cap=cap,
        alibi_slopes=None if alibi is None else torch.tensor([slope]),
        sqrt_alibi=alibi == "sqrt",
        sinks=None if sink is None else torch.tensor([sink]),
        num_splits=num_splits,
    )
    check(out, lse, *closed_form(scores, sink))


@pytest.mark.parametrize("alibi", ["linear", "sqrt"])
def test_bias_of_keys_after_the_query(backend: Backend, alibi: str) -> None:
    """Not causal: the bias falls on both sides of the query; three rows of three keys."""
    out, lse = attend_scores(
        backend,
        [1.0, 2.0, -1.0],
        new=3,
        causal=False,
        alibi_slopes=torch.tensor([0.7]),
        sqrt_alibi=alibi == "sqrt",
    )
    for p in range(3):
        distances = [abs(p - j) if alibi == "linear" else math.sqrt(abs(p - j)) for j in range(3)]
        scores = [s - 0.7 * d for s, d in zip([1.0, 2.0, -1.0], distances, strict=True)]
        check(out[p : p + 1], lse[p : p + 1], *closed_form(scores))


def test_cap_comes_before_the_mask(backend: Backend) -> None:
    """D01: cap 30, 5 keys of a page of 16, scores near -30: the other 11 get no weight."""
    scores = [-1000.0, -200.0, -150.0, -1e4, -90.0]
    out, lse = attend_scores(backend, scores, logits_soft_cap=30.0)
    check(out, lse, *closed_form([30 * math.tanh(s / 30) for s in scores]))


@pytest.mark.parametrize("score", [1.0, 100.0, 4400.0, 5000.0, 1e4, -1e4, 3e38])
def test_cap_saturates(backend: Backend, score: float) -> None:
    """D03: no inf / inf for large scores."""
    out, lse = attend_scores(backend, [score], logits_soft_cap=50.0)
    check(out, lse, [1.0], 50 * math.tanh(score / 50))


def test_limits(backend: Backend) -> None:
    """A huge cap and slopes of 0 change nothing; a window that holds all keys changes no bit."""
    scores = [1.5, -0.5, 3.0]
    out, lse = attend_scores(backend, scores)
    check(*attend_scores(backend, scores, logits_soft_cap=1e6), out[0].tolist(), float(lse))
    for same in ({"alibi_slopes": torch.zeros(1)}, {"window_left": 2}, {"window_right": 0, "causal": False}):
        same_out, same_lse = attend_scores(backend, scores, **same)
        assert torch.equal(same_out, out)
        assert torch.equal(same_lse, lse)


def test_every_option_changes_the_result(backend: Backend) -> None:
    """D04, D11: calls that differ in one option give different results, in any order of calls."""
    slopes = torch.tensor([0.4])
    calls: list[dict[str, object]] = [
        {},
        {"softmax_scale": 3.0},
        {"logits_soft_cap": 5.0},
        {"logits_soft_cap": 2.0},
        {"alibi_slopes": slopes},
        {"alibi_slopes": slopes, "sqrt_alibi": True},
        {"sinks": torch.tensor([1.0])},
        {"window_left": 1},
        {"causal": False},
        {"causal": False, "window_right": 0, "window_left": 0},
        {"causal": False, "window_right": 1},
    ]
    results = []
    for options in [*calls, *reversed(calls)]:
        results.append(attend_scores(backend, [4.0, -2.5, 1.0, 2.0], new=3, **options))
    for i, j in itertools.combinations(range(len(calls)), 2):
        assert not torch.equal(results[i][0], results[j][0]), (calls[i], calls[j])
        assert not torch.equal(results[i][1], results[j][1]), (calls[i], calls[j])
    for i, again in enumerate(reversed(range(len(calls), 2 * len(calls)))):
        assert torch.equal(results[i][0], results[again][0])
        assert torch.equal(results[i][1], results[again][1])


def test_scores_beyond_half_range(backend: Backend) -> None:
    """D10: float16 with q = k = 40 over 128 columns (a product of 204800)."""
    k, v = torch.full((1, 16, 1, 128), 40.0).half(), torch.full((1, 16, 1, 128), 2.0).half()
    table, one = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    out, lse = octavo.paged_attention(
        *(x.to(backend.device) for x in (k[0, :1], k, v, table, one, torch.tensor([0, 1], dtype=torch.int32))),
        softmax_scale=1.0,
        backend=backend.name,
    )
    assert bool((out == 2.0).all())
    true = torch.full_like(lse, 204800).double() + math.log(9)
    assert_within("lse", lse, true, true.float())


def test_slopes_of_half_precision(backend: Backend) -> None:
    """D08: the one-call form converts slopes and sinks; `run` refuses them (tests/test_run.py)."""
    problem = build(small("slopes", alibi="linear", sinks=True), device=backend.device)
    slopes, sinks = problem.alibi_slopes.bfloat16(), problem.sinks.bfloat16()
    arguments = (problem.q, problem.cache.k_cache, problem.cache.v_cache, problem.batch.block_table)
    arguments += (problem.batch.seq_lens, problem.batch.query_start_loc)
    half = octavo.paged_attention(*arguments, alibi_slopes=slopes, sinks=sinks)
    single = octavo.paged_attention(*arguments, alibi_slopes=slopes.float(), sinks=sinks.float())
    assert torch.equal(half[0], single[0])
    assert torch.equal(half[1], single[1])


@pytest.mark.parametrize("alibi", [None, "linear", "sqrt"])
def test_decode_equals_prefill_rows(backend: Backend, alibi: str | None) -> None:
    """One step of many rows, or one row a step: the same attention."""
    options = {"alibi": alibi, "window_left": 9, "logits_soft_cap": 2.0, "sinks": True}
    prefill = small("rows", (21,), (21,), shared=(), **options)
    problem = build(prefill, device=backend.device)
    out, lse = solve(backend, prefill)
    for n in range(1, 22):
        arguments = {"alibi_slopes": problem.alibi_slopes, "sqrt_alibi": alibi == "sqrt"}
        one_out, one_lse = octavo.paged_attention(
            problem.q[n - 1 : n],
            problem.cache.k_cache,
            problem.cache.v_cache,
            problem.batch.block_table,
            torch.tensor([n], dtype=torch.int32, device=backend.device),
            torch.tensor([0, 1], dtype=torch.int32, device=backend.device),
            window_left=9,
            logits_soft_cap=2.0,
            sinks=problem.sinks,
            **arguments,
        )
        assert_within(f"out of row {n - 1}", one_out[0], out[n - 1].double(), out[n - 1])
        assert_within(f"lse of row {n - 1}", one_lse[0], lse[n - 1].double(), lse[n - 1])
