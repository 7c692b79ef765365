"""Batch invariance: in that mode a row's bits follow from its own keys, not from the step around it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import octavo
from conformance.backends import Backend
from conformance.harness import groups, skip_if_unserved
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, Problem, build
from octavo.planner import Planner, PrefixGroup
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention, assert_same_bits

NEW = 3
LENGTHS = (1100, 700, 3, 513, 1024)
SHARED = groups(((0, 1, 4), 640))
LAYERS = {
    "plain": {},
    "window": {"window_left": 300},
    "sinks": {"sinks": True, "window_left": 40},
    "cap-alibi": {"logits_soft_cap": 3.0, "alibi": "linear"},
    "encoder": {"causal": False},
    "fp8": {"kv_format": "fp8_e4m3"},
    "int8-kv": {"kv_format": "int8_kv", "window_left": 300},
    "int8-per-token": {"kv_format": "int8_per_token", "sinks": True},
}


def make(backend: Backend, layer: str, dtype: torch.dtype, *, page_seed: int = 0, rank: int = 0, world: int = 1):
    options = dict(LAYERS[layer])
    kv_format = options.pop("kv_format", "auto")
    spec = AttentionSpec(4, 2, 16, **options)
    case = Case("invariant", spec, (NEW,) * len(LENGTHS), LENGTHS, dtype=dtype, shared=SHARED, kv_format=kv_format)
    shard = KVShard(world, rank)
    problem = build(case, page_seed=page_seed, poison=float("nan"), shard=shard, device=backend.device)
    skip_if_unserved(problem)
    return problem


def step(
    problem: Problem,
    seqs: tuple[int, ...],
    *,
    drop: int = 0,
    keep: int = NEW,
    slack: int = 0,
    prefix: tuple[PrefixGroup, ...] = (),
) -> dict[int, tuple[Tensor, Tensor]]:
    """Rows [drop, keep) of the new tokens of some sequences as one step; per sequence their out and lse.

    `slack` is added to the bounds that the host claims to know. Keys past the rows kept are not there yet.
    """
    lengths = [LENGTHS[s] - (NEW - keep) for s in seqs]
    table = problem.batch.block_table[list(seqs)]
    batch = AttentionBatch.from_lengths([keep - drop] * len(seqs), lengths, table, device=table.device)
    batch = replace(batch, max_seq_len=batch.max_seq_len + slack, max_query_len=batch.max_query_len + slack)
    spec = problem.spec
    planner = Planner(
        num_q_heads=spec.num_q_heads,
        value_dim=spec.v_dim,
        block_size=16,
        device=problem.q.device,
        shard=problem.shard,
        batch_invariant=True,
    )
    plan = planner.plan(batch, prefix_levels=[prefix] if prefix else ())
    q = torch.cat([problem.q[s * NEW + drop : s * NEW + keep] for s in seqs])
    out = q.new_empty(len(q), spec.num_q_heads, spec.v_dim)
    lse = q.new_empty(len(q), spec.num_q_heads, dtype=torch.float32)
    sinks = None if problem.shard.dcp_world > 1 else problem.sinks
    octavo.run(plan, spec, q, problem.cache, out, lse, alibi_slopes=problem.alibi_slopes, sinks=sinks)
    n = keep - drop
    return {s: (out[i * n : (i + 1) * n], lse[i * n : (i + 1) * n]) for i, s in enumerate(seqs)}


def assert_same_rows(what: str, rows: dict, wanted: dict, drop: int = 0, keep: int = NEW) -> None:
    for s, (out, lse) in rows.items():
        assert_same_bits(f"out of sequence {s} {what}", out, wanted[s][0][drop:keep])
        assert_same_bits(f"lse of sequence {s} {what}", lse, wanted[s][1][drop:keep])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_bits_follow_from_the_row(backend: Backend, layer: str, dtype: torch.dtype, world: int) -> None:
    """J09, J16: alone, beside others, in any order, chunked, loose bounds, other pages, in a cascade."""
    problem = make(backend, layer, dtype, world=world, rank=world - 1)
    everyone = tuple(range(len(LENGTHS)))
    wanted = step(problem, everyone)
    if world == 1:
        whole = (torch.cat([wanted[s][i] for s in everyone]) for i in range(2))
        assert_attention(problem, *whole)
    for s in everyone:
        assert_same_rows("alone", step(problem, (s,)), wanted)
    assert_same_rows("in another order", step(problem, everyone[::-1]), wanted)
    assert_same_rows("beside one more", step(problem, (2, 0)), wanted)
    assert_same_rows("with loose bounds", step(problem, (3, 1), slack=9000), wanted)
    moved = make(backend, layer, dtype, page_seed=5, world=world, rank=world - 1)
    assert_same_rows("on other pages", step(moved, everyone), wanted)
    shared = PrefixGroup((0, 1, 4), problem.shard.local_count(640) // 16 * 16 * world - 1)
    assert_same_rows("in a cascade", step(problem, everyone, prefix=(shared,)), wanted)
    for row in range(NEW):
        # Causal rows do not see the later tokens, so they may run before those exist.
        keep = row + 1 if problem.spec.causal else NEW
        chunk = step(problem, (1, 3), drop=row, keep=keep)
        assert_same_rows("in a chunk", chunk, wanted, row, keep)


def test_the_cascade_of_the_test_shares_whole_splits(backend: Backend) -> None:
    """Otherwise the test above would compare a plan with itself."""
    problem = make(backend, "plain", torch.float32)
    planner = Planner(num_q_heads=4, value_dim=16, block_size=16, batch_invariant=True, device=backend.device)
    plan = planner.plan(problem.batch, prefix_levels=[groups(((0, 1, 4), 639))])
    assert len(plan.launches) == 2
    assert plan.launches[0].kv_splits.tolist() == [[0, 512]]


def test_one_call_form(backend: Backend) -> None:
    """The switch of `paged_attention`; it excludes a number of splits."""
    problem = make(backend, "plain", torch.float32)
    arguments = (problem.cache.k_cache, problem.cache.v_cache)
    batch = problem.batch
    wanted = step(problem, tuple(range(len(LENGTHS))))
    out, lse = octavo.paged_attention(
        problem.q[3:6],
        *arguments,
        batch.block_table[1:2],
        batch.seq_lens[1:2],
        torch.tensor([0, 3], dtype=torch.int32, device=backend.device),
        batch_invariant=True,
        backend=backend.name,
    )
    assert_same_rows("in one call", {1: (out, lse)}, wanted)
    with pytest.raises(ValueError, match=r"num_splits=2 contradicts batch_invariant"):
        octavo.paged_attention(
            problem.q, *arguments, batch.block_table, batch.seq_lens, batch.query_start_loc,
            num_splits=2, batch_invariant=True,
        )  # fmt: skip
