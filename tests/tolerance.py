"""The one tolerance of the tests: a few times the error that plain attention makes in the same dtypes.

An eager, unpaged attention is computed with the rounding that every fast kernel has too: scores and sums in
float32, probabilities in the dtype of V (`round_weights` says in what for 8-bit V), the output in the dtype of q. Its
largest error against the float64 oracle is the unit in which a kernel's error is measured. K, V and q are the numbers
that the cache's format makes of them: what a format itself loses is no kernel's error.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo import reference
from octavo.bench.cases import Problem
from octavo.cache import LayerCache
from octavo.quantise import quantise_rows

EAGER_ERRORS = 3.0
"""How many times the eager error is allowed."""

ULPS = 8.0
"""What is allowed besides, in units of the last place: merging parts rounds a few times more."""


def on_cpu(problem: Problem) -> Problem:
    """The same problem in the CPU's memory, where all results are compared."""
    if problem.q.device.type == "cpu":
        return problem
    batch, cache = problem.batch, problem.cache
    tables = {name: getattr(batch, name).cpu() for name in ("query_start_loc", "seq_lens", "block_table")}
    terms = {
        name: x if x is None else x.cpu()
        for name in ("alibi_slopes", "sinks", "q_descale")
        for x in [getattr(problem, name)]
    }
    return replace(
        problem,
        batch=replace(batch, **tables, slot_mapping=None),
        q=problem.q.cpu(),
        cache=LayerCache(
            *(x if x is None else x.cpu() for x in (cache.k_cache, cache.v_cache, cache.k_descale, cache.v_descale))
        ),
        keys=tuple(k.cpu() for k in problem.keys),
        values=tuple(v.cpu() for v in problem.values),
        **terms,
    )


def exact(problem: Problem) -> tuple[Tensor, Tensor]:
    """The float64 oracle's out and lse. The problem must hold all keys (not a shard of them)."""
    assert problem.shard.dcp_world == 1
    problem = on_cpu(problem)
    return reference.attention(
        problem.spec,
        problem.batch,
        *reference.real(problem.batch, problem.q, problem.cache, problem.q_descale),
        alibi_slopes=problem.alibi_slopes,
        sinks=problem.sinks,
    )


def eager(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same in float32 on unpaged keys, rounded where kernels round: out in q's dtype, lse in float32."""
    problem = on_cpu(problem)
    spec, batch = problem.spec, problem.batch
    out = torch.zeros(batch.num_tokens, spec.num_q_heads, spec.v_dim, dtype=problem.case.dtype)
    lse = torch.full((batch.num_tokens, spec.num_q_heads), -torch.inf)
    starts = batch.query_start_loc.tolist()
    q = real_query(problem)
    for i, stored in enumerate(zip(problem.keys, problem.values, strict=True)):
        k, v = (x.float().repeat_interleave(spec.group_size, 1) for x in stored)
        rows = slice(starts[i], starts[i + 1])
        positions = len(k) - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)
        lo, hi = spec.bounds(positions, torch.full_like(positions, len(k)))
        j = torch.arange(len(k))
        scores = torch.einsum("rhd,jhd->hrj", q[rows], k) * spec.scale
        if spec.logits_soft_cap is not None:
            scores = torch.tanh(scores / spec.logits_soft_cap) * spec.logits_soft_cap
        if problem.alibi_slopes is not None:
            distance = (j - positions[:, None]).float()
            if spec.alibi == "sqrt":
                distance = -distance.abs().sqrt()
            elif not spec.causal:
                distance = -distance.abs()
            scores = scores + problem.alibi_slopes[:, None, None] * distance
        scores = scores.masked_fill((j < lo[:, None]) | (j >= hi[:, None]), -torch.inf)
        if problem.sinks is not None:
            scores = torch.cat([scores, problem.sinks[:, None, None].expand(-1, len(positions), 1)], -1)
        total = scores.logsumexp(-1)
        weights = (scores - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp()[..., : len(k)]
        weights = round_weights(problem, weights)
        out[rows] = torch.einsum("hrj,jhd->rhd", weights, v).to(out.dtype)
        lse[rows] = total.T
    return out, lse


def real_query(problem: Problem) -> Tensor:
    """q [num_tokens, num_q_heads, head_dim] float32 as kernels see it: quantised where K is int8."""
    q = problem.q.float()
    if problem.cache.format.k_scaled_by_row:
        values, scale = quantise_rows(q)
        return values.float() * scale.unsqueeze(-1)
    if problem.q_descale is not None:
        by_row = problem.q_descale.repeat_interleave(problem.batch.query_start_loc.diff(), 0)
        q[: len(by_row)] *= by_row.repeat_interleave(problem.spec.group_size, 1).unsqueeze(-1)
    return q


def round_weights(problem: Problem, weights: Tensor) -> Tensor:
    """Probabilities [..., keys] as coarse as a kernel may have them, float32.

    V of 16 or 32 bits: in its dtype. `int8_kv`: as int8, 127 for the largest. Other 8-bit V: in 16 bits.
    """
    if problem.cache.format.v_scaled_by_channel and weights.shape[-1]:
        unit = weights.amax(-1, keepdim=True) / 127
        return torch.where(unit > 0, (weights / unit).round() * unit, 0.0)
    dtype = problem.cache.v_cache.dtype
    if dtype.itemsize == 1:
        dtype = problem.case.dtype if problem.case.dtype.itemsize == 2 else torch.float16
    return weights.to(dtype).float()


def assert_within(what: str, actual: Tensor, true: Tensor, plain: Tensor) -> None:
    """Fail unless `actual` is as near to `true` as `plain` is, up to the factors above.

    Infinities must agree in place and sign; NaN, and an infinity where a number should be, never pass.

    Args:
        what: named in the message.
        actual: what a kernel gave, any float dtype.
        true: float64, same shape.
        plain: the eager result, same shape, in the dtype that sets the unit of the last place.
    """
    assert actual.shape == true.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(true.shape)}"
    actual, true, plain = actual.cpu().double(), true.cpu(), plain.cpu()
    precise = plain.double()
    finite = true.isfinite()
    wrong = (actual.isfinite() != finite) | (~finite & (actual != true))
    assert not bool(wrong.any()), (
        f"{what}: {int(wrong.sum())} values not finite where they should be, or the other way round; "
        f"the first at {wrong.nonzero()[0].tolist()}: {actual[wrong][0]}, not {true[wrong][0]}"
    )
    if not bool(finite.any()):
        return
    unit = float((precise - true)[finite].abs().max())
    limit = EAGER_ERRORS * unit + ULPS * torch.finfo(plain.dtype).eps * true.abs().clamp(min=1.0)
    error = torch.where(finite, (actual - true).abs(), 0.0)
    worst = int((error / limit.masked_fill(~finite, 1.0)).argmax())
    assert bool((error <= limit)[finite].all()), (
        f"{what}: error {float(error.flatten()[worst]):.3g} at {_index(worst, error)}, the eager one is "
        f"{unit:.3g}; {float(actual.flatten()[worst])} should be {float(true.flatten()[worst])}"
    )


def assert_attention(problem: Problem, out: Tensor, lse: Tensor, what: str = "") -> None:
    """Fail unless out and lse are the attention of a (whole) problem, in the dtypes that they should have."""
    name = f"{problem.case.name} {what}".strip()
    assert out.dtype == problem.case.dtype, f"{name}: out is {out.dtype}, the case says {problem.case.dtype}"
    assert lse.dtype == torch.float32, f"{name}: lse is {lse.dtype}"
    (true_out, true_lse), (plain_out, plain_lse) = exact(problem), eager(problem)
    assert_within(f"{name}: lse", lse, true_lse, plain_lse)
    assert_within(f"{name}: out", out, true_out, plain_out)


def assert_same_bits(what: str, actual: Tensor, wanted: Tensor) -> None:
    """Fail unless two tensors hold the same bits, NaN and the sign of zero included."""
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape, f"{what}: {tuple(actual.shape)} and {tuple(wanted.shape)}"
    actual, wanted = actual.cpu(), wanted.cpu()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differs = actual.contiguous().view(integer) != wanted.contiguous().view(integer)
    assert not bool(differs.any()), (
        f"{what}: {int(differs.sum())} of {differs.numel()} values differ, the first at "
        f"{differs.nonzero()[0].tolist()}: {actual[differs][0]} and {wanted[differs][0]}"
    )


def _index(flat: int, tensor: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]
