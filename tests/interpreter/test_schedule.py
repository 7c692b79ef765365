"""The device's plan of a step: the facts that the CPU planner finds, and pieces that cover all keys evenly."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance.common import small
from octavo.batch import AttentionBatch
from octavo.bench.cases import Case, build
from octavo.kernels.triton import schedule
from octavo.kernels.triton.tiles import Tile
from octavo.launch import Operands, Plan, State
from octavo.planner import Planner
from octavo.spec import AttentionSpec, KVShard
from tolerance import assert_attention

attend_module = importlib.import_module("octavo.kernels.triton.attend")


def steps(
    query_lens: list[int], seq_lens: list[int], cut: schedule.Cut, shard: KVShard, slack: int = 0, **options: object
) -> tuple[schedule.Step, Plan, AttentionBatch]:
    """The device's facts and the CPU's plan of one batch with `slack` rows that belong to no sequence."""
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(len(seq_lens), 1000, dtype=torch.int32),
        num_tokens=sum(query_lens) + slack,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    sizes = batch.num_tokens, batch.num_seqs, cut
    memory = torch.full((schedule.step_size(*sizes),), 77, dtype=torch.int32)
    step = schedule.view_step(memory, *sizes)
    schedule.fill_step(step, batch.query_start_loc, batch.seq_lens, shard, cut, 16, {})
    planner = Planner(num_q_heads=1, value_dim=8, block_size=16, shard=shard, check=False, **options)
    return step, planner.plan(batch, num_splits=None if options else cut.num_splits), batch


@pytest.mark.parametrize("shard", [KVShard(), KVShard(3, 1, 2)], ids=["whole", "shard"])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1], [9000]), ([2, 0, 5, 1], [3, 8, 2, 2000]), ([1] * 40, [1, 5, 700, 4000] * 10), ([1] * 1100, [600] * 1100)],
)
def test_facts_are_those_of_the_cpu_planner(query_lens: list[int], seq_lens: list[int], shard: KVShard) -> None:
    step, plan, batch = steps(query_lens, seq_lens, schedule.Cut(num_pieces=8, num_heads=3), shard, slack=3)
    rows = sum(query_lens)
    assert torch.equal(step.positions[:rows], plan.positions[:rows])
    assert torch.equal(step.seq_lens, plan.seq_lens)
    assert torch.equal(step.kv_splits, plan.launches[0].kv_splits)
    at = 0
    for seq, n in enumerate(shard.local_count(batch.seq_lens).tolist()):
        parts, end = int(step.pieces[at, 2]), 0
        for part in range(parts):
            piece = step.pieces[at + part].tolist()
            assert piece[:4] == [seq, part, parts, end]
            assert piece[5:] == [sum(query_lens[:seq]), query_lens[seq], seq_lens[seq]]
            end = piece[4]
        assert end == n
        at += parts
    assert at <= len(step.pieces)
    assert not bool(step.pieces[at:, 6].any()), "a piece too many"
    assert step.tickets.shape == (3 * len(step.pieces),)
    assert not bool(step.tickets.any())


@pytest.mark.parametrize("shard", [KVShard(), KVShard(3, 1, 2)], ids=["whole", "shard"])
@pytest.mark.parametrize("cut", [schedule.Cut(3), schedule.Cut(8, 512)], ids=["equal", "invariant"])
def test_splits_are_those_of_the_cpu_planner(cut: schedule.Cut, shard: KVShard) -> None:
    seq_lens = [1, 4096 if shard.dcp_world == 1 else 3 * 4096, 0, 1000, 47, 512, 513]
    options = {} if cut.split_keys is None else {"batch_invariant": True}
    step, plan, _ = steps([1] * 7, seq_lens, cut, shard, **options)
    assert step.kv_splits.shape == (7, cut.num_splits + 1)
    assert torch.equal(step.kv_splits, plan.launches[0].kv_splits)
    assert step.pieces is None
    assert step.tickets is None


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["pieces", "invariant"])
def test_plans_in_buffers_lie_where_the_last_one_lay(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "on_device", staticmethod(lambda device: True))
    monkeypatch.setattr("octavo.planner._multiprocessors", lambda device: 8)
    planner = Planner(num_q_heads=2, value_dim=8, block_size=16, check=False, **options)
    buffers = planner.buffers(max_num_tokens=40, max_num_seqs=10, max_seq_len=2000)

    def batch(seq_lens: list[int], query_lens: list[int]) -> AttentionBatch:
        found = AttentionBatch.from_lengths(query_lens, seq_lens, torch.zeros(len(seq_lens), 125, dtype=torch.int32))
        return replace(found, max_seq_len=2000)

    def tensors(plan: Plan) -> list[Tensor]:
        launch = plan.launches[0]
        own = (plan.positions, plan.seq_lens, launch.kv_splits, launch.pieces, launch.tickets)
        return [x for x in own if x is not None]

    first = tensors(planner.plan(batch([1500, 3, 800], [1, 1, 1]), buffers=buffers))
    assert len(first) == 3 if options else 5
    at = [x.data_ptr() for x in first]
    for seq_lens, query_lens in (([7, 2000, 1], [1, 1, 1]), ([2000] * 10, [4] * 10), ([30, 40, 50], [1, 1, 1])):
        lengths = batch(seq_lens, query_lens)
        wanted = tensors(planner.plan(lengths))
        made = tensors(planner.plan(lengths, buffers=buffers))
        if len(seq_lens) == 3:
            assert [x.data_ptr() for x in made] == at
        for made_tensor, wanted_tensor in zip(made, wanted, strict=True):
            known = torch.ones(len(wanted_tensor), dtype=torch.bool)
            if wanted_tensor.shape[1:] == (8,) and not options:  # what is behind the last piece is undefined
                known = wanted_tensor[:, 6] > 0
            assert torch.equal(made_tensor[known], wanted_tensor[known])
    with pytest.raises(ValueError, match="max_num_tokens=40, max_num_seqs=10, max_seq_len=2000; make larger ones"):
        planner.plan(batch([1000] * 10, [30] * 10), buffers=buffers)
    with pytest.raises(ValueError, match="without shared prefixes"):
        planner.plan(batch([1000] * 10, [1] * 10), buffers=buffers, common_prefix_len=64)


def test_pieces_are_even() -> None:
    """One long sequence beside short ones: no piece is much longer than its share of the device."""
    seq_lens = [131072, *[4096] * 31]
    step, _, _ = steps([1] * 32, seq_lens, schedule.Cut(num_pieces=33, num_heads=1), KVShard())
    pieces = step.pieces[step.pieces[:, 6] > 0]
    lengths = pieces[:, 4] - pieces[:, 3]
    assert int(lengths.max()) <= 1.1 * sum(seq_lens) / 33
    assert int((pieces[:, 0] == 0).sum()) == 17
    even = steps([1] * 32, [8192] * 32, schedule.Cut(num_pieces=33, num_heads=1), KVShard())[0].pieces
    assert int(even[even[:, 6] > 0, 2].max()) == 1


def test_no_pieces_are_wanted() -> None:
    assert steps([1, 30], [40, 50], schedule.Cut(), KVShard())[0].pieces is None


def pieces_of(case: Case, bounds: list[list[int]], spare: int) -> Tensor:
    """Pieces [n + spare, 8] of sequences that are cut at the given keys."""
    rows = [
        [seq, part, len(cuts) - 1, *cuts[part : part + 2], sum(case.query_lens[:seq]), case.query_lens[seq], cuts[-1]]
        for seq, cuts in enumerate(bounds)
        for part in range(len(cuts) - 1)
    ]
    return torch.tensor(rows + [[9, 9, 9, 9, 9, 9, 0, 9]] * spare, dtype=torch.int32)


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", AttentionSpec(4, 2, 16), (1, 1, 1), (70, 9, 0), dtype=torch.float32),
        Case("verify", AttentionSpec(3, 1, 24, window_left=9, sinks=True), (2, 4, 1), (70, 9, 3), dtype=torch.float32),
        Case("two parts", AttentionSpec(3, 1, 48, 80), (2, 4, 1), (70, 9, 3), dtype=torch.float32),
        small("everything", (1, 4, 2), (70, 9, 1), logits_soft_cap=2.0, alibi="linear", sinks=True, shared=()),
    ],
    ids=lambda case: case.name,
)
def test_the_last_piece_merges_the_parts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, as a replayed graph would: the tickets are back at 0."""
    monkeypatch.setattr(attend_module, "choose", lambda shape: Tile(16, 16, 4, 2))
    problem = build(case, poison=float("nan"))
    planner = Planner(num_q_heads=case.spec.num_q_heads, value_dim=case.spec.v_dim, block_size=case.block_size)
    plan = planner.plan(problem.batch)
    _, second, third = case.seq_lens
    cuts = [[0, 20, 33, 64, 70], [0, 0, second], [0, third]]
    whole = plan.launches[0]
    pieces = pieces_of(case, cuts, 2)
    tickets = torch.zeros(len(pieces) * case.spec.num_kv_heads, dtype=torch.int32)
    launch = replace(whole, pieces=pieces, tickets=tickets)
    for _ in range(2):
        out = torch.full((1, plan.num_tokens, case.spec.num_q_heads, case.spec.v_dim), 99.0)
        lse = torch.full(out.shape[:3], 99.0)
        operands = Operands(problem.q, problem.cache, problem.alibi_slopes, problem.sinks)
        attend_module.attend(case.spec, plan, launch, operands, State(out, lse), {})
        assert_attention(problem, out[0], lse[0])
        assert not bool(tickets.any())
    with pytest.raises(ValueError, match=f"the plan has 1 tickets, this layer needs {len(tickets)}: give the planner"):
        attend_module.attend(case.spec, plan, replace(launch, tickets=tickets[:1]), operands, State(out, lse), {})
