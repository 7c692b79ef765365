"""What a plan knows of rows and keys, worked out on the device in one small kernel: no synchronisation, fixed grid."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.common import local_count
from octavo.kernels.triton.launching import again, current_stream
from octavo.spec import KVShard

MIN_PIECE = 512
"""Keys below which another part costs more in merging than it gains: 1 x 8k keys on H100, docs/measured.md."""

PIECE_ALIGNMENT = 64
"""Parts begin at multiples of this: of the tile of keys, and of the usual pages."""

ROWS_AT_ONCE = 512
SEQS_AT_ONCE = 1024


class Cut(NamedTuple):
    """How the keys of a step's sequences are cut.

    num_splits: splits of every sequence.
    split_keys: keys of a split; None: equal splits of whole pages.
    num_pieces: pieces of equal length that fill the device, for each KV head; None: no pieces are wanted.
    num_heads: KV heads of a layer at most; pieces need it.
    """

    num_splits: int = 1
    split_keys: int | None = None
    num_pieces: int | None = None
    num_heads: int = 0


class Step(NamedTuple):
    """positions, seq_lens, kv_splits, pieces and tickets, as `Plan` and `Launch` want them; see there."""

    positions: Tensor
    seq_lens: Tensor
    kv_splits: Tensor
    pieces: Tensor | None
    tickets: Tensor | None


def step_size(num_tokens: int, num_seqs: int, cut: Cut) -> int:
    """int32 numbers of a step."""
    return sum(_sizes(num_tokens, num_seqs, cut))


def view_step(memory: Tensor, num_tokens: int, num_seqs: int, cut: Cut) -> Step:
    """A step of these sizes in memory [step_size] int32."""
    num_boundaries = cut.num_splits + 1
    # `split` says the same, at twice the host's time.
    *parts, positions, seq_lens = memory.split_with_sizes(_sizes(num_tokens, num_seqs, cut))
    kv_splits = parts[-1].view(num_seqs, num_boundaries)
    if cut.num_pieces is None:
        return Step(positions, seq_lens, kv_splits, None, None)
    return Step(positions, seq_lens, kv_splits, parts[0].view(-1, 8), parts[1])


def _sizes(num_tokens: int, num_seqs: int, cut: Cut) -> list[int]:
    kv_splits = (cut.num_splits + 1) * num_seqs
    if cut.num_pieces is None:
        return [kv_splits, num_tokens, num_tokens]
    max_pieces = cut.num_pieces + num_seqs
    return [8 * max_pieces, cut.num_heads * max_pieces, kv_splits, num_tokens, num_tokens]


def fill_step(
    step: Step,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    shard: KVShard,
    cut: Cut,
    block_size: int,
    kernels: dict[tuple[Any, ...], Any],
) -> None:
    """Work out the facts of a step whose sequences meet all their keys in one launch.

    Args:
        step: written.
        query_start_loc: [num_seqs + 1] int32.
        seq_lens: [num_seqs] int32.
        shard: the keys that this rank holds.
        cut: how keys are cut.
        block_size: rows of a page.
        kernels: compiled kernels of earlier calls.
    """
    num_seqs, num_tokens, device = seq_lens.shape[0], step.positions.shape[0], query_start_loc.device
    arguments = (
        query_start_loc,
        seq_lens,
        *step,
        num_tokens,
        num_seqs,
        num_seqs.bit_length(),
        cut.num_splits,
        0 if cut.split_keys is None else cut.split_keys,
        block_size,
        0 if cut.num_pieces is None else cut.num_pieces,
        0 if step.pieces is None else step.pieces.shape[0],
        0 if step.tickets is None else step.tickets.shape[0],
        shard.dcp_rank,
    )
    constants = (shard.dcp_world, shard.interleave, ROWS_AT_ONCE, SEQS_AT_ONCE, MIN_PIECE, PIECE_ALIGNMENT)
    grid = (1 - (-num_tokens // ROWS_AT_ONCE), 1, 1)  # Triton's own cdiv takes 5 us here
    compiled_for = ("step", step.pieces is None, constants)
    compiled = kernels.get(compiled_for)
    if compiled is not None:
        again(compiled, grid, current_stream(device))(*arguments, *constants)
        return
    compiled = step_kernel[grid](*arguments, *constants, num_warps=8)
    if compiled is not None:  # not interpreted
        kernels[compiled_for] = compiled


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_seqs",
        "bits",
        "num_splits",
        "split_keys",
        "block_size",
        "num_pieces",
        "max_pieces",
        "num_tickets",
        "rank",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "positions_ptr",
        "row_lens_ptr",
        "kv_splits_ptr",
        "pieces_ptr",
        "tickets_ptr",
    ],
)
def step_kernel(
    query_start_loc_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    positions_ptr,  # [num_tokens] int32
    row_lens_ptr,  # [num_tokens] int32
    kv_splits_ptr,  # [num_seqs, num_splits + 1] int32
    pieces_ptr,  # [max_pieces, 8] int32 or None
    tickets_ptr,  # [num_tickets] int32 or None
    num_tokens,
    num_seqs,
    bits,  # of num_seqs
    num_splits,
    split_keys,  # 0: equal splits
    block_size,
    num_pieces,
    max_pieces,
    num_tickets,
    rank,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ROWS: tl.constexpr,
    SEQS: tl.constexpr,
    MIN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The first program cuts the keys of all sequences, the others look up ROWS rows each and set tickets to 0."""
    program = tl.program_id(0)
    if program > 0:
        row = (program - 1) * ROWS + tl.arange(0, ROWS)
        low, high = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + num_seqs
        for _ in range(bits):  # the first sequence that ends after the row
            middle = (low + high) // 2
            open = low < high
            before = open & (tl.load(query_start_loc_ptr + 1 + middle, mask=open, other=0) <= row)
            low, high = tl.where(before, middle + 1, low), tl.where(before | ~open, high, middle)
        is_row = (row < num_tokens) & (low < num_seqs)
        seq_len = tl.load(seq_lens_ptr + low, mask=is_row, other=0)
        end = tl.load(query_start_loc_ptr + 1 + low, mask=is_row, other=0)
        tl.store(positions_ptr + row, tl.where(is_row, seq_len - end + row, 0), mask=row < num_tokens)
        tl.store(row_lens_ptr + row, seq_len, mask=row < num_tokens)
        if tickets_ptr is not None:
            for first in range((program - 1) * ROWS, num_tickets, (tl.num_programs(0) - 1) * ROWS):
                ticket = first + tl.arange(0, ROWS)
                tl.store(tickets_ptr + ticket, 0, mask=ticket < num_tickets)
    else:
        keys = tl.zeros([SEQS], tl.int64)
        for first in range(0, num_seqs, SEQS):
            seq = first + tl.arange(0, SEQS)
            num_keys = local_count(tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0), WORLD, rank, INTERLEAVE)
            size = tl.cdiv(num_keys, num_splits * block_size) * block_size
            if split_keys > 0:
                size = tl.zeros_like(size) + split_keys
            for split in range(num_splits + 1):
                end = tl.minimum(split * size, num_keys)
                tl.store(kv_splits_ptr + seq * (num_splits + 1) + split, end, mask=seq < num_seqs)
            keys += num_keys
        if pieces_ptr is not None:
            wanted = tl.maximum(MIN, (tl.sum(keys) + num_pieces - 1) // num_pieces).to(tl.int32)
            made = 0
            for first in range(0, num_seqs, SEQS):
                seq = first + tl.arange(0, SEQS)
                seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
                num_keys = local_count(seq_len, WORLD, rank, INTERLEAVE)
                start = tl.load(query_start_loc_ptr + seq, mask=seq < num_seqs, other=0)
                query_len = tl.load(query_start_loc_ptr + 1 + seq, mask=seq < num_seqs, other=0) - start
                # A whole number of equal parts, the nearest to what is wanted.
                parts = tl.maximum((num_keys + wanted // 2) // wanted, 1)
                size = tl.cdiv(tl.cdiv(num_keys, parts), ALIGNMENT) * ALIGNMENT
                parts = tl.where(seq < num_seqs, tl.maximum(tl.cdiv(num_keys, tl.maximum(size, 1)), 1), 0)
                at = pieces_ptr + (made + tl.cumsum(parts, 0) - parts) * 8
                for part in range(tl.max(parts)):
                    there = part < parts
                    tl.store(at, seq, mask=there)
                    tl.store(at + 1, part, mask=there)
                    tl.store(at + 2, parts, mask=there)
                    tl.store(at + 3, part * size, mask=there)
                    tl.store(at + 4, tl.minimum((part + 1) * size, num_keys), mask=there)
                    tl.store(at + 5, start, mask=there)
                    tl.store(at + 6, query_len, mask=there)
                    tl.store(at + 7, seq_len, mask=there)
                    at += 8
                made += tl.sum(parts)
            for first in range(made, max_pieces, SEQS):
                piece = first + tl.arange(0, SEQS)
                tl.store(pieces_ptr + piece * 8 + 6, 0, mask=piece < max_pieces)
