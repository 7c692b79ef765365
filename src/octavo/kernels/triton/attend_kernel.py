"""The device side of `attend`: one kernel for every feature.

A program takes a tile of rows (query heads of tokens) that read one KV head of one launch sequence, and the
keys of one split, or of one piece. Tiles of keys that all its rows see whole run without a mask; those at the
edges of some row's interval run with one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.common import (
    LOG2E,
    finite_peak,
    global_position,
    local_count,
    mask_bounds,
    page_rows,
    transform_scores,
)

NO_KEY = tl.constexpr(2**31 - 1)


# What changes from step to step must not make another kernel.
@triton.jit(
    do_not_specialize=["lse_stride", "table_stride", "num_seqs", "num_splits", "num_tiles", "rank"],
    do_not_specialize_on_alignment=[
        "pieces_ptr",
        "tickets_ptr",
        "lse_ptr",
        "query_start_loc_ptr",
        "kv_splits_ptr",
        "rows_ptr",
        "positions_ptr",
        "seq_lens_ptr",
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
    table_ptr,  # [batch sequences, max_blocks] int32
    q_stride,  # (token, head)
    k_stride,  # (block, row, head)
    v_stride,  # (block, row, head)
    out_stride,  # (split, token, head)
    lse_stride,  # (split, token, head)
    table_stride,
    term_stride,  # (slopes, sinks)
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
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PART_ROWS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    SAME_INTERVAL: tl.constexpr,
    INVARIANT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A program: BLOCK_M rows of one KV head against one split of their keys."""
    # Rows: which tile of which launch sequence this is, and which keys.
    kv_head, tile, split = work_item(num_tiles, NUM_KV_HEADS, ONE_TILE)
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
    num_rows = query_len * GROUP_SIZE
    if first_row >= num_rows:
        return
    flat = first_row + tl.arange(0, BLOCK_M)
    is_row = flat < num_rows
    row = query_row(rows_ptr, start + flat // GROUP_SIZE, is_row)
    head = kv_head * GROUP_SIZE + flat % GROUP_SIZE
    if pieces_ptr is not None:
        pos = num_keys - query_len + flat // GROUP_SIZE
    else:
        pos = tl.load(positions_ptr + row, mask=is_row, other=0)
        num_keys = tl.load(seq_lens_ptr + row, mask=is_row, other=0)

    # Bounds: the mask of each row, in local keys of this split.
    lo, hi = mask_bounds(pos, num_keys, window_left, window_right, CAUSAL)
    lo = tl.maximum(local_count(lo, WORLD, rank, INTERLEAVE), kv_start)
    hi = tl.minimum(local_count(hi, WORLD, rank, INTERLEAVE), kv_end)
    sees = is_row & (lo < hi)
    last = tl.max(tl.where(sees, hi, 0))
    first = tl.minimum(tl.min(tl.where(sees, lo, NO_KEY)), last)
    tile_begin, tile_end = first // BLOCK_KV, tl.cdiv(last, BLOCK_KV)
    # In the invariant mode every tile has a mask: whether a neighbour needs one must not show.
    whole_begin, whole_end = tile_end, tile_end
    if not INVARIANT:
        whole_begin = tl.cdiv(tl.max(tl.where(is_row, lo, 0)), BLOCK_KV)
        whole_begin = tl.minimum(tl.maximum(whole_begin, tile_begin), tile_end)
        whole_end = tl.min(tl.where(is_row, hi, NO_KEY)) // BLOCK_KV
        whole_end = tl.minimum(tl.maximum(whole_end, whole_begin), tile_end)

    q_ptr += row * q_stride[0] + head * q_stride[1]
    table = seq.to(tl.int64)
    if seqs_ptr is not None:
        table = tl.load(seqs_ptr + seq)
    table_ptr += table * table_stride
    k_ptr += kv_head.to(tl.int64) * k_stride[2]
    v_ptr += kv_head.to(tl.int64) * v_stride[2]
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head * term_stride[0], mask=is_row, other=0.0)

    # The loop, and once more with care where a value that is not finite may have reached rows that do not see
    # its key: 0 * NaN is NaN.
    peak, total, acc = attend_keys(
        q_ptr, k_ptr, v_ptr, table_ptr, k_stride, v_stride, is_row, pos, slopes, lo, hi, first, last, whole_begin,
        whole_end, factor, pre_scale, soft_cap, rank, CAUSAL, SQRT_ALIBI, HEAD_DIM, VALUE_DIM, BLOCK_HEAD,
        BLOCK_VALUE, BLOCK_SIZE, WORLD, INTERLEAVE, BLOCK_M, BLOCK_KV, STAGES, SAME_STRIDES, UPCAST, CAREFUL=False,
    )  # fmt: skip
    if not SAME_INTERVAL:
        if tl.max(tl.max(((acc - acc) != 0).to(tl.int32), 1), 0) > 0:
            peak, total, acc = attend_keys(
                q_ptr, k_ptr, v_ptr, table_ptr, k_stride, v_stride, is_row, pos, slopes, lo, hi, first, last,
                whole_begin, whole_end, factor, pre_scale, soft_cap, rank, CAUSAL, SQRT_ALIBI, HEAD_DIM, VALUE_DIM,
                BLOCK_HEAD, BLOCK_VALUE, BLOCK_SIZE, WORLD, INTERLEAVE, BLOCK_M, BLOCK_KV, 1, SAME_STRIDES, UPCAST,
                CAREFUL=True,
            )  # fmt: skip

    # Finalise: a row that saw nothing gives (0, -inf).
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    # A division, which no compiler contracts with what follows: a sink must join the same bits here and in `merge`.
    lse = tl.div_rn(peak * factor + tl.log2(total), tl.zeros_like(total) + LOG2E)

    # Store, or leave a part and let the last piece of the sequence merge them.
    if pieces_ptr is None or num_parts == 1:
        store_rows(
            out, lse, sinks_ptr, out_ptr, lse_ptr, term_stride, out_stride, lse_stride, split, row, head, is_row,
            VALUE_DIM, BLOCK_VALUE,
        )  # fmt: skip
    else:
        v_column = tl.arange(0, BLOCK_VALUE)
        part_row = (tile.to(tl.int64) * NUM_KV_HEADS + kv_head) * PART_ROWS + flat
        is_out = is_row[:, None] & (v_column < VALUE_DIM)[None, :]
        tl.store(parts_ptr + part_row[:, None] * VALUE_DIM + v_column[None, :], out, mask=is_out)
        tl.store(parts_lse_ptr + part_row, lse, mask=is_row)
        tl.debug_barrier()
        tickets_ptr += (tile - part) * NUM_KV_HEADS + kv_head
        if tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(tickets_ptr, 0)
            r = tl.arange(0, PART_ROWS)
            first_part = ((tile - part).to(tl.int64) * NUM_KV_HEADS + kv_head) * PART_ROWS + r
            merged, merged_lse = merge_parts(
                parts_ptr, parts_lse_ptr, first_part, r < num_rows, num_parts, NUM_KV_HEADS * PART_ROWS,
                PART_ROWS, VALUE_DIM, BLOCK_VALUE,
            )  # fmt: skip
            store_rows(
                merged, merged_lse, sinks_ptr, out_ptr, lse_ptr, term_stride, out_stride, lse_stride, split,
                query_row(rows_ptr, start + r // GROUP_SIZE, r < num_rows), kv_head * GROUP_SIZE + r % GROUP_SIZE,
                r < num_rows, VALUE_DIM, BLOCK_VALUE,
            )  # fmt: skip


@triton.jit
def attend_keys(
    q_ptr,  # [BLOCK_M] pointers to the rows
    k_ptr,  # of this KV head, like v_ptr
    v_ptr,
    table_ptr,  # of this sequence
    k_stride,
    v_stride,
    is_row,  # [BLOCK_M] bool
    pos,  # [BLOCK_M] int32
    slopes,  # [BLOCK_M] float32 or None
    lo,  # [BLOCK_M] int32, local keys that a row sees: [lo, hi)
    hi,
    first,  # local keys that some row sees lie in [first, last)
    last,
    whole_begin,  # tiles [whole_begin, whole_end) are seen whole by every row
    whole_end,
    factor,
    pre_scale,
    soft_cap,
    rank,
    CAUSAL: tl.constexpr,
    SQRT_ALIBI: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    STAGES: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    UPCAST: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Online softmax over the keys: peak and total [BLOCK_M] in the units of `factor`, acc [BLOCK_M, BLOCK_VALUE]."""
    if SAME_STRIDES:
        v_stride = k_stride  # then a key's K and V have one offset, worked out once
    j_in_tile, k_column, v_column = tl.arange(0, BLOCK_KV), tl.arange(0, BLOCK_HEAD), tl.arange(0, BLOCK_VALUE)
    q = tl.load(q_ptr[:, None] + k_column[None, :], mask=is_row[:, None] & (k_column < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    for t in tl.range(whole_begin, whole_end, num_stages=STAGES):
        j = t * BLOCK_KV + j_in_tile
        k = load_keys(k_ptr, table_ptr, j, k_column, k_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_HEAD, UPCAST)
        scores = multiply_keys(q, k)
        key_pos = global_position(j, WORLD, rank, INTERLEAVE)
        scores = transform_scores(scores, pre_scale, soft_cap, slopes, pos, key_pos, SQRT_ALIBI, CAUSAL)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        rescale = tl.exp2((peak - new_peak) * factor)
        p = tl.exp2(tl.fma(scores, factor, (-new_peak * factor)[:, None]))
        v = load_keys(v_ptr, table_ptr, j, v_column, v_stride, BLOCK_SIZE, VALUE_DIM, BLOCK_VALUE, UPCAST)
        total = total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak

    tile_begin = first // BLOCK_KV
    left = whole_begin - tile_begin
    for i in tl.range(0, left + tl.cdiv(last, BLOCK_KV) - whole_end, num_stages=STAGES):
        t = tl.where(i < left, tile_begin + i, whole_end + i - left)
        j = t * BLOCK_KV + j_in_tile
        visible = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
        # Lanes past the keys repeat the nearest key, so that nothing else is looked up.
        j = tl.minimum(tl.maximum(j, first), last - 1)
        if CAREFUL:
            v = load_keys(v_ptr, table_ptr, j, v_column, v_stride, BLOCK_SIZE, VALUE_DIM, BLOCK_VALUE, UPCAST)
            acc = mark_rows(acc, v, visible, UPCAST)
        k = load_keys(k_ptr, table_ptr, j, k_column, k_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_HEAD, UPCAST)
        scores = multiply_keys(q, k)
        key_pos = global_position(j, WORLD, rank, INTERLEAVE)
        scores = transform_scores(scores, pre_scale, soft_cap, slopes, pos, key_pos, SQRT_ALIBI, CAUSAL)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = finite_peak(new_peak)
        rescale = tl.exp2((peak - shift) * factor)
        p = tl.exp2(tl.fma(scores, factor, (-shift * factor)[:, None]))
        v = load_keys(v_ptr, table_ptr, j, v_column, v_stride, BLOCK_SIZE, VALUE_DIM, BLOCK_VALUE, UPCAST)
        total = total * rescale + tl.sum(p, 1)
        acc *= rescale[:, None]
        if CAREFUL:
            v = tl.where((v - v) == 0, v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def query_row(rows_ptr, launch_row, is_row):
    """The query rows behind launch rows, int64."""
    if rows_ptr is None:
        return launch_row.to(tl.int64)
    else:
        return tl.load(rows_ptr + launch_row, mask=is_row, other=0)


@triton.jit
def merge_parts(
    parts_ptr,
    parts_lse_ptr,
    first_part,  # [PART_ROWS] int64, rows of the sequence's first part
    is_row,  # [PART_ROWS]
    num_parts,
    stride,  # rows from one part to the next
    PART_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """The parts of a sequence as one: out [PART_ROWS, BLOCK_VALUE] and lse [PART_ROWS], in the order of the parts."""
    # So many parts at a time that their loads are under way together, and yet fit the registers.
    AT_ONCE: tl.constexpr = max(1, 8192 // (PART_ROWS * BLOCK_VALUE))
    column = tl.arange(0, BLOCK_VALUE)
    top = tl.full([PART_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([PART_ROWS], tl.float32)
    out = tl.zeros([PART_ROWS, BLOCK_VALUE], tl.float32)
    for i in range(0, num_parts, AT_ONCE):
        part = i + tl.arange(0, AT_ONCE)
        at = first_part[None, :] + part[:, None] * stride
        there = is_row[None, :] & (part < num_parts)[:, None]
        # The first-level cache may hold what was there before.
        lse = tl.load(parts_lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        x = tl.load(
            parts_ptr + at[:, :, None] * VALUE_DIM + column[None, None, :],
            mask=there[:, :, None] & (column < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        shift = finite_peak(new_top)
        weight, keep = tl.exp(lse - shift[None, :]), tl.exp(top - shift)
        total = total * keep + tl.sum(weight, 0)
        out = out * keep[:, None] + tl.sum(x * weight[:, :, None], 0)
        top = new_top
    return out / tl.where(total == 0, 1.0, total)[:, None], finite_peak(top) + tl.log(total)


@triton.jit
def store_rows(
    out,  # [rows, BLOCK_VALUE] float32
    lse,  # [rows] float32
    sinks_ptr,
    out_ptr,
    lse_ptr,
    term_stride,
    out_stride,
    lse_stride,
    split,
    row,  # [rows] int64
    head,
    is_row,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Write rows of a state; a sink joins first, by the same arithmetic as in `merge`."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head * term_stride[1], mask=is_row, other=0.0)
        top = finite_peak(tl.maximum(lse, sink))
        weight = tl.exp(lse - top)
        total = tl.exp(sink - top) + weight
        out = tl.div_rn(out * weight[:, None], tl.where(total == 0, 1.0, total)[:, None] + tl.zeros_like(out))
        lse = top + tl.log(total)
    column = tl.arange(0, BLOCK_VALUE)
    out_ptr += split.to(tl.int64) * out_stride[0] + row[:, None] * out_stride[1] + head[:, None] * out_stride[2]
    is_out = is_row[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(out_ptr + column[None, :], out.to(out_ptr.dtype.element_ty), mask=is_out)
    if lse_ptr is not None:
        lse_ptr += split.to(tl.int64) * lse_stride[0] + row * lse_stride[1] + head * lse_stride[2]
        tl.store(lse_ptr, lse, mask=is_row)


@triton.jit
def work_item(num_tiles, NUM_KV_HEADS: tl.constexpr, ONE_TILE: tl.constexpr):
    """(KV head, tile, split) of this program."""
    pid = tl.program_id(0)
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
    """The launch sequence that a tile belongs to, by bisection."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(tl.load(query_start_loc_ptr + middle), middle, GROUP_SIZE, BLOCK_M) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def load_keys(
    plane_ptr,
    table_ptr,
    j,
    column,
    stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """K or V of local keys j: [BLOCK_KV, BLOCK_DIM], 0 in the columns past DIM."""
    at = plane_ptr + page_rows(table_ptr, j, stride[0], stride[1], BLOCK_SIZE)[:, None] + column[None, :]
    if DIM == BLOCK_DIM:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(column < DIM)[None, :], other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def multiply_keys(q, k):
    """q . k in float32: [BLOCK_M, BLOCK_KV]; operands of different types meet in float32."""
    if q.dtype == k.dtype:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        return tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")


@triton.jit
def mark_rows(acc, v, visible, UPCAST: tl.constexpr):
    """The accumulator with NaN where a row sees a value that is not finite, and else as it was."""
    # Products of 1e38 are infinite, and inf - inf is NaN: this needs no second accumulator.
    WIDE: tl.constexpr = tl.float32 if UPCAST else tl.bfloat16
    rows = tl.where(visible, 1e38, 0.0).to(WIDE)
    values = tl.where((v - v) == 0, 0.0, 1e38).to(WIDE)
    acc = tl.dot(rows, values, acc, input_precision="ieee")
    return tl.dot(rows, -values, acc, input_precision="ieee")
