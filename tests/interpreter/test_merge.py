"""`merge` in Triton: the contract of the CPU's, part by part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, triton
from octavo.launch import State
from tolerance import assert_same_bits, assert_within

EMPTY, NAN = float("-inf"), float("nan")


def make_parts(num_parts: int, num_tokens: int = 2, heads: int = 2, width: int = 24) -> State:
    generator = torch.Generator().manual_seed(num_parts)
    out = torch.randn(num_parts, num_tokens, heads, width, generator=generator)
    lse = 4 * torch.randn(num_parts, num_tokens, heads, generator=generator)
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    empty[:, 0] = True  # a token without any key
    return State(out.masked_fill(empty[..., None], NAN), lse.masked_fill(empty, EMPTY))


def merged(family: object, parts: State, sinks: Tensor | None = None, dtype: torch.dtype = torch.float32) -> State:
    assert parts.lse is not None
    out, lse = torch.full(parts.out.shape[1:], 99.0, dtype=dtype), torch.full(parts.lse.shape[1:], 99.0)
    family.merge(parts, sinks, State(out[None], lse[None]))
    return State(out, lse)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, EMPTY])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_parts", [1, 5, 33])
def test_against_float64(num_parts: int, dtype: torch.dtype, sinks: Tensor | None) -> None:
    parts = make_parts(num_parts)
    terms = parts.lse.double()
    if sinks is not None:
        terms = torch.cat([terms, sinks.double().expand(1, *terms.shape[1:])])
    lse = terms.logsumexp(0)
    weights = (parts.lse.double() - lse.masked_fill(lse == EMPTY, 0.0)).exp()
    out = (weights[..., None] * parts.out.double().nan_to_num()).sum(0)
    plain, actual = merged(cpu, parts, sinks, dtype), merged(triton, parts, sinks, dtype)
    assert_within("out", actual.out, out, plain.out)
    assert_within("lse", actual.lse, lse, plain.lse)


@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize("count", [1, 40])
def test_empty_parts_change_no_bit(count: int, where: int) -> None:
    """Longer neighbours bring them at the end, a shared prefix in front."""
    parts = make_parts(5)
    none = State(torch.full((count, *parts.out.shape[1:]), NAN), torch.full((count, *parts.lse.shape[1:]), EMPTY))
    padded = State(*(torch.cat([x[:where], y, x[where:]]) for x, y in zip(parts, none, strict=True)))
    wanted, actual = merged(triton, parts), merged(triton, padded)
    assert_same_bits("out", actual.out, wanted.out)
    assert_same_bits("lse", actual.lse, wanted.lse)


def test_one_part_keeps_its_bits() -> None:
    parts = make_parts(1)
    result = merged(triton, parts)
    assert_same_bits("out", result.out, parts.out[0].nan_to_num(0.0))
    assert_same_bits("lse", result.lse, parts.lse[0])


def test_rows_of_no_sequence_stay() -> None:
    parts = make_parts(3, num_tokens=4)
    out, lse = torch.full((1, 4, 2, 24), 99.0), torch.full((1, 4, 2), 99.0)
    triton.merge(parts, None, State(out, lse), torch.tensor([0, 1, 3], dtype=torch.int32))
    whole = merged(triton, parts)
    assert_same_bits("out", out[0, :3], whole.out[:3])
    assert_same_bits("lse", lse[0, :3], whole.lse[:3])
    assert bool((out[0, 3] == 99).all())
    assert bool((lse[0, 3] == 99).all())


def test_views_and_no_lse() -> None:
    parts = make_parts(3)
    wanted = merged(triton, parts)
    spread = State(*(x.movedim(0, -1).contiguous().movedim(-1, 0) for x in parts))
    assert not spread.out.is_contiguous()
    out, lse = torch.full((2, 2, 24, 2), 99.0), torch.full((2, 2), 99.0)
    triton.merge(spread, None, State(out[None, ..., 0], lse.T[None]))
    assert_same_bits("out", out[..., 0], wanted.out)
    assert_same_bits("lse", lse.T, wanted.lse)
    assert bool((out[..., 1] == 99).all())
    triton.merge(spread, None, State(out[None, ..., 1], None))
    assert_same_bits("out without lse", out[..., 1], wanted.out)


def test_no_rows() -> None:
    none = State(torch.empty(3, 0, 2, 24), torch.empty(3, 0, 2))
    assert merged(triton, none).out.shape == (0, 2, 24)
