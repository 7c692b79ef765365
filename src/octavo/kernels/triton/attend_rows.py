"""The beginning of an attend program: which rows it computes, and which keys they see."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.common import local_count, mask_bounds

NO_KEY = tl.constexpr(2**31 - 1)

SEQS_AT_ONCE = tl.constexpr(32)
"""Sequences that a warp looks up together."""


@triton.jit
def rows_of_program(
    pid,
    query_start_loc_ptr,
    kv_splits_ptr,
    rows_ptr,
    pieces_ptr,
    positions_ptr,
    seq_lens_ptr,
    num_seqs,
    num_splits,
    num_tiles,
    window_left,
    window_right,
    rank,
    CAUSAL: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """Which rows a program computes, and the mask of each.

    KV head, tile, split, launch sequence, part and number of parts of the piece, the sequence's first launch row, how
    many of its rows are left from the tile on; of each row whether it is one, query row, query head, position, and the
    local keys [lo, hi) of this split that it sees.
    """
    kv_head, tile, split = work_item(pid, num_tiles, NUM_KV_HEADS, ONE_TILE)
    first_row, part, num_parts = 0, 0, 1
    if pieces_ptr is not None:
        # A record tells all, so that keys are looked up at once.
        pieces_ptr += tile * 8
        seq, part, num_parts = tl.load(pieces_ptr), tl.load(pieces_ptr + 1), tl.load(pieces_ptr + 2)
        kv_start, kv_end = tl.load(pieces_ptr + 3), tl.load(pieces_ptr + 4)
        start, query_len, num_keys = tl.load(pieces_ptr + 5), tl.load(pieces_ptr + 6), tl.load(pieces_ptr + 7)
    else:
        seq = tile
        if not ONE_TILE:
            seq = sequence_of_tile(query_start_loc_ptr, tile, num_seqs, GROUP_SIZE, BLOCK_M)
        start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1) - start
        if not ONE_TILE:
            first_row = (tile - first_tile(start, seq, GROUP_SIZE, BLOCK_M)) * BLOCK_M
        kv_splits_ptr += seq.to(tl.int64) * (num_splits + 1) + split
        kv_start, kv_end = tl.load(kv_splits_ptr), tl.load(kv_splits_ptr + 1)
    flat = first_row + tl.arange(0, BLOCK_M)
    is_row = flat < query_len * GROUP_SIZE
    row = query_row(rows_ptr, start + flat // GROUP_SIZE, is_row)
    head = kv_head * GROUP_SIZE + flat % GROUP_SIZE
    if pieces_ptr is not None:
        pos = num_keys - query_len + flat // GROUP_SIZE
    else:
        pos = tl.load(positions_ptr + row, mask=is_row, other=0)
        num_keys = tl.load(seq_lens_ptr + row, mask=is_row, other=0)
    lo, hi = mask_bounds(pos, num_keys, window_left, window_right, CAUSAL)
    lo = tl.maximum(local_count(lo, WORLD, rank, INTERLEAVE), kv_start)
    hi = tl.minimum(local_count(hi, WORLD, rank, INTERLEAVE), kv_end)
    left = query_len * GROUP_SIZE - first_row
    return kv_head, tile, split, seq, part, num_parts, start, left, is_row, row, head, pos, lo, hi


@triton.jit
def bounds_of_keys(is_row, lo, hi, BLOCK_KV: tl.constexpr):
    """Keys that some row sees, [first, last), and the tiles of keys that every row sees whole."""
    sees = is_row & (lo < hi)
    last, first, whole_begin, whole_end = tl.reduce(
        (tl.where(sees, hi, 0), tl.where(sees, lo, NO_KEY), tl.where(is_row, lo, 0), tl.where(is_row, hi, NO_KEY)),
        0,
        widest_and_narrowest,
    )
    return tl.minimum(first, last), last, tl.cdiv(whole_begin, BLOCK_KV), whole_end // BLOCK_KV


@triton.jit
def row_of_table(seqs_ptr, seq):
    """Which row of the block table a launch sequence reads, int64."""
    table = seq.to(tl.int64)
    if seqs_ptr is not None:
        table = tl.load(seqs_ptr + seq)
    return table


@triton.jit
def widest_and_narrowest(last, first, begin, end, other_last, other_first, other_begin, other_end):
    """The greatest of last and begin, the smallest of first and end: four reductions that wait for warps once."""
    return (
        tl.maximum(last, other_last),
        tl.minimum(first, other_first),
        tl.maximum(begin, other_begin),
        tl.minimum(end, other_end),
    )


@triton.jit
def query_row(rows_ptr, launch_row, is_row):
    """The query rows behind launch rows, int64."""
    if rows_ptr is None:
        return launch_row.to(tl.int64)
    else:
        return tl.load(rows_ptr + launch_row, mask=is_row, other=0)


@triton.jit
def work_item(pid, num_tiles, NUM_KV_HEADS: tl.constexpr, ONE_TILE: tl.constexpr):
    """(KV head, tile, split) of this program."""
    if ONE_TILE:
        # Heads run together: their keys share pages.
        kv_head, tile, split = pid % NUM_KV_HEADS, pid // NUM_KV_HEADS % num_tiles, pid // (NUM_KV_HEADS * num_tiles)
    else:
        # A head's keys stay in the L2 cache; its last tiles, which are the longest, come first.
        tile = num_tiles - 1 - pid % num_tiles
        kv_head, split = pid // num_tiles % NUM_KV_HEADS, pid // (NUM_KV_HEADS * num_tiles)
    return kv_head, tile, split


@triton.jit
def first_tile(start, seq, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first tile of a launch sequence; a bound that needs no sum over the sequences before."""
    return start * GROUP_SIZE // BLOCK_M + seq


@triton.jit
def sequence_of_tile(query_start_loc_ptr, tile, num_seqs, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """The launch sequence that a tile belongs to, by bisection down to what a warp looks up together."""
    low, high = 0, num_seqs
    while high - low > SEQS_AT_ONCE:
        middle = (low + high) // 2
        if first_tile(tl.load(query_start_loc_ptr + middle), middle, GROUP_SIZE, BLOCK_M) <= tile:
            low = middle
        else:
            high = middle
    seq = low + tl.arange(0, SEQS_AT_ONCE)
    start = tl.load(query_start_loc_ptr + seq, mask=seq < high, other=0)
    begun = (seq < high) & (first_tile(start, seq, GROUP_SIZE, BLOCK_M) <= tile)
    return low + tl.sum(begun.to(tl.int32)) - 1
