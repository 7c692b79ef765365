"""batch -> Plan: how a step is cut into launches.

Every policy lives here: splits, cascade levels, shards. The work is tensor arithmetic on the batch's device
from bounds that the host knows already, so that building a plan never waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
from octavo.checks import check_block_table
from octavo.launch import Launch, Plan, PlanBuffers, Workspace
from octavo.spec import KVShard

if TYPE_CHECKING:
    from octavo.kernels.triton.schedule import Cut, Step

INVARIANT_SPLIT = 512
"""Keys of a split in the batch-invariant mode: boundaries at its multiples, whatever the batch."""

CPU_ROWS = 8
"""New tokens of a sequence up to which a CPU plan cuts its keys: decode and speculative decode. More rows make
enough work for every thread."""

CPU_ITEMS = 4
"""Parts of the keys for each CPU thread, so that threads end together."""

CPU_SPLIT = 1024
"""Keys of such a part at least: merging costs less than they do."""

MAX_PIECE_ROWS = 16
"""New tokens of a sequence up to which a GPU plan cuts its keys: decode and speculative decode. More rows fill the
device by themselves."""

MAX_PIECE_SEQS = 4096
"""Sequences up to which it does so; more fill the device by themselves."""

PIECES_PER_MULTIPROCESSOR = 2
"""Pieces of keys that run on a multiprocessor together when the cut is even and sequences have one new token. With
more rows to merge, one piece is faster: 1 x 32k keys, 4 new tokens, 68 us and not 85 on H100."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences that share their first keys, page by page.

    Args:
        seqs: indices of the sequences in the batch, at least one.
        length: shared keys (global positions), not necessarily a multiple of block_size.
    """

    seqs: tuple[int, ...]
    length: int


class Planner:
    """Builds plans for one kind of cache group and owns the buffers that they use.

    Args:
        num_q_heads, value_dim: of the widest layer that will run on the plans.
        block_size: rows of a page.
        num_blocks: pages of the cache, to check tables and slots against; None: not checked.
        device: where batches live.
        shard: the keys that this rank holds.
        batch_invariant: a request's output bits depend on that request alone. Splits then have a fixed
            number of keys, and prefixes are shared in whole splits.
        num_kv_heads: of the layers; how finely a GPU plan must cut the keys depends on it. None: num_q_heads.
        check: compare lengths, tables and slots with their bounds at every plan. None: yes on CPU, where it
            costs next to nothing; on a GPU it waits for the device, so it is a debug mode.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        value_dim: int,
        block_size: int,
        num_blocks: int | None = None,
        device: torch.device | str = "cpu",
        shard: KVShard = KVShard(),
        batch_invariant: bool = False,
        num_kv_heads: int | None = None,
        check: bool | None = None,
    ) -> None:
        sizes = {"num_q_heads": num_q_heads, "value_dim": value_dim, "block_size": block_size}
        for name, size in (sizes | {"num_kv_heads": num_q_heads if num_kv_heads is None else num_kv_heads}).items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.num_q_heads = num_q_heads
        self.value_dim = value_dim
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.shard = shard
        self.batch_invariant = batch_invariant
        self.check = torch.device(device).type == "cpu" if check is None else check
        self._workspace = Workspace(device)
        self._pieces_for = num_q_heads if num_kv_heads is None else num_kv_heads

    def plan(
        self,
        batch: AttentionBatch,
        *,
        num_splits: int | None = None,
        common_prefix_len: int = 0,
        prefix_levels: Sequence[Sequence[PrefixGroup]] = (),
        buffers: PlanBuffers | None = None,
    ) -> Plan:
        """Cut a step into launches.

        Args:
            batch: the step.
            num_splits: parts of every key range; None: the planner's choice.
            common_prefix_len: keys shared by all sequences; 0: none. Short for one level with one group.
            prefix_levels: cascade levels, outermost first; the groups of a level are disjoint, and all
                sequences of a group have met the same keys in the levels before.
            buffers: where the plan lies, until the next one is built there; None: in memory of its own. Only on a
                GPU, and not with shared prefixes.

        Returns:
            A plan for every layer of the step, whatever its windows, score transforms or dtype.

        Raises:
            ValueError: an argument is out of range, or (when checking) the batch contradicts itself, a table
                entry or slot lies outside the cache, or a group does not share its pages.
        """
        if num_splits is not None:
            if num_splits < 1:
                raise ValueError(f"num_splits must be None or at least 1, got {num_splits}")
            if self.batch_invariant:
                raise ValueError(
                    f"num_splits={num_splits} contradicts batch_invariant, which splits every "
                    f"{INVARIANT_SPLIT} keys: give one of them"
                )
        if common_prefix_len < 0:
            raise ValueError(f"common_prefix_len must be at least 0, got {common_prefix_len}")
        if common_prefix_len and prefix_levels:
            raise ValueError("give common_prefix_len or prefix_levels, not both")
        on_device = self.on_device(batch.device)
        if buffers is not None and (common_prefix_len or prefix_levels or not on_device):
            raise ValueError(
                f"buffers are for plans on a GPU without shared prefixes, got device {batch.device}, "
                f"common_prefix_len={common_prefix_len} and {len(prefix_levels)} levels: leave buffers out"
            )
        if common_prefix_len and batch.num_seqs:
            prefix_levels = [[PrefixGroup(tuple(range(batch.num_seqs)), common_prefix_len)]]

        if on_device and not prefix_levels and batch.num_tokens and batch.num_seqs:
            return self._plan_on_device(batch, num_splits, buffers)
        local_lens = self.shard.local_count(batch.seq_lens)
        if self.check:
            self._check_batch(batch, local_lens)
        max_local_len = self.shard.max_local_count(batch.max_seq_len)
        seq_of_row, is_row = _sequence_of_rows(batch)
        launches: list[Launch] = []
        num_states = 0
        done = [0] * batch.num_seqs
        for level in prefix_levels if batch.num_tokens else ():
            groups, start, end = self._level(batch, level, done)
            if not groups:
                continue
            launch = self._group_launch(groups, start, end, local_lens, seq_of_row, is_row, num_states, num_splits)
            if self.check:
                self._check_sharing(batch, groups, end, local_lens)
            launches.append(launch)
            num_states += launch.num_splits
        if batch.num_tokens and batch.num_seqs:
            start_of_seq = torch.zeros_like(local_lens)
            if launches:  # a copy from the host, which waits
                start_of_seq = torch.tensor(done, dtype=torch.int32, device=batch.device).minimum(local_lens)
            whole = num_splits is None and not self.batch_invariant and not prefix_levels
            keys = self._cpu_split(batch, local_lens) if whole and batch.device.type == "cpu" else None
            longest = max_local_len - min(done) if keys is None else int(local_lens.max())
            kv_splits = self._splits(start_of_seq, local_lens, longest, num_splits, keys)
            launches.append(Launch(batch.query_start_loc, kv_splits, num_states, max_query_len=batch.max_query_len))
            num_states += kv_splits.shape[1] - 1
        if num_states > 1:
            self._workspace.reserve(num_states, batch.num_tokens, self.num_q_heads, self.value_dim)
        positions, seq_lens = _facts_of_rows(batch, seq_of_row, is_row)
        return self._finish(batch, tuple(launches), positions, seq_lens, num_states)

    @staticmethod
    def on_device(device: torch.device) -> bool:
        """Whether plans are worked out by a kernel on the device."""
        return device.type == "cuda"

    def buffers(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> PlanBuffers:
        """Buffers for any plan on a GPU of at most so many rows, sequences and keys, with the planner's own splits.

        Raises:
            ValueError: a size below 1.
        """
        from octavo.kernels import triton

        sizes = {"max_num_tokens": max_num_tokens, "max_num_seqs": max_num_seqs, "max_seq_len": max_seq_len}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        cuts = [self._cut(query_len, max_num_seqs, max_seq_len, None) for query_len in (1, 2, max_num_tokens)]
        size = max(triton.step_size(max_num_tokens, max_num_seqs, cut) for cut in cuts)
        made_for = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return PlanBuffers(size, made_for, self._workspace.device)

    def _plan_on_device(self, batch: AttentionBatch, num_splits: int | None, buffers: PlanBuffers | None) -> Plan:
        """One launch over all keys, worked out by one kernel; it waits for nothing."""
        from octavo.kernels import triton

        if self.check:
            self._check_batch(batch, self.shard.local_count(batch.seq_lens))
        cut = self._cut(batch.max_query_len, batch.num_seqs, batch.max_seq_len, num_splits)
        step = _memory_of_step(batch, cut, buffers)
        kernels = self._workspace.kernels
        triton.fill_step(step, batch.query_start_loc, batch.seq_lens, self.shard, cut, self.block_size, kernels)
        if cut.num_splits > 1:
            self._workspace.reserve(cut.num_splits, batch.num_tokens, self.num_q_heads, self.value_dim)
        launch = Launch(
            batch.query_start_loc,
            step.kv_splits,
            0,
            max_query_len=batch.max_query_len,
            pieces=step.pieces,
            tickets=step.tickets,
        )
        return self._finish(batch, (launch,), step.positions, step.seq_lens, cut.num_splits)

    def _cut(self, max_query_len: int, num_seqs: int, max_seq_len: int, num_splits: int | None) -> Cut:
        """How a GPU plan without shared prefixes cuts the keys."""
        from octavo.kernels import triton

        if self.batch_invariant:
            longest = self.shard.max_local_count(max_seq_len)
            return triton.Cut(max(1, -(-longest // INVARIANT_SPLIT)), INVARIANT_SPLIT)
        if num_splits is not None:
            return triton.Cut(num_splits)
        if max_query_len <= MAX_PIECE_ROWS and num_seqs <= MAX_PIECE_SEQS:
            return triton.Cut(num_pieces=self._num_pieces(max_query_len), num_heads=self.num_q_heads)
        return triton.Cut()

    def _num_pieces(self, max_query_len: int) -> int:
        """Pieces of a KV head's keys that fill the device."""
        multiprocessors = _multiprocessors(self._workspace.device)
        per_multiprocessor = PIECES_PER_MULTIPROCESSOR if max_query_len == 1 else 1
        return max(1, multiprocessors * per_multiprocessor // self._pieces_for)

    def _finish(
        self, batch: AttentionBatch, launches: tuple[Launch, ...], positions: Tensor, seq_lens: Tensor, num_states: int
    ) -> Plan:
        return Plan(
            launches=launches,
            positions=positions,
            seq_lens=seq_lens,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            num_states=num_states,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            workspace=self._workspace,
            shard=self.shard,
            batch_invariant=self.batch_invariant,
            check=self.check,
        )

    def _level(
        self, batch: AttentionBatch, level: Sequence[PrefixGroup], done: list[int]
    ) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        """The groups of a level that have keys left to share, with their local ranges; advances `done`."""
        groups, starts, ends = [], [], []
        taken: set[int] = set()
        for group in level:
            unknown = [s for s in group.seqs if not 0 <= s < batch.num_seqs]
            if not group.seqs or unknown:
                raise ValueError(f"a prefix group needs sequences in [0, {batch.num_seqs}), got {group.seqs}")
            if group.length < 0:
                raise ValueError(f"the length of a shared prefix must be at least 0, got {group.length}")
            if taken.intersection(group.seqs):
                raise ValueError(f"groups of a level must be disjoint, {group.seqs} meets another group")
            taken.update(group.seqs)
            before = {done[s] for s in group.seqs}
            if len(before) > 1:
                raise ValueError(f"sequences {group.seqs} have met different prefixes in the levels before")
            start = before.pop()
            end = self.shard.local_count(min(group.length, batch.max_seq_len))
            if self.batch_invariant:
                end = end // INVARIANT_SPLIT * INVARIANT_SPLIT
            if end <= start:
                continue
            for s in group.seqs:
                done[s] = end
            groups.append(group.seqs)
            starts.append(start)
            ends.append(end)
        return groups, starts, ends

    def _group_launch(
        self,
        groups: list[tuple[int, ...]],
        start: list[int],
        end: list[int],
        local_lens: Tensor,
        seq_of_row: Tensor,
        is_row: Tensor,
        first_state: int,
        num_splits: int | None,
    ) -> Launch:
        """One sequence per group: all rows of its members, over the group's own key range."""
        device = local_lens.device
        group_of_seq = torch.full_like(local_lens, len(groups))
        longest = []
        for g, seqs in enumerate(groups):
            members = torch.tensor(seqs, device=device)
            group_of_seq[members] = g
            longest.append(members[local_lens[members].argmax()])
        # Rows in group order; those of no group sort last and belong to no launch sequence.
        group_of_row = torch.where(is_row, group_of_seq[seq_of_row], len(groups))
        in_order, rows = group_of_row.sort(stable=True)
        edges = torch.arange(len(groups) + 1, dtype=in_order.dtype, device=device)
        seqs_of_launch = torch.stack(longest)
        # A group may claim more keys than its longest member has.
        stop = torch.tensor(end, dtype=torch.int32, device=device).minimum(local_lens[seqs_of_launch])
        begin = torch.tensor(start, dtype=torch.int32, device=device).minimum(stop)
        longest_range = max(e - s for s, e in zip(start, end, strict=True))
        return Launch(
            query_start_loc=torch.searchsorted(in_order, edges).to(torch.int32),
            kv_splits=self._splits(begin, stop, longest_range, num_splits),
            first_state=first_state,
            rows=rows,
            seqs=seqs_of_launch,
        )

    def _cpu_split(self, batch: AttentionBatch, local_lens: Tensor) -> int | None:
        """Keys of a part where a CPU's threads have too few sequences to share; None: they have enough."""
        threads = torch.get_num_threads()
        if threads == 1 or batch.max_query_len > CPU_ROWS:
            return None
        keys = max(CPU_SPLIT, -(-int(local_lens.sum()) // (CPU_ITEMS * threads)))
        keys = -(-keys // self.block_size) * self.block_size
        return keys if keys < int(local_lens.max()) else None

    def _splits(
        self, start: Tensor, end: Tensor, max_len: int, num_splits: int | None, keys: int | None = None
    ) -> Tensor:
        """Boundaries [n, num_splits + 1] of the parts of ranges [start, end), of which none is longer than max_len:
        num_splits parts each, or parts of so many keys."""
        if self.batch_invariant:
            keys = INVARIANT_SPLIT
        if keys is not None:
            num_splits = max(1, -(-max_len // keys))
            size = torch.full_like(start, keys)
        else:
            num_splits = 1 if num_splits is None else num_splits
            pages = -(-(end - start) // (num_splits * self.block_size))
            size = pages * self.block_size
        part = torch.arange(num_splits + 1, dtype=torch.int32, device=start.device)
        return (start[:, None] + part * size[:, None]).minimum(end[:, None])

    def _check_batch(self, batch: AttentionBatch, local_lens: Tensor) -> None:
        starts, lens = batch.query_start_loc, batch.seq_lens
        query_lens = starts.diff()
        if int(starts[0]) != 0 or bool((query_lens < 0).any()) or int(starts[-1]) > batch.num_tokens:
            raise ValueError(
                f"query_start_loc must start at 0, never fall and end at or below num_tokens = "
                f"{batch.num_tokens}, got {starts.tolist()}"
            )
        if not batch.num_seqs:
            return
        if int(query_lens.max()) > batch.max_query_len:
            raise ValueError(f"max_query_len = {batch.max_query_len}, but a sequence has {int(query_lens.max())}")
        if int(lens.min()) < 0 or int(lens.max()) > batch.max_seq_len:
            raise ValueError(
                f"seq_lens must lie in [0, max_seq_len = {batch.max_seq_len}], "
                f"got {int(lens.min())} to {int(lens.max())}"
            )
        check_block_table(batch.block_table, local_lens, self.block_size, self.num_blocks)
        if self.num_blocks is None:
            return
        slots = batch.slot_mapping
        if slots is not None and slots.numel() and int(slots.max()) >= self.num_blocks * self.block_size:
            raise ValueError(
                f"slot_mapping holds {int(slots.max())}, the cache has {self.num_blocks * self.block_size} slots"
            )

    def _check_sharing(
        self, batch: AttentionBatch, groups: list[tuple[int, ...]], end: list[int], local_lens: Tensor
    ) -> None:
        column = torch.arange(batch.block_table.shape[1], device=batch.device)
        for seqs, stop in zip(groups, end, strict=True):
            members = torch.tensor(seqs, device=batch.device)
            longest = members[local_lens[members].argmax()]
            shared = column < -(-local_lens[members].clamp(max=stop) // self.block_size)[:, None]
            differs = shared & (batch.block_table[members] != batch.block_table[longest])
            if bool(differs.any()):
                seq, where = differs.nonzero()[0].tolist()
                raise ValueError(
                    f"sequences {seqs} do not share their first {stop} keys: block_table[{seqs[seq]}, {where}] "
                    f"= {int(batch.block_table[seqs[seq], where])} differs from "
                    f"{int(batch.block_table[longest, where])}"
                )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _memory_of_step(batch: AttentionBatch, cut: Cut, buffers: PlanBuffers | None) -> Step:
    """Where the facts of a step are written."""
    from octavo.kernels import triton

    size = triton.step_size(batch.num_tokens, batch.num_seqs, cut)
    if buffers is None:
        memory = torch.empty(size, dtype=torch.int32, device=batch.device)
        return triton.view_step(memory, batch.num_tokens, batch.num_seqs, cut)
    sizes = (batch.num_tokens, batch.num_seqs, cut)
    step: Step | None = buffers.views.get(sizes)
    if step is None:
        step = triton.view_step(buffers.take(size), batch.num_tokens, batch.num_seqs, cut)
        # Steps of other shapes are too many to keep.
        if batch.num_tokens == batch.num_seqs * batch.max_query_len:
            buffers.views[sizes] = step
    return step


def _sequence_of_rows(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Which sequence each of num_tokens rows belongs to, and whether it belongs to one at all."""
    row = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.device)
    if not batch.num_seqs:
        return row.long(), torch.zeros_like(row, dtype=torch.bool)
    seq = torch.searchsorted(batch.query_start_loc[1:], row, right=True)
    return seq.clamp(max=batch.num_seqs - 1), seq < batch.num_seqs


def _facts_of_rows(batch: AttentionBatch, seq_of_row: Tensor, is_row: Tensor) -> tuple[Tensor, Tensor]:
    """Global position and number of keys of each row; a padding row has no key."""
    if not batch.num_seqs:
        empty = torch.zeros(batch.num_tokens, dtype=torch.int32, device=batch.device)
        return empty, empty
    row = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.device)
    lens = batch.seq_lens[seq_of_row]
    positions = lens - batch.query_start_loc[seq_of_row + 1] + row
    return positions, lens * is_row
