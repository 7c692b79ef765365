"""Plans: every row meets each of its keys exactly once, and what contradicts itself is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.batch import AttentionBatch
from octavo.launch import Launch, Plan, Workspace, check_exact_cover
from octavo.planner import INVARIANT_SPLIT, Planner, PrefixGroup
from octavo.spec import KVShard

GUARD = 2**30


def make(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    block_size: int = 4,
    shard: KVShard = KVShard(),
    prefix: int = 0,
) -> AttentionBatch:
    """Sequences that share the pages of their first `prefix` keys, and no others."""
    local = [shard.local_count(n) for n in seq_lens]
    width = max((-(-n // block_size) for n in local), default=0) + 1
    table = torch.full((len(seq_lens), width), GUARD, dtype=torch.int32)
    shared = -(-shard.local_count(prefix) // block_size)
    free = shared
    for s, n in enumerate(local):
        for column in range(-(-n // block_size)):
            table[s, column] = column if column < shared else free
            free += column >= shared
    return AttentionBatch.from_lengths(query_lens, seq_lens, table)


def planner(shard: KVShard = KVShard(), block_size: int = 4, **options: object) -> Planner:
    return Planner(num_q_heads=2, value_dim=8, block_size=block_size, shard=shard, **options)


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=6)
SHARDS = st.integers(1, 4).flatmap(
    lambda world: st.builds(KVShard, st.just(world), st.integers(0, world - 1), st.integers(1, 9))
)


@st.composite
def prefix_trees(draw: st.DrawFn, num_seqs: int, longest: int) -> list[list[PrefixGroup]]:
    """Levels of groups, each group part of one of the level before."""
    levels, parents = [], [tuple(range(num_seqs))] if num_seqs else []
    length = 0
    for _ in range(draw(st.integers(0, 3))):
        level = []
        for parent in parents:
            members = draw(st.permutations(parent))
            cut = draw(st.integers(0, len(members)))
            for seqs in (members[:cut], members[cut:]):
                if seqs and draw(st.booleans()):
                    level.append(PrefixGroup(tuple(seqs), draw(st.integers(length, longest))))
        length = max([length, *(group.length for group in level)])
        levels.append(level)
        parents = [group.seqs for group in level]
    return levels


@given(
    data=st.data(),
    lengths=LENGTHS,
    shard=SHARDS,
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_splits=st.sampled_from([None, 1, 2, 5]),
    padding=st.integers(0, 3),
    slack=st.integers(0, 20),
)
@settings(max_examples=150)
def test_exact_cover(
    data: st.DataObject,
    lengths: list[tuple[int, int]],
    shard: KVShard,
    block_size: int,
    num_splits: int | None,
    padding: int,
    slack: int,
) -> None:
    """Random batches, splits, levels and shards; rows of no sequence; bounds that are too large."""
    longest = max((n for _, n in lengths), default=0)
    levels = data.draw(prefix_trees(len(lengths), longest + 5))
    batch = make([q for q, _ in lengths], [n for _, n in lengths], block_size=block_size, shard=shard, prefix=longest)
    batch = replace(
        batch,
        num_tokens=batch.num_tokens + padding,
        max_query_len=batch.max_query_len + slack,
        max_seq_len=batch.max_seq_len + slack,
    )
    plan = planner(shard, block_size).plan(batch, num_splits=num_splits, prefix_levels=levels)
    check_exact_cover(plan)
    positions, seq_lens = [], []
    for q_len, seq_len in lengths:
        positions += range(seq_len - q_len, seq_len)
        seq_lens += [seq_len] * q_len
    n = len(positions)
    assert plan.num_tokens == n + padding
    assert plan.positions[:n].tolist() == positions
    assert plan.seq_lens.tolist() == seq_lens + [0] * padding


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000)), min_size=1, max_size=4),
    shard=SHARDS,
    prefix=st.integers(0, 1500),
)
def test_exact_cover_of_the_invariant_mode(lengths: list[tuple[int, int]], shard: KVShard, prefix: int) -> None:
    """Boundaries are multiples of the split from the sequence's own start, with and without a prefix."""
    batch = make([q for q, _ in lengths], [n for _, n in lengths], block_size=16, shard=shard, prefix=prefix)
    plan = planner(shard, 16, batch_invariant=True).plan(batch, common_prefix_len=prefix)
    check_exact_cover(plan)
    for piece in plan.pieces():
        if piece.kv_start < piece.kv_end:
            assert piece.kv_start % INVARIANT_SPLIT == 0
            assert piece.kv_end - piece.kv_start <= INVARIANT_SPLIT


def cover(bounds: list[int], first_state: int = 0, num_states: int = 4, rows: list[int] | None = None) -> Plan:
    launches = [
        Launch(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([bounds], dtype=torch.int32),
            first_state,
            None if rows is None else torch.tensor(rows),
        )
    ]
    if rows is not None:
        launches.append(Launch(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[5, 9]]), 2))
    return Plan(
        launches=tuple(launches),
        positions=torch.tensor([8], dtype=torch.int32),
        seq_lens=torch.tensor([9], dtype=torch.int32),
        block_table=torch.zeros(1, 3, dtype=torch.int32),
        slot_mapping=None,
        num_states=num_states,
        block_size=4,
        num_blocks=None,
        workspace=Workspace("cpu"),
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (cover([0, 4, 8]), "row 0 meets 8 of 9 keys"),
        (cover([1, 4, 9]), r"keys \[0, 1\) are missing"),
        (cover([0, 4, 2]), "is reversed"),
        (cover([0, 4, 9], first_state=3), "outside the plan's 4 states"),
        (cover([0, 4], rows=[0]), r"keys \[4, 5\) are missing or met twice"),
        (cover([0, 6], rows=[0]), "missing or met twice"),
        (cover([0, 2, 4, 5], rows=[0]), "row 0 writes a state twice"),
    ],
)
def test_the_cover_check_bites(plan: Plan, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_exact_cover(plan)


def test_the_cover_check_accepts_a_cover() -> None:
    check_exact_cover(cover([0, 4, 9]))
    check_exact_cover(cover([0, 3, 5], rows=[0]))


@given(lengths=LENGTHS.filter(bool), num_splits=st.integers(1, 6))
def test_splits_follow_pages(lengths: list[tuple[int, int]], num_splits: int) -> None:
    """As many parts as asked for, each but the last a whole number of pages."""
    batch = make([q for q, _ in lengths], [n for _, n in lengths])
    plan = planner().plan(batch, num_splits=num_splits)
    if not batch.num_tokens:
        assert plan.launches == ()
        return
    (launch,) = plan.launches
    assert launch.num_splits == plan.num_states == num_splits
    for (_, n), bounds in zip(lengths, launch.kv_splits.tolist(), strict=True):
        assert bounds[0] == 0
        assert bounds[-1] == n
        assert all(edge == n or edge % 4 == 0 for edge in bounds)


def test_one_state_writes_the_result_itself() -> None:
    plan = planner().plan(make([1, 3], [20, 9]))
    assert plan.num_states == 1
    assert len(plan.launches) == 1
    assert plan.launches[0].rows is None


def test_a_prefix_is_one_sequence() -> None:
    """F04: 16 requests that share 1024 keys: the prefix launch has one sequence with all 16 rows."""
    plan = planner(block_size=16).plan(
        make([1] * 16, [1024 + s for s in range(16)], block_size=16, prefix=1024), common_prefix_len=1000
    )
    prefix, rest = plan.launches
    assert prefix.query_start_loc.tolist() == [0, 16]
    assert prefix.kv_splits.tolist() == [[0, 1000]]
    assert rest.kv_splits.tolist() == [[1000, 1024 + s] for s in range(16)]
    assert plan.num_states == 2


def test_two_levels_with_interleaved_groups() -> None:
    """Groups need not be neighbours; a member that ends inside the prefix has nothing left to do."""
    batch = make([1, 2, 1, 1], [30, 28, 6, 25], prefix=24)
    levels = [[PrefixGroup((0, 1, 2, 3), 8)], [PrefixGroup((3, 1), 21)]]
    plan = planner().plan(batch, prefix_levels=levels)
    check_exact_cover(plan)
    outer, inner, rest = plan.launches
    assert outer.kv_splits.tolist() == [[0, 8]]
    assert inner.kv_splits.tolist() == [[8, 21]]
    assert inner.rows[: int(inner.query_start_loc[-1])].tolist() == [1, 2, 4]
    assert rest.kv_splits.tolist() == [[8, 30], [21, 28], [6, 6], [21, 25]]


def test_graph_padding() -> None:
    """J15: 5 real requests of 8; padding has length 0, repeated offsets, and rows of no sequence."""
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 1, 2, 3, 4, 5, 5, 5, 5], dtype=torch.int32),
        seq_lens=torch.tensor([9, 8, 7, 6, 5, 0, 0, 0], dtype=torch.int32),
        block_table=torch.cat([torch.arange(24).view(8, 3)[:5], torch.full((3, 3), GUARD)]).to(torch.int32),
        num_tokens=8,
        max_query_len=1,
        max_seq_len=4096,
    )
    for num_splits in (None, 3):
        plan = planner(num_blocks=24).plan(batch, num_splits=num_splits)
        check_exact_cover(plan)
        assert {piece.row for piece in plan.pieces()} == {0, 1, 2, 3, 4}
        assert plan.seq_lens.tolist() == [9, 8, 7, 6, 5, 0, 0, 0]


def test_lengths_are_not_counted_twice() -> None:
    """J02, J10: the new tokens are part of seq_lens; offsets have one entry more than sequences."""
    batch = AttentionBatch.from_lengths([3, 3], [13, 23], [[0] * 4, [1] * 6])
    assert (batch.num_tokens, batch.num_seqs) == (6, 2)
    assert (batch.max_query_len, batch.max_seq_len) == (3, 23)
    assert planner().plan(batch).positions.tolist() == [10, 11, 12, 20, 21, 22]


# --- another cache group's pages --------------------------------------------------------------------


def test_update_block_table() -> None:
    """Every launch sees the new table; the rest of the plan, and the plan it came from, stay."""
    batch = make([1, 1], [20, 30], prefix=16)
    plan = planner().plan(batch, num_splits=2, common_prefix_len=14)
    table, slots = batch.block_table + 50, torch.tensor([7, 9])
    other = plan.update_block_table(table, slots)
    assert other.block_table is table
    assert other.slot_mapping is slots
    assert other.launches is plan.launches
    assert plan.block_table is batch.block_table
    assert plan.slot_mapping is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table[:1], "block_table must have 2 rows"),
        (lambda table: table.long(), "block_table must be torch.int32"),
        (lambda table: table.tolist(), "block_table must be a torch tensor"),
        (lambda table: table[:, :3], "block_table"),
        (lambda table: table[0], "block_table must have 2 dimension"),
    ],
)
def test_update_block_table_refuses_tables_of_other_batches(change, message: str) -> None:
    """G16, G17: a row per request, as wide as the lengths need, whatever group it comes from."""
    batch = make([1, 1], [20, 30])
    plan = planner().plan(batch)
    with pytest.raises((ValueError, TypeError), match=message):
        plan.update_block_table(change(batch.block_table), None)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 0}, "num_splits must be None or at least 1, got 0"),
        ({"num_splits": -2}, "num_splits must be None or at least 1, got -2"),
        ({"common_prefix_len": -1}, "common_prefix_len must be at least 0, got -1"),
        (
            {"common_prefix_len": 4, "prefix_levels": [[PrefixGroup((0,), 4)]]},
            "common_prefix_len or prefix_levels, not both",
        ),
        ({"common_prefix_len": 20}, re.escape("do not share their first 20 keys: block_table[1, 4]")),
        ({"prefix_levels": [[PrefixGroup((0, 2), 4)]]}, re.escape("sequences in [0, 2), got (0, 2)")),
        ({"prefix_levels": [[PrefixGroup((-1,), 4)]]}, re.escape("sequences in [0, 2), got (-1,)")),
        ({"prefix_levels": [[PrefixGroup((), 4)]]}, re.escape("sequences in [0, 2), got ()")),
        (
            {"prefix_levels": [[PrefixGroup((0, 1), 4), PrefixGroup((1,), 8)]]},
            re.escape("groups of a level must be disjoint, (1,)"),
        ),
        (
            {"prefix_levels": [[PrefixGroup((0,), 4)], [PrefixGroup((0, 1), 8)]]},
            "have met different prefixes",
        ),
        ({"prefix_levels": [[PrefixGroup((0, 1), -4)]]}, "-4"),
    ],
)
def test_plans_that_make_no_sense(options: dict, message: str) -> None:
    """F05: a claim of sharing holds only where the block ids are equal."""
    batch = make([1, 1], [30, 30], prefix=16)
    with pytest.raises(ValueError, match=message):
        planner().plan(batch, **options)


def test_a_prefix_is_checked_in_shorter_members_too() -> None:
    batch = make([1, 1, 1], [30, 30, 6], prefix=16)
    planner().plan(batch, common_prefix_len=16)
    table = batch.block_table.clone()
    table[2, 1] = 99
    with pytest.raises(ValueError, match=re.escape("block_table[2, 1] = 99 differs from 1")):
        planner().plan(replace(batch, block_table=table), common_prefix_len=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": [1, 2, 5]}, "query_start_loc must start at 0"),
        ({"query_start_loc": [0, 4, 3]}, "query_start_loc must start at 0, never fall"),
        ({"query_start_loc": [0, 1, 9]}, "end at or below num_tokens = 4"),
        ({"max_query_len": 2}, "max_query_len = 2, but a sequence has 3"),
        ({"max_seq_len": 20}, re.escape("seq_lens must lie in [0, max_seq_len = 20], got 9 to 30")),
        ({"seq_lens": [9, -1]}, "seq_lens must lie in"),
        ({"block_table": "narrow"}, "block_table has 7 columns, 30 keys in blocks of 4 need 8"),
        ({"block_table": -1}, re.escape("block_table[1, 2] = -1 lies outside the cache's 40 blocks")),
        ({"block_table": 40}, re.escape("block_table[1, 2] = 40 lies outside the cache's 40 blocks")),
        ({"slot_mapping": [3, 160]}, "slot_mapping holds 160, the cache has 160 slots"),
    ],
)
def test_batches_that_contradict_themselves(change: dict, message: str) -> None:
    """G17, J14: checked on the host where it costs nothing."""
    batch = make([1, 3], [9, 30])
    planner(num_blocks=40).plan(batch)
    ((name, value),) = change.items()
    if name == "block_table":
        table = batch.block_table[:, :7] if value == "narrow" else batch.block_table.clone()
        if value != "narrow":
            table[1, 2] = value
        value = table
    elif isinstance(value, list):
        value = torch.tensor(value, dtype=torch.int64 if name == "slot_mapping" else torch.int32)
    with pytest.raises(ValueError, match=message):
        planner(num_blocks=40).plan(replace(batch, **{name: value}))


def test_entries_past_the_blocks_are_not_checked() -> None:
    batch = make([1, 3], [9, 30], block_size=4)
    assert bool((batch.block_table == GUARD).any())
    planner(num_blocks=11).plan(batch)
    with pytest.raises(ValueError, match="outside the cache's 10 blocks"):
        planner(num_blocks=10).plan(batch)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("query_start_loc", [0, 1, 4], TypeError, "query_start_loc must be a torch tensor, got list"),
        ("seq_lens", None, TypeError, "seq_lens must be a torch tensor, got NoneType"),
        ("block_table", [[0]], TypeError, "block_table must be a torch tensor, got list"),
        ("seq_lens", torch.tensor([9, 30]), TypeError, "seq_lens must be torch.int32, got torch.int64"),
        ("query_start_loc", torch.tensor([0.0, 1, 4]), TypeError, "query_start_loc must be torch.int32"),
        ("slot_mapping", torch.zeros(4, dtype=torch.int32), TypeError, "slot_mapping must be torch.int64"),
        ("slot_mapping", torch.zeros(2, 2, dtype=torch.int64), ValueError, "slot_mapping must have 1 dim"),
        ("block_table", torch.zeros(2, dtype=torch.int32), ValueError, "block_table must have 2 dim"),
        (
            "block_table",
            torch.zeros(3, 9, dtype=torch.int32),
            ValueError,
            r"one row per sequence \(2\), got 3",
        ),
        ("query_start_loc", torch.zeros(2, dtype=torch.int32), ValueError, "num_seqs . 1 = 3 entries"),
        ("num_tokens", -1, ValueError, "num_tokens must be at least 0, got -1"),
        ("max_query_len", -1, ValueError, "max_query_len must be at least 0"),
        ("max_seq_len", -1, ValueError, "max_seq_len must be at least 0"),
        (
            "block_table",
            torch.zeros(2, 9, dtype=torch.int32, device="meta"),
            ValueError,
            "block_table is on meta",
        ),
    ],
)
def test_batches_of_wrong_make(name: str, value: object, error: type, message: str) -> None:
    """J10: shapes, dtypes and devices, by name."""
    with pytest.raises(error, match=message):
        replace(make([1, 3], [9, 30]), **{name: value})


@pytest.mark.parametrize("name", ["num_q_heads", "value_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -4])
def test_planners_of_no_size(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        Planner(**{"num_q_heads": 2, "value_dim": 8, "block_size": 4} | {name: value})


def test_a_layer_wider_than_planned_is_refused() -> None:
    plan = planner().plan(make([4], [30]), num_splits=3)
    plan.workspace.states(3, 4, 2, 8)
    with pytest.raises(ValueError, match=r"give the planner the widest layer"):
        plan.workspace.states(3, 4, 4, 64)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("num_threads", "query_lens", "seq_lens", "num_splits"),
    [
        (2, [1], [8192], 8),  # four parts a thread
        (1, [1], [8192], 1),  # nobody to share with
        (2, [1], [700], 1),  # too short to be worth a merge
        (2, [1] * 8, [4096] * 8, 1),  # enough sequences
        (2, [1] * 4, [30000, 900, 900, 900], 8),  # one is most of the work
        (2, [9], [8192], 1),  # rows enough
    ],
)
def test_few_sequences_are_shared_by_cpu_threads(
    num_threads: int, query_lens: list[int], seq_lens: list[int], num_splits: int, threads: Callable[[int], None]
) -> None:
    threads(num_threads)
    blocks = -(-max(seq_lens) // 16)
    table = torch.arange(len(seq_lens) * blocks, dtype=torch.int32).view(len(seq_lens), blocks)
    batch = AttentionBatch.from_lengths(query_lens, seq_lens, table)
    plan = Planner(num_q_heads=1, value_dim=8, block_size=16).plan(batch)
    assert plan.num_states == num_splits
    check_exact_cover(plan)
    edges = plan.launches[-1].kv_splits
    assert int(edges.diff().max()) * num_splits >= max(seq_lens)
    assert num_splits == 1 or bool((edges[:, 1:-1] % 16 == 0).logical_or(edges[:, 1:-1] == edges[:, -1:]).all())
