"""How the PyTorch kernel cuts a launch: tiles of rows that share a matrix product, chunks of keys.

Where a tile's keys lie and which of its rows see them is the same for all layers of a step with one mask and
one page size, so it is worked out once and kept with the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.kernels.cpu.plain.pages import row_index
from octavo.launch import Launch, Plan
from octavo.spec import AttentionSpec

MAX_TILE_ROWS = 128
"""Rows of one sequence in a tile."""

MAX_BATCHED_ROWS = 8
"""Sequences with at most this many rows each share a tile: decode and speculative decode."""

MAX_SCORES = 1 << 22
"""Scores (heads x rows x keys) held at a time: 16 MB in float32."""

MAX_KEPT = 1 << 23
"""Rows times keys of a launch up to which its tiles are kept for the step's other layers: 40 MB of masks."""

INVARIANT_CHUNK = 512
"""Keys of a chunk in the batch-invariant mode, where matrix products must have the same shape every time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The same number of keys for each sequence of a tile.

    A lane past its sequence's keys repeats the nearest key inside them, so that it holds numbers that the
    arguments name and looks up no table entry past the sequence's blocks.
    """

    j: Tensor  # [n, width] int64 local keys
    block: Tensor  # [n, width] int64
    offset: Tensor  # [n, width] int64 row in the block
    visible: Tensor  # [n, rows_per_seq, width] bool
    mask: Tensor | None  # [n, 1, rows_per_seq, 1, width] float32, 0 or -inf; None: all is visible
    found: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by (num_kv_heads, *strides)

    def rows(self, num_kv_heads: int, strides: tuple[int, int, int]) -> Tensor:
        """Where the chunk's rows stand in a matrix of pages: [n * num_kv_heads * width] int64."""
        key = (num_kv_heads, *strides)
        if key not in self.found:
            index = row_index(strides, self.block.unsqueeze(1), self.offset.unsqueeze(1), num_kv_heads)
            self.found[key] = index.reshape(-1)
        return self.found[key]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows that meet their keys together: n sequences with rows_per_seq rows each, in one split."""

    rows: Tensor  # [n, rows_per_seq] int64 query rows
    span: slice | None  # the same where they follow each other: a slice is a view, an index a copy
    seqs: Tensor  # [n] int64 launch sequences
    split: int
    positions: Tensor  # [n, rows_per_seq] int32
    some_see_nothing: bool
    chunks: tuple[Chunk, ...]

    def take(self, x: Tensor) -> Tensor:
        """This tile's rows of x [num_tokens, ...]: [n, rows_per_seq, ...]."""
        if self.span is None:
            return x[self.rows]
        return x[self.span].unflatten(0, self.rows.shape)  # type: ignore[no-any-return, no-untyped-call]

    def put(self, x: Tensor, value: Tensor) -> None:
        """Write value [n, rows_per_seq, ...] to this tile's rows of x [num_tokens, ...]."""
        if self.span is None:
            x[self.rows] = value.to(x.dtype)
        else:
            x[self.span] = value.flatten(0, 1)


def tiles(spec: AttentionSpec, plan: Plan, launch: Launch) -> Iterable[Tile]:
    """The tiles of a launch for layers with this spec's mask.

    They are worked out once a step, unless keeping them would take much memory.
    """
    mask = (spec.causal, spec.window_left, spec.window_right)
    key = ("tiles", launch.first_state, *mask, spec.num_q_heads)
    found: list[Tile] | None = plan.memo.get(key)
    if found is not None:
        return found
    made = (
        make_tile(spec, plan, launch, rows, seqs, split)
        for rows, seqs in _rows(launch, plan.batch_invariant)
        for split in range(launch.num_splits)
    )
    lens, rows_of_seq = launch.kv_splits[:, -1] - launch.kv_splits[:, 0], launch.query_start_loc.diff()
    if int((lens.long() * rows_of_seq).sum()) > MAX_KEPT:
        return made
    kept = plan.memo[key] = list(made)
    return kept


def make_tile(spec: AttentionSpec, plan: Plan, launch: Launch, rows: Tensor, seqs: Tensor, split: int) -> Tile:
    """A tile of query rows [n, rows_per_seq] of launch sequences seqs [n], against one split of their keys."""
    positions = plan.positions[rows]
    lo, hi = spec.bounds(positions, plan.seq_lens[rows])
    start = launch.kv_splits[seqs, split].unsqueeze(1)  # [n, 1]
    stop = launch.kv_splits[seqs, split + 1].unsqueeze(1)
    lo, hi = plan.shard.local_count(lo).maximum(start), plan.shard.local_count(hi).minimum(stop)
    sees = lo < hi
    last = torch.where(sees, hi, 0).amax(1, keepdim=True)  # [n, 1]
    first = torch.where(sees, lo, torch.iinfo(lo.dtype).max).amin(1, keepdim=True).minimum(last)
    base = start if plan.batch_invariant else first
    num_keys = max(int((last - base).max()), 0)
    width = INVARIANT_CHUNK
    if not plan.batch_invariant:
        width = min(num_keys, max(64, MAX_SCORES // (rows.numel() * spec.num_q_heads)))
    table = plan.block_table if launch.seqs is None else plan.block_table[launch.seqs]
    chunks = []
    for begin in range(0, num_keys, width or 1):
        lane = base + torch.arange(begin, begin + width, dtype=base.dtype)  # [n, width]
        visible = (lane[:, None] >= lo[..., None]) & (lane[:, None] < hi[..., None])
        j = lane.maximum(first).minimum(last - 1).clamp(min=0).long()
        block = table[seqs.unsqueeze(1), j // plan.block_size].long()
        block = torch.where(first < last, block, 0)  # a sequence without keys names no block at all
        mask = None
        if not bool(visible.all()):
            mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None, :, None]
        chunks.append(Chunk(j, block, j % plan.block_size, visible, mask))
    flat = rows.reshape(-1)
    follows = bool((flat.diff() == 1).all())
    span = slice(int(flat[0]), int(flat[-1]) + 1) if follows else None
    return Tile(rows, span, seqs, split, positions, not bool(sees.all()), tuple(chunks))


def _rows(launch: Launch, one_row: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Query rows [n, rows_per_seq] and launch sequences [n] of each tile: neighbours with few rows together, a
    long sequence in pieces."""
    starts = launch.query_start_loc.tolist()
    num_keys = (launch.kv_splits[:, -1] - launch.kv_splits[:, 0]).tolist()
    max_rows = 1 if one_row else MAX_TILE_ROWS
    first = 0
    while first < len(num_keys):
        count = starts[first + 1] - starts[first]
        last = first + 1
        if count == 0:
            first = last
            continue
        if count <= MAX_BATCHED_ROWS and not one_row:
            # Padding to the longest costs time, so that a tile's sequences must be of a length.
            longest = total = num_keys[first]
            while last < len(num_keys) and starts[last + 1] - starts[last] == count:
                longest, total = max(longest, num_keys[last]), total + num_keys[last]
                if longest * (last + 1 - first) > 2 * total + 4096:
                    break
                last += 1
        seqs = torch.arange(first, last)
        for row in range(0, count, max_rows):
            width = min(max_rows, count - row)
            rows = torch.tensor(starts[first:last])[:, None] + torch.arange(row, row + width)
            yield rows if launch.rows is None else launch.rows[rows], seqs
        first = last
