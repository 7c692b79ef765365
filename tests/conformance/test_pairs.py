"""Every pair of options, not single ones, against the oracle: output and LSE."""

from __future__ import annotations

import itertools

import pytest
import torch

from conformance.backends import Backend
from conformance.harness import Cut, groups, solve
from conformance.pairwise import covering_array
from octavo.bench.cases import Case, build
from octavo.formats import EIGHT_BIT_FORMATS
from octavo.spec import AttentionSpec
from tolerance import assert_attention

SEQ_LENS = (45, 70, 38, 52, 1, 0)
EVERYONE = range(6)
SHARED = groups((EVERYONE, 26), ((0, 2), 35), ((1, 3), 49))

FACTORS = {
    "mask": [
        {"causal": True},
        {"causal": True, "window_left": 6},
        {"causal": True, "window_left": 0},
        {"causal": True, "window_left": 33},
        {"causal": False},
        {"causal": False, "window_left": 7, "window_right": 3},
        {"causal": False, "window_right": 5},
    ],
    "logits_soft_cap": [None, 0.7],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "softmax_scale": [None, 0.3],
    "heads": [(1, 1), (6, 2), (14, 2), (5, 1), (4, 4)],
    "dims": [(8, 8), (80, 80), (96, 96), (112, 112), (192, 128), (16, 24)],
    "dtypes": [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    "kv_format": ["auto", *EIGHT_BIT_FORMATS],
    "block_size": [1, 3, 8, 16],
    "order": ["HND", "NHD"],
    "query_lens": [
        (1, 1, 1, 1, 1, 0),  # decode, and a sequence without rows
        (1, 9, 0, 4, 3, 2),  # mixed; rows before the first key, and rows of a sequence without keys
        (4, 4, 4, 4, 1, 1),  # speculative verification
        (45, 16, 38, 5, 1, 0),  # prefill beside chunks
    ],
    "split": [None, 1, 2, 5, "invariant"],
    "cascade": [
        (),
        (groups((EVERYONE, 26)),),
        (groups((EVERYONE, 26)), groups(((0, 2), 35), ((1, 3), 49))),
        (groups(((3, 1), 49)),),
    ],
    "shard": [(1, 1), (2, 1), (3, 4), (4, 16)],
}

ROWS = covering_array(FACTORS)


def test_every_pair_occurs() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(str(row[a]), str(row[b])) for row in ROWS}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_pairs(backend: Backend, row: dict) -> None:
    case, cut = from_row(row)
    out, lse = solve(backend, case, cut)
    assert_attention(build(case), out, lse, str(row))


def from_row(row: dict) -> tuple[Case, Cut]:
    num_q_heads, num_kv_heads = row["heads"]
    spec = AttentionSpec(
        num_q_heads,
        num_kv_heads,
        *row["dims"],
        softmax_scale=row["softmax_scale"],
        logits_soft_cap=row["logits_soft_cap"],
        alibi=row["alibi"],
        sinks=row["sinks"],
        **row["mask"],
    )
    dtype, cache_dtype = row["dtypes"]
    case = Case(
        "pairs",
        spec,
        row["query_lens"],
        SEQ_LENS,
        block_size=row["block_size"],
        order=row["order"],
        dtype=dtype,
        cache_dtype=cache_dtype,
        kv_format=row["kv_format"],
        shared=SHARED,
    )
    invariant = row["split"] == "invariant"
    world, interleave = row["shard"]
    return case, Cut(
        num_splits=None if invariant else row["split"],
        cascade=row["cascade"],
        world=world,
        interleave=interleave,
        invariant=invariant,
    )
