"""Encoder and cross attention: raw keys, queries and keys of different lengths, no causal order."""

from __future__ import annotations

import pytest
import torch

from conformance.backends import Backend
from conformance.harness import Cut, attend, make_plan, solve
from conformance.pairwise import covering_array
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem, build
from octavo.cache import LayerCache
from octavo.spec import AttentionSpec
from tolerance import assert_attention

ROWS = covering_array(
    {
        "mask": [
            {"causal": False},
            {"causal": False, "window_left": 4, "window_right": 4},
            {"causal": False, "window_left": 0, "window_right": 2},
            {"causal": True},
        ],
        "logits_soft_cap": [None, 1.0],
        "alibi": [None, "linear", "sqrt"],
        "sinks": [False, True],
        "heads": [(2, 2), (6, 2), (7, 1)],
        "dims": [(8, 8), (80, 80), (64, 32)],
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "split": [None, 3, "invariant"],
        "lengths": [
            ((13, 1, 30, 0), (13, 1, 30, 0)),  # encoder: every key is a query
            ((3, 20, 1, 2), (40, 7, 0, 65)),  # cross attention
        ],
    }
)


def on_raw_keys(problem: Problem) -> Problem:
    """The same problem with K and V as they come out of a projection, [num_keys, heads, width]."""
    offsets = torch.tensor([0, *problem.case.seq_lens]).cumsum(0).to(torch.int32)
    k, v = torch.cat(problem.keys), torch.cat(problem.values)
    return Problem(
        case=Case("raw", problem.spec, problem.case.query_lens, problem.case.seq_lens, 1, dtype=problem.case.dtype),
        shard=problem.shard,
        batch=AttentionBatch.from_raw_keys(problem.batch.query_start_loc.cpu(), offsets, device=problem.q.device),
        q=problem.q,
        cache=LayerCache(k.unsqueeze(1), v.unsqueeze(1)),
        keys=problem.keys,
        values=problem.values,
        alibi_slopes=problem.alibi_slopes,
        sinks=problem.sinks,
    )


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_raw_and_paged_keys(backend: Backend, row: dict) -> None:
    """Every pair of options over raw keys, and the same over pages of 16."""
    spec = AttentionSpec(
        *row["heads"],
        *row["dims"],
        logits_soft_cap=row["logits_soft_cap"],
        alibi=row["alibi"],
        sinks=row["sinks"],
        **row["mask"],
    )
    case = Case("encoder", spec, *row["lengths"], dtype=row["dtype"])
    invariant = row["split"] == "invariant"
    cut = Cut(None if invariant else row["split"], invariant=invariant)
    problem = build(case, device=backend.device)
    raw = on_raw_keys(problem)
    assert_attention(problem, *attend(raw, make_plan(raw, cut)), what=f"raw {row}")
    assert_attention(problem, *solve(backend, case, cut), what=f"paged {row}")


def test_raw_keys_are_refused_when_offsets_differ_in_number() -> None:
    with pytest.raises(ValueError, match="query_start_loc and key_start_loc"):
        AttentionBatch.from_raw_keys(
            torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
        )
