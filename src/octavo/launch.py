"""What a step runs: launches, and the plan that holds them. Facts only; the planner decides them."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from octavo.checks import check_block_table, check_device, check_index
from octavo.spec import KVShard

if TYPE_CHECKING:
    from octavo.cache import LayerCache


class State(NamedTuple):
    """Partial results over parts of the keys; merging them gives the attention.

    out: [num_parts, num_tokens, num_q_heads, value_dim]; float32 for partial results, and for a final
        result (num_parts = 1) any float dtype.
    lse: [num_parts, num_tokens, num_q_heads] float32, natural log, -inf where nothing was attended; None
        where the caller does not want it.

    A final result may come without the dimension of parts: making a view of it takes a tenth of a launch.
    """

    out: Tensor
    lse: Tensor | None

    def in_parts(self) -> State:
        """The same with the dimension of parts."""
        if self.out.ndim == 4:
            return self
        return State(self.out.unsqueeze(0), None if self.lse is None else self.lse.unsqueeze(0))


class Operands(NamedTuple):
    """What a layer brings to a launch.

    q: [>= num_tokens, num_q_heads, head_dim] of any float dtype, last dimension contiguous.
    cache: the layer's pages.
    alibi_slopes: [num_q_heads] float32, given iff spec.alibi.
    sinks: [num_q_heads] float32, given iff the launch writes the final result of a layer with sinks.
    q_descale: float32 [] or [num_seqs, num_kv_heads], of an fp8 q; None: 1. Rows take their own sequence's
        (`Plan.seqs_of_rows`), in a cascade too.
    """

    q: Tensor
    cache: LayerCache
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: (a run of query rows) x (a range of keys), the keys cut into splits.

    A launch has its own sequences, which a planner forms: the batch's sequences, or for a cascade level
    one sequence out of all rows of a group. Launch sequence i owns the launch rows
    [query_start_loc[i], query_start_loc[i+1]) and reads the pages of the batch's sequence `seqs[i]`.

    Args:
        query_start_loc: [n + 1] int32, launch rows of each launch sequence.
        kv_splits: [n, num_splits + 1] int32, ascending local key indices: split s of sequence i covers
            [kv_splits[i, s], kv_splits[i, s+1]) intersected with each row's mask interval.
        first_state: split s writes its result to state first_state + s of the plan.
        rows: [num_rows] int64, the query row behind each launch row; None: they are the same.
        seqs: [n] int64, whose block-table row a launch sequence reads; None: its own.
        max_query_len: upper bound of the rows of a launch sequence, known on the host; None: all rows.
        pieces: [max_pieces, 8] int32, a balanced cut for kernels that merge parts themselves (num_splits is 1 and
            rows and seqs are None): sequence, part, parts of the sequence, the local keys [kv_start, kv_end), and of
            the sequence query_start_loc, the number of rows (0: no piece) and seq_len. A sequence's parts stand
            together, in order, and cover its keys; each sequence has at least one.
        tickets: [>= max_pieces * num_kv_heads] int32, given iff pieces are: 0 between launches; how many parts of a
            sequence are done, so that the last merges them.
    """

    query_start_loc: Tensor
    kv_splits: Tensor
    first_state: int
    rows: Tensor | None = None
    seqs: Tensor | None = None
    max_query_len: int | None = None
    pieces: Tensor | None = None
    tickets: Tensor | None = None

    @property
    def num_splits(self) -> int:
        return self.kv_splits.shape[1] - 1

    def part_of(self, states: State) -> State:
        """The states, of all that a plan has, that this launch's splits write."""
        assert states.lse is not None
        mine = slice(self.first_state, self.first_state + self.num_splits)
        return State(states.out[mine], states.lse[mine])


class Workspace:
    """Memory that every step and layer uses again: partial results, and what kernels keep for a moment.

    Each Python thread has its own, and on a GPU each stream, so that plans of one planner may run side by side. A
    captured graph holds the memory of the stream that it was captured on: graphs captured on one stream must not
    replay at the same time.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.kernels: dict[tuple[Any, ...], Any] = {}
        """Compiled kernels by what they depend on, kept by the kernels themselves."""
        self._reserved = 0
        self._local = threading.local()

    def reserve(self, num_states: int, num_tokens: int, num_q_heads: int, value_dim: int) -> None:
        """Let `states` of these sizes fit."""
        self._reserved = max(self._reserved, num_states * num_tokens * num_q_heads * (value_dim + 1))

    def states(self, num_states: int, num_tokens: int, num_q_heads: int, value_dim: int) -> State:
        """Views for that many states, their content undefined.

        Raises:
            ValueError: more is asked for than the planner reserved: the layer is wider than planned for.
        """
        num_lse = num_states * num_tokens * num_q_heads
        num_out = num_lse * value_dim
        if num_out + num_lse > self._reserved:
            raise ValueError(
                f"the plan reserved {self._reserved} floats for partial results, this layer needs "
                f"{num_out + num_lse} ({num_q_heads} query heads, value_dim {value_dim}): "
                f"give the planner the widest layer"
            )
        buffer = self.scratch("states", (self._reserved,), torch.float32)
        out = buffer[:num_out].view(num_states, num_tokens, num_q_heads, value_dim)
        lse = buffer[num_out : num_out + num_lse].view(num_states, num_tokens, num_q_heads)
        return State(out, lse)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, its content undefined, valid until this thread asks for the same name again on the
        stream that is current."""
        made: dict[tuple[str, torch.dtype, int], list[Tensor]] | None = getattr(self._local, "buffers", None)
        if made is None:
            made = self._local.buffers = {}
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        same, numel = made.setdefault((name, dtype, stream), []), math.prod(shape)
        if not same or same[-1].numel() < numel:
            if self.device.type == "cpu":
                same.clear()  # on a GPU a captured graph may still write to the smaller ones
            same.append(torch.empty(numel, dtype=dtype, device=self.device))
        return same[-1][:numel].view(shape)

    def buffers(self) -> list[Tensor]:
        """This thread's memory. A captured graph writes to it on replay, so whoever owns the graph keeps it too:
        the thread may end before."""
        made: dict[tuple[str, torch.dtype, int], list[Tensor]] = getattr(self._local, "buffers", {})
        return [buffer for same in made.values() for buffer in same]


class PlanBuffers:
    """Memory that plans are written to, one after another, so that they lie at the same addresses every time.

    CUDA graphs that are captured over a plan need this if their plans are built outside them: `Planner.buffers` makes
    it. A plan is valid until the next one is built into the same buffers. Whatever runs on the stream that builds the
    next plan is safe: the device reads the old plan first. Plans that are alive at once need buffers of their own.

    Args:
        size: int32 numbers of the largest plan.
        made_for: what that plan is, in words, for messages.
    """

    def __init__(self, size: int, made_for: str, device: torch.device) -> None:
        self.made_for = made_for
        self._memory = torch.empty(size, dtype=torch.int32, device=device)
        self.views: dict[tuple[Any, ...], Any] = {}
        """Views of the memory by the sizes of a plan, kept by who makes them: making them takes as long as a plan."""

    def take(self, size: int) -> Tensor:
        """The first `size` numbers, their content undefined.

        Raises:
            ValueError: the plan is larger than these buffers.
        """
        if size > self._memory.numel():
            raise ValueError(
                f"the plan takes {size} numbers, its buffers have {self._memory.numel()}: they were made for "
                f"{self.made_for}; make larger ones, or plan without"
            )
        return self._memory[:size]


class Piece(NamedTuple):
    """Row `row` meets local keys [kv_start, kv_end) and leaves the result in state `state`."""

    row: int
    state: int
    kv_start: int
    kv_end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's launches and the facts of its query rows; shared by all layers.

    A plan describes its tensors as they were when it was made: change one, and make a new plan.

    Invariant (tested by `check_exact_cover`): for every row, the launches' key ranges cover each local key
    exactly once, and no two of them share a state.

    Args:
        launches: what to run; may be empty. The last one holds the batch's sequences, one by one.
        positions: [num_tokens] int32, global position of each query row.
        seq_lens: [num_tokens] int32, keys of each row's sequence; 0 for padding rows.
        block_table: [num_seqs, max_blocks] int32.
        slot_mapping: [num_slots] int64 or None, for `append`.
        num_states: partial results per row; 1: the launch writes the final result.
        block_size: rows of a page.
        num_blocks: blocks of the cache that the tables were made for; None: not known.
        workspace: where partial results live when num_states > 1, and kernels keep what they need for a moment.
        shard: which keys this rank holds.
        batch_invariant: a row's bits may depend on its own keys only.
        check: tables are compared with the cache (reads tensors, so on a GPU it waits).
        memo: what `run` and kernels worked out of this plan for one layer and its other layers need again.
    """

    launches: tuple[Launch, ...]
    positions: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor | None
    num_states: int
    block_size: int
    num_blocks: int | None
    workspace: Workspace
    shard: KVShard = KVShard()
    batch_invariant: bool = False
    check: bool = False
    memo: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def seqs_of_rows(self) -> Tensor:
        """[num_tokens] int64: the batch's sequence of each query row; 0 for padding rows."""
        if ("seqs of rows",) not in self.memo:
            # The last launch holds the batch's sequences; rows past them count as the first, to name one that exists.
            ends = self.launches[-1].query_start_loc[1:]
            rows = torch.arange(self.num_tokens, dtype=ends.dtype, device=ends.device)
            seqs = torch.searchsorted(ends, rows, right=True)
            self.memo[("seqs of rows",)] = torch.where(seqs < ends.shape[0], seqs, 0)
        found: Tensor = self.memo[("seqs of rows",)]
        return found

    def update_block_table(self, block_table: Tensor, slot_mapping: Tensor | None) -> Plan:
        """The same plan over the pages of another cache group, which has the same lengths.

        Args:
            block_table: [num_seqs, max_blocks] int32 of that group, as wide as the lengths need.
            slot_mapping: [num_slots] int64 of that group, or None.

        Raises:
            TypeError, ValueError: the table is of another batch, or (when checking) does not fit the cache.
        """
        check_index("block_table", block_table, 2, torch.int32)
        if slot_mapping is not None:
            check_index("slot_mapping", slot_mapping, 1, torch.int64)
        check_device(self.block_table.device, block_table=block_table, slot_mapping=slot_mapping)
        if block_table.shape[0] != self.block_table.shape[0]:
            raise ValueError(
                f"block_table must have {self.block_table.shape[0]} rows as the plan's, got {block_table.shape[0]}"
            )
        if self.check and self.launches:
            check_block_table(block_table, self.launches[-1].kv_splits[:, -1], self.block_size, self.num_blocks)
        return dataclasses.replace(self, block_table=block_table, slot_mapping=slot_mapping, memo={})

    def pieces(self) -> Iterator[Piece]:
        """Every (row, key range, state) of the plan, read back to the host: for tests and debugging."""
        for launch in self.launches:
            starts = launch.query_start_loc.tolist()
            for i, bounds in enumerate(launch.kv_splits.tolist()):
                for launch_row in range(starts[i], starts[i + 1]):
                    row = launch_row if launch.rows is None else int(launch.rows[launch_row])
                    for s in range(launch.num_splits):
                        yield Piece(row, launch.first_state + s, bounds[s], bounds[s + 1])


def check_exact_cover(plan: Plan) -> None:
    """Raise AssertionError unless each row meets each of its local keys exactly once, in distinct states."""
    local_lens = plan.shard.local_count(plan.seq_lens).tolist()
    ranges: list[list[tuple[int, int]]] = [[] for _ in local_lens]
    states: list[list[int]] = [[] for _ in local_lens]
    for piece in plan.pieces():
        assert 0 <= piece.state < plan.num_states, f"{piece} outside the plan's {plan.num_states} states"
        assert piece.kv_start <= piece.kv_end, f"{piece} is reversed"
        states[piece.row].append(piece.state)
        if piece.kv_start < piece.kv_end:
            ranges[piece.row].append((piece.kv_start, piece.kv_end))
    for row, length in enumerate(local_lens):
        assert len(set(states[row])) == len(states[row]), f"row {row} writes a state twice: {states[row]}"
        end = 0
        for start, stop in sorted(ranges[row]):
            assert start == end, f"row {row}: keys [{end}, {start}) are missing or met twice"
            end = stop
        assert end >= length, f"row {row} meets {end} of {length} keys"
