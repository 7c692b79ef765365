"""Is an output right? Compared with the float64 oracle before anything is timed.

Plain attention in the same dtypes (scores and sums in float32, probabilities rounded to V's dtype, the output to
q's) has some largest error against the oracle. EAGER_ERRORS times that is allowed, and ULPS units in the last place of
the true value besides; infinities and NaN never are. The second part is relative to the value, not to 1: the mean of
thousands of values is small, and nothing but zeros would be near enough. Of 8-bit pages both take the numbers that the
pages stand for; where K is int8, the oracle's q is quantised by our definition and plain attention's is not, so that
either is right.

The oracle takes minutes on a long prefill, so rows are sampled: the first and the last of every sequence (of some,
where they are many) and some between. Of the other rows it is checked that they hold numbers. It runs where the
problem is: a GPU computes float64 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import reference
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem
from octavo.bench.work import row_bounds

EAGER_ERRORS = 3.0
"""How many times the largest error of plain attention is allowed."""

ULPS = 8.0
"""What is allowed besides, in units in the last place of the value: merging parts rounds a few times more."""

SPREAD = 16
"""Rows that are sampled besides those at the ends of sequences, evenly over the step."""

MAX_SEQS = 32
"""Sequences whose ends are sampled at most, evenly over the batch."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What some rows of the output must be.

    Args:
        rows: [n] int64, which ones.
        out: [n, num_q_heads, value_dim] float64.
        limit: the error that is allowed, likewise.
    """

    rows: Tensor
    out: Tensor
    limit: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an output did.

    Args:
        error, allowed: at the value that comes nearest to its limit or goes furthest past it; None: the output
            could not be compared.
        wrong: what is wrong with it; None: nothing.
    """

    error: float | None
    allowed: float | None
    wrong: str | None


def sample(case: Case, spread: int = SPREAD) -> list[tuple[int, int, int]]:
    """(row, its sequence, its position) of the rows to compare, in order; all of them where there are few."""
    places = [
        (i, position)
        for i, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True))
        for position in range(seq_len - query_len, seq_len)
    ]
    chosen = _evenly(len(places), spread)
    ends = _evenly(len(case.seq_lens), MAX_SEQS)
    for row, (i, _) in enumerate(places):
        at_end = row in (0, len(places) - 1) or places[row - 1][0] != i or places[row + 1][0] != i
        if at_end and i in ends:
            chosen.add(row)
    return [(row, *places[row]) for row in sorted(chosen)]


def _evenly(total: int, count: int) -> set[int]:
    """So many of the first `total` numbers, the first and the last among them; all of them where they are fewer."""
    return {int(i) for i in torch.linspace(0, total - 1, min(count, total)).round()}


def truth(problem: Problem) -> Truth:
    """The oracle's output and the error that is allowed, for the sampled rows of a problem that holds all keys.

    They are on the CPU, wherever the problem is.
    """
    assert not problem.shard.is_part
    places = sample(problem.case)
    rows = torch.tensor([row for row, _, _ in places], dtype=torch.int64)
    with problem.q.device:
        exact = _exact(problem, places, rows).cpu()
        plain = torch.stack([_eager_row(problem, *place) for place in places]).cpu() if places else exact
    unit = (plain.double() - exact).abs().max() if places else 0.0
    limit = EAGER_ERRORS * unit + ULPS * torch.finfo(problem.q.dtype).eps * exact.abs()
    return Truth(rows, exact, limit)


def judge(problem: Problem, truth: Truth, out: Tensor) -> Verdict:
    """Compare an output [num_tokens, num_q_heads, value_dim] in q's dtype with the truth."""
    shape = (problem.batch.num_tokens, problem.spec.num_q_heads, problem.spec.v_dim)
    if out.shape != shape or out.dtype != problem.q.dtype:
        return Verdict(
            None, None, f"the output is {out.dtype} {tuple(out.shape)}, it should be {problem.q.dtype} {shape}"
        )
    missing = int((~out.isfinite()).sum())
    if missing:
        return Verdict(None, None, f"{missing} of {out.numel()} values are not finite")
    if not truth.out.numel():
        return Verdict(0.0, 0.0, None)
    error = (out[truth.rows.to(out.device)].cpu().double() - truth.out).abs()
    worst = int((error / truth.limit).argmax())
    found, allowed = float(error.flatten()[worst]), float(truth.limit.flatten()[worst])
    wrong = f"its error is {found:.3g}, {allowed:.3g} is allowed" if found > allowed else None
    return Verdict(found, allowed, wrong)


def _exact(problem: Problem, places: list[tuple[int, int, int]], rows: Tensor) -> Tensor:
    spec, q = problem.spec, problem.q
    k_cache, v_cache = problem.cache.k_cache, problem.cache.v_cache
    if problem.cache.format.is_eight_bit:
        q, k_cache, v_cache = reference.real(problem.batch, q, problem.cache)
    slopes, sinks, table = problem.alibi_slopes, problem.sinks, problem.batch.block_table
    if not spec.causal:
        batch = AttentionBatch.from_lengths(problem.case.query_lens, problem.case.seq_lens, table, device=q.device)
        return reference.attention(spec, batch, q, k_cache, v_cache, alibi_slopes=slopes, sinks=sinks)[0][rows]
    # A causal row at position p sees what the last row of a sequence of p + 1 keys sees.
    lens = [max(0, position + 1) for _, _, position in places]
    seqs = torch.tensor([seq for _, seq, _ in places], dtype=torch.int64)
    batch = AttentionBatch.from_lengths([1] * len(places), lens, table[seqs], device=q.device)
    return reference.attention(spec, batch, q[rows], k_cache, v_cache, alibi_slopes=slopes, sinks=sinks)[0]


def _eager_row(problem: Problem, row: int, seq: int, position: int) -> Tensor:
    """Plain attention of one row, [num_q_heads, value_dim] in q's dtype."""
    spec, case = problem.spec, problem.case
    seq_len = case.seq_lens[seq]
    lo, hi = row_bounds(spec, seq_len - position, seq_len)
    seen = slice(int(lo[0]), int(hi[0]))
    stored = problem.values[seq][seen]
    k, v = (x.repeat_interleave(spec.group_size, 1) for x in (problem.keys[seq][seen].float(), stored.float()))
    scores = torch.einsum("hd,jhd->hj", problem.q[row].float(), k) * spec.scale
    if spec.logits_soft_cap is not None:
        scores = torch.tanh(scores / spec.logits_soft_cap) * spec.logits_soft_cap
    if problem.alibi_slopes is not None:
        distance = torch.arange(seen.start, seen.stop).float() - position
        if spec.alibi == "sqrt":
            distance = -distance.abs().sqrt()
        elif not spec.causal:
            distance = -distance.abs()
        scores = scores + problem.alibi_slopes[:, None] * distance
    if problem.sinks is not None:
        scores = torch.cat([scores, problem.sinks[:, None]], -1)
    weights_dtype = case.dtype if case.format.is_eight_bit else stored.dtype
    weights = scores.softmax(-1)[:, : len(stored)].to(weights_dtype).float()
    return torch.einsum("hj,jhd->hd", weights, v).to(problem.q.dtype)
