"""The device side of `attend`: one kernel for every feature.

A program takes a tile of rows (query heads of tokens) that read one KV head of one launch sequence, and the
keys of one split, or of one piece.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.attend_keys import attend_keys
from octavo.kernels.triton.attend_parts import merge_parts, store_parts, store_rows
from octavo.kernels.triton.attend_rows import bounds_of_keys, query_row, row_of_table, rows_of_program
from octavo.kernels.triton.common import LOG2E


# What changes from step to step must not make another kernel. Triton ignores these lists for what is in a tuple.
@triton.jit(
    do_not_specialize=["table_stride", "num_tokens", "num_seqs", "num_splits", "num_tiles", "rank"],
    do_not_specialize_on_alignment=[
        "q_scale_ptr",
        "pieces_ptr",
        "tickets_ptr",
        "lse_ptr",
        "query_start_loc_ptr",
        "kv_splits_ptr",
        "rows_ptr",
        "positions_ptr",
        "seq_lens_ptr",
        "row_seqs_ptr",
        "table_ptr",
    ],
)
def attend_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    k_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, VALUE_DIM]
    out_ptr,  # [num_splits, num_tokens, num_q_heads, VALUE_DIM]
    lse_ptr,  # [num_splits, num_tokens, num_q_heads] float32 or None
    slopes_ptr,  # [num_q_heads] float32 or None
    sinks_ptr,  # [num_q_heads] float32 or None
    q_scale_ptr,  # [num_seqs, NUM_KV_HEADS] float32 or None, of fp8 q
    k_scale_ptr,  # float32 or None; int8: [num_blocks, NUM_KV_HEADS, BLOCK_SIZE]; fp8: [num_seqs, NUM_KV_HEADS]
    v_scale_ptr,  # the same; int8 that is not scaled by row: [NUM_KV_HEADS, VALUE_DIM]
    query_start_loc_ptr,  # [num_seqs + 1] int32, launch rows
    kv_splits_ptr,  # [num_seqs, num_splits + 1] int32, local keys
    rows_ptr,  # [num_rows] int64 or None, query row of a launch row
    seqs_ptr,  # [num_seqs] int64 or None, row of the block table
    pieces_ptr,  # [num_tiles, 8] int32 or None: see `Launch.pieces`
    parts_ptr,  # [num_tiles * NUM_KV_HEADS, PART_ROWS, VALUE_DIM] float32 or None
    parts_lse_ptr,  # [num_tiles * NUM_KV_HEADS, PART_ROWS] float32 or None
    tickets_ptr,  # [num_tiles * NUM_KV_HEADS] int32 or None
    positions_ptr,  # [num_tokens] int32
    seq_lens_ptr,  # [num_tokens] int32
    row_seqs_ptr,  # [num_tokens] int64, sequences of the batch, or None: a launch sequence's own
    table_ptr,  # [batch sequences, max_blocks] int32
    q_stride,  # (token, head)
    out_stride,  # (token, head); splits follow each other
    lse_stride,  # (token, head)
    table_stride,
    term_stride,  # (slopes, sinks)
    q_scale_stride,  # (sequence, KV head)
    num_tokens,
    num_seqs,
    num_splits,
    num_tiles,
    factor,
    pre_scale,
    soft_cap,
    window_left,
    window_right,
    rank,
    CAUSAL: tl.constexpr,
    SQRT_ALIBI: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    REST_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    REST_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,  # strides of the cache, which stays: as constants they vanish into address arithmetic
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    K_SCALE_BLOCK: tl.constexpr,  # or sequence
    K_SCALE_HEAD: tl.constexpr,
    K_SCALE_ROW: tl.constexpr,
    V_SCALE_BLOCK: tl.constexpr,  # or sequence
    V_SCALE_HEAD: tl.constexpr,
    V_SCALE_ROW: tl.constexpr,  # or channel
    Q_NUMBER: tl.constexpr,  # "plain", "int8", "e4m3" or "e5m2"
    K_NUMBER: tl.constexpr,
    V_NUMBER: tl.constexpr,
    V_SCALED_BY_ROW: tl.constexpr,
    V_TYPE: tl.constexpr,  # of 8-bit V where it is multiplied
    SHIFT: tl.constexpr,  # probabilities are multiplied by 2^SHIFT where float16 would lose small ones
    ISA: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PART_ROWS: tl.constexpr,
    SAME_INTERVAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A program: BLOCK_M rows of one KV head against one split of their keys."""
    # Which rows this program has, and which keys.
    kv_head, tile, split, seq, part, num_parts, start, num_rows, is_row, row, head, pos, lo, hi = rows_of_program(
        tl.program_id(0), query_start_loc_ptr, kv_splits_ptr, rows_ptr, pieces_ptr, positions_ptr, seq_lens_ptr,
        num_seqs, num_splits, num_tiles, window_left, window_right, rank, CAUSAL, NUM_KV_HEADS, GROUP_SIZE, WORLD,
        INTERLEAVE, BLOCK_M, ONE_TILE,
    )  # fmt: skip
    if num_rows <= 0:
        return
    first, last, whole_begin, whole_end = bounds_of_keys(is_row, lo, hi, BLOCK_KV)
    out_ptr += split.to(tl.int64) * num_tokens * out_stride[0]
    if lse_ptr is not None:
        lse_ptr += split.to(tl.int64) * num_tokens * lse_stride[0]
    table = row_of_table(seqs_ptr, seq)
    row_scale = static_scales(
        q_scale_ptr, k_scale_ptr, row_seqs_ptr, row, is_row, table, kv_head, q_scale_stride, K_SCALE_BLOCK,
        K_SCALE_HEAD, K_NUMBER,
    )  # fmt: skip
    row_v_scale_ptr = None
    if K_NUMBER == "int8":
        k_scale_ptr += kv_head.to(tl.int64) * K_SCALE_HEAD
        if V_SCALED_BY_ROW:
            row_v_scale_ptr = v_scale_ptr + kv_head.to(tl.int64) * V_SCALE_HEAD
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head * term_stride[0], mask=is_row, other=0.0)

    # The loop, and once more with care where a value that is not finite may have reached rows that do not see
    # its key: 0 * NaN is NaN. The same tiles, since others would round otherwise.
    log_total, total, acc, rest = attend_keys(
        q_ptr + row * q_stride[0] + head * q_stride[1], k_ptr + kv_head.to(tl.int64) * K_HEAD,
        v_ptr + kv_head.to(tl.int64) * V_HEAD, k_scale_ptr, row_v_scale_ptr, table_ptr + table * table_stride, is_row,
        pos, slopes, lo, hi, first, last, whole_begin, whole_end, factor, pre_scale, row_scale, soft_cap, rank, 0,
        CAUSAL, SQRT_ALIBI, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, REST_HEAD, BLOCK_VALUE, REST_VALUE, BLOCK_SIZE, K_BLOCK,
        K_ROW, V_BLOCK, V_ROW, K_SCALE_BLOCK, K_SCALE_ROW, V_SCALE_BLOCK, V_SCALE_ROW, Q_NUMBER, K_NUMBER, V_NUMBER,
        V_TYPE, SHIFT, ISA, WORLD, INTERLEAVE, BLOCK_M, BLOCK_KV, STAGES, UPCAST, CAREFUL=False,
    )  # fmt: skip
    if not SAME_INTERVAL:
        stray = tl.sum(acc * 0.0)  # in one step: on Blackwell, Triton 3.6 fails at a reduction of a reduction
        if REST_VALUE > 0:
            stray += tl.sum(rest * 0.0)
        if stray != 0:
            # It is NaN here. No compiler knows that, so that none works out what follows before the first loop, which
            # has no registers to spare for it.
            zero = (stray == 1.0).to(tl.int32)
            kv_head_, _, _, seq_, _, _, _, _, is_row_, row_, head_, pos_, lo_, hi_ = rows_of_program(
                tl.program_id(0) + zero, query_start_loc_ptr, kv_splits_ptr, rows_ptr, pieces_ptr, positions_ptr,
                seq_lens_ptr, num_seqs, num_splits, num_tiles, window_left, window_right, rank, CAUSAL, NUM_KV_HEADS,
                GROUP_SIZE, WORLD, INTERLEAVE, BLOCK_M, ONE_TILE,
            )  # fmt: skip
            first_, last_, whole_begin_, whole_end_ = bounds_of_keys(is_row_, lo_, hi_, BLOCK_KV)
            slopes_ = None
            if slopes_ptr is not None:
                slopes_ = tl.load(slopes_ptr + head_ * term_stride[0], mask=is_row_, other=0.0)
            log_total, total, acc, rest = attend_keys(
                q_ptr + row_ * q_stride[0] + head_ * q_stride[1], k_ptr + kv_head_.to(tl.int64) * K_HEAD,
                v_ptr + kv_head_.to(tl.int64) * V_HEAD, k_scale_ptr, row_v_scale_ptr,
                table_ptr + row_of_table(seqs_ptr, seq_) * table_stride, is_row_, pos_, slopes_, lo_, hi_, first_,
                last_, whole_begin_, whole_end_, factor, pre_scale, row_scale, soft_cap, rank, zero, CAUSAL,
                SQRT_ALIBI, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, REST_HEAD, BLOCK_VALUE, REST_VALUE, BLOCK_SIZE, K_BLOCK,
                K_ROW, V_BLOCK, V_ROW, K_SCALE_BLOCK, K_SCALE_ROW, V_SCALE_BLOCK, V_SCALE_ROW, Q_NUMBER, K_NUMBER,
                V_NUMBER, V_TYPE, SHIFT, ISA, WORLD, INTERLEAVE, BLOCK_M, BLOCK_KV, 1, UPCAST, CAREFUL=True,
            )  # fmt: skip

    # Finalise: a row that saw nothing gives (0, -inf).
    share = (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    out = acc * share
    if REST_VALUE > 0:
        rest *= share
    # From here on, 8-bit V is in one part again.
    BLOCK_OUT: tl.constexpr = BLOCK_VALUE if V_NUMBER == "plain" else 2 * BLOCK_VALUE
    REST_OUT: tl.constexpr = REST_VALUE if V_NUMBER == "plain" else 0
    if V_NUMBER != "plain":
        out = tl.interleave(out, rest)
        if v_scale_ptr is not None and not V_SCALED_BY_ROW:
            v_scale_ptr += table * V_SCALE_BLOCK + kv_head * V_SCALE_HEAD
            if V_NUMBER == "int8":
                channel = tl.arange(0, BLOCK_OUT)
                out *= tl.load(v_scale_ptr + channel * V_SCALE_ROW, mask=channel < VALUE_DIM, other=0.0)[None, :]
            else:
                out *= tl.load(v_scale_ptr)
    # A division, which no compiler contracts with what follows: a sink must join the same bits here and in `merge`.
    lse = tl.div_rn(log_total, tl.zeros_like(total) + LOG2E)

    # Store, or leave a part and let the last piece of the sequence merge them.
    if pieces_ptr is None or num_parts == 1:
        store_rows(
            out, lse, sinks_ptr, out_ptr, lse_ptr, term_stride, out_stride, lse_stride, row, head, is_row,
            VALUE_DIM, 0, BLOCK_OUT,
        )  # fmt: skip
        if REST_OUT > 0:
            store_rows(
                rest, lse, sinks_ptr, out_ptr, lse_ptr, term_stride, out_stride, lse_stride, row, head, is_row,
                VALUE_DIM, BLOCK_OUT, REST_OUT,
            )  # fmt: skip
    else:
        part_row = (tile.to(tl.int64) * NUM_KV_HEADS + kv_head) * PART_ROWS + tl.arange(0, BLOCK_M)
        store_parts(out, parts_ptr, part_row, is_row, VALUE_DIM, 0, BLOCK_OUT)
        if REST_OUT > 0:
            store_parts(rest, parts_ptr, part_row, is_row, VALUE_DIM, BLOCK_OUT, REST_OUT)
        tl.store(parts_lse_ptr + part_row, lse, mask=is_row)
        tl.debug_barrier()
        tickets_ptr += (tile - part) * NUM_KV_HEADS + kv_head
        if tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(tickets_ptr, 0)
            r = tl.arange(0, PART_ROWS)
            first_part = ((tile - part).to(tl.int64) * NUM_KV_HEADS + kv_head) * PART_ROWS + r
            is_merged, merged_head = r < num_rows, kv_head * GROUP_SIZE + r % GROUP_SIZE
            merged_row = query_row(rows_ptr, start + r // GROUP_SIZE, is_merged)
            merged, merged_lse = merge_parts(
                parts_ptr, parts_lse_ptr, first_part, is_merged, num_parts, NUM_KV_HEADS * PART_ROWS, PART_ROWS,
                VALUE_DIM, 0, BLOCK_OUT,
            )  # fmt: skip
            store_rows(
                merged, merged_lse, sinks_ptr, out_ptr, lse_ptr, term_stride, out_stride, lse_stride,
                merged_row, merged_head, is_merged, VALUE_DIM, 0, BLOCK_OUT,
            )  # fmt: skip
            if REST_OUT > 0:
                merged_rest, merged_lse = merge_parts(
                    parts_ptr, parts_lse_ptr, first_part, is_merged, num_parts, NUM_KV_HEADS * PART_ROWS, PART_ROWS,
                    VALUE_DIM, BLOCK_OUT, REST_OUT,
                )  # fmt: skip
                store_rows(
                    merged_rest, merged_lse, sinks_ptr, out_ptr, lse_ptr, term_stride, out_stride, lse_stride,
                    merged_row, merged_head, is_merged, VALUE_DIM, BLOCK_OUT, REST_OUT,
                )  # fmt: skip


@triton.jit
def static_scales(
    q_scale_ptr,
    k_scale_ptr,
    row_seqs_ptr,
    row,  # [BLOCK_M] int64
    is_row,
    seq,  # of the batch
    kv_head,
    q_scale_stride,
    K_SCALE_SEQ: tl.constexpr,
    K_SCALE_HEAD: tl.constexpr,
    K_NUMBER: tl.constexpr,
):
    """What static scales of q and K multiply scores by: a number, or [BLOCK_M]."""
    scale = 1.0
    if K_NUMBER == "e4m3" or K_NUMBER == "e5m2":
        if k_scale_ptr is not None:
            scale = tl.load(k_scale_ptr + seq * K_SCALE_SEQ + kv_head * K_SCALE_HEAD)
        if q_scale_ptr is not None:
            if row_seqs_ptr is not None:
                seq = tl.load(row_seqs_ptr + row, mask=is_row, other=0)
            scale *= tl.load(q_scale_ptr + seq * q_scale_stride[0] + kv_head * q_scale_stride[1])
    return scale
