"""From a launch to the compiled kernels: items of work, addresses, threads."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu import decode, native, prefill, rows
from octavo.kernels.cpu.workers import Workers
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

FEW_ROWS = 8
"""Rows up to which a sequence goes to the decode kernel: decode and speculative decode. An item has as many, so
that its accumulators stay in the second-level cache."""

TILE_ROWS = 192
"""Rows (tokens x group) of a prefill item: enough to pay for widening its keys, few enough for the cache."""

SMALL = 1 << 23
"""Bytes of K and V below which one thread does it. Another must be woken, and takes a core from PyTorch's threads,
which wait in a loop for the next matrix product: with 2 MiB, 16 short prompts were generated 10 % slower."""

FLOPS_PER_BYTE = 6
"""Floating-point operations that take as long as reading a byte."""

KINDS = {torch.float32: native.FLOAT32, torch.float16: native.FLOAT16, torch.bfloat16: native.BFLOAT16}
DECODE = {
    torch.float32: decode.work_float32,
    torch.float16: decode.work_float16,
    torch.bfloat16: decode.work_bfloat16,
}
PREFILL = {
    torch.float32: prefill.work_float32,
    torch.float16: prefill.work_float16,
    torch.bfloat16: prefill.work_bfloat16,
}

_NOTHING = np.empty(0, np.float32)
_WORKERS = Workers()

Array = np.ndarray[Any, Any]


class Work(NamedTuple):
    """A launch's work for layers with one mask and head count."""

    rows: native.Rows
    decode_items: Array  # [n, 6] int64, as the decode kernel takes them
    prefill_items: Array  # [n, 5] int64, as the prefill kernel takes them
    max_units: int  # blocks of four query heads of the largest decode item
    max_rows: int  # launch rows of the largest prefill item
    decode_keys: int  # keys read by the decode items, per KV head
    prefill_pairs: int  # (row, key) pairs of the prefill items, per query head


def attend(spec: AttentionSpec, plan: Plan, launch: Launch, operands: Operands, state: State) -> None:
    """Run one launch; K and V must be of one dtype."""
    work = _work(spec, plan, launch)
    if not len(work.decode_items) and not len(work.prefill_items):
        return
    sinks = operands.sinks
    # In the invariant mode the sink joins by the same arithmetic whether the plan has one state or more.
    sink_later = sinks is not None and plan.batch_invariant
    out, lse = state
    if out.dtype not in KINDS or sink_later:
        out = plan.workspace.scratch("out", tuple(out.shape), torch.float32)
    if sink_later:
        lse = plan.workspace.scratch("lse", tuple(out.shape[:3]), torch.float32)
        operands = operands._replace(sinks=None)
    _run(_call(spec, plan, work, operands, State(out, lse)), work, operands.cache.k_cache.dtype)
    if out is state.out:
        return
    written = torch.from_numpy(work.rows.rows)
    result = State(out[:, written], None if lse is None else lse[:, written])
    if sink_later:
        merge(result, sinks, result, len(written))
        if state.lse is not None:
            assert result.lse is not None
            state.lse[:, written] = result.lse
    state.out[:, written] = result.out.to(state.out.dtype)


def can_append(cache: LayerCache, k: Tensor, v: Tensor) -> bool:
    """Whether `append` serves these tensors."""
    return all(
        new.dtype in KINDS and pages.dtype in KINDS and new.stride(2) == 1 and new.shape[2] % 8 == 0
        for new, pages in ((k, cache.k_cache), (v, cache.v_cache))
    )


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots; arguments as in `kernels.cpu.append`."""
    slots = slot_mapping.contiguous().numpy()
    copies = [
        rows.Copy(
            new.data_ptr(),
            _bytes(new.stride()[:2], new.element_size()),
            KINDS[new.dtype],
            pages.data_ptr(),
            _bytes(pages.stride()[:3], pages.element_size()),
            KINDS[pages.dtype],
            new.shape[2],
        )
        for new, pages in ((k, cache.k_cache), (v, cache.v_cache))
    ]
    facts = [tuple(copy) for copy in copies]
    counter = np.zeros(1, np.int64)
    moved = len(slots) * cache.num_kv_heads * sum(copy.width for copy in copies) * k.element_size()
    _WORKERS.run(
        lambda: rows.append(slots, counter.ctypes.data, *facts, cache.block_size, cache.num_kv_heads),
        1 if moved < SMALL else torch.get_num_threads(),
    )


def can_merge(parts: State, result: State) -> bool:
    """Whether `merge` serves these tensors."""
    out = parts.out
    return (
        out.dtype == torch.float32
        and result.out.dtype in KINDS
        and out.stride(3) == result.out.stride(3) == 1
        and out.shape[3] % 8 == 0
    )


def merge(parts: State, sinks: Tensor | None, result: State, num_rows: int) -> None:
    """Merge the first num_rows rows; arguments as in `kernels.cpu.merge`."""
    assert parts.lse is not None
    out, lse, into = parts.out, parts.lse, result.lse
    num_parts, _, num_heads, width = out.shape
    facts = rows.Parts(
        out.data_ptr(),
        _bytes(out.stride()[:3], 4),
        lse.data_ptr(),
        _bytes(lse.stride(), 4),
        result.out.data_ptr(),
        _bytes(result.out.stride()[1:3], result.out.element_size()),
        KINDS[result.out.dtype],
        0 if into is None else into.data_ptr(),
        (0, 0) if into is None else _bytes(into.stride()[1:], 4),
        num_parts,
        num_rows,
        num_heads,
        width,
    )
    counter = np.zeros(1, np.int64)
    given = _NOTHING if sinks is None else sinks.contiguous().numpy()
    moved = num_parts * num_rows * num_heads * width * 4
    _WORKERS.run(
        lambda: rows.merge(tuple(facts), given, counter.ctypes.data),
        1 if moved < SMALL else torch.get_num_threads(),
    )


def _call(spec: AttentionSpec, plan: Plan, work: Work, operands: Operands, state: State) -> native.Call:
    q, cache, slopes, sinks = operands
    out, lse = state
    k, v = cache.k_cache, cache.v_cache
    tensors = native.Tensors(
        q.data_ptr(),
        _bytes(q.stride()[:2], q.element_size()),
        KINDS[q.dtype],
        k.data_ptr(),
        _bytes(k.stride()[:3], k.element_size()),
        v.data_ptr(),
        _bytes(v.stride()[:3], v.element_size()),
        out.data_ptr(),
        _bytes(out.stride()[:3], out.element_size()),
        KINDS[out.dtype],
        0 if lse is None else lse.data_ptr(),
        (0, 0, 0) if lse is None else _bytes(lse.stride(), 4),
    )
    shard = plan.shard
    shape = native.Shape(
        spec.num_kv_heads,
        spec.group_size,
        spec.head_dim,
        spec.v_dim,
        plan.block_size,
        shard.dcp_world,
        shard.dcp_rank,
        shard.interleave,
    )
    cap = spec.logits_soft_cap
    bias = 0 if spec.alibi is None else 3 if spec.alibi == "sqrt" else 1 if spec.causal else 2
    if cap is None:
        transforms = native.Transforms(spec.scale * native.LOG2_E, 0.0, bias)
    else:
        transforms = native.Transforms(spec.scale / cap, cap * native.LOG2_E, bias)
    return native.Call(
        shape,
        tensors,
        transforms,
        work.rows,
        _NOTHING if slopes is None else (slopes * native.LOG2_E).numpy(),
        _NOTHING if sinks is None else sinks.contiguous().numpy(),
    )


def _run(call: native.Call, work: Work, dtype: torch.dtype) -> None:
    """Both kernels' items, on as many threads as they are worth."""
    facts, shape = native.plain(call), call.shape
    counters = np.zeros(2, np.int64)
    redo = np.zeros(len(work.prefill_items), np.bool_)
    items = work.prefill_items

    def run() -> None:
        if len(work.decode_items):
            DECODE[dtype](facts, work.decode_items, counters.ctypes.data, work.max_units)
        if len(items):
            PREFILL[dtype](facts, items, counters.ctypes.data + 8, work.max_rows, redo)

    widths = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    cost = widths * (work.decode_keys * dtype.itemsize + 2 * work.prefill_pairs * shape.group // FLOPS_PER_BYTE)
    num_items = len(work.decode_items) + len(items)
    _WORKERS.run(run, 1 if cost < SMALL else min(torch.get_num_threads(), num_items))
    if redo.any():
        _run_alone(call, items[redo], dtype)


def _run_alone(call: native.Call, items: Array, dtype: torch.dtype) -> None:
    """Prefill items again, a row at a time: the decode kernel touches only what a row sees."""
    pieces = [
        (seq, split, row, min(row + FEW_ROWS, end), head, head + 1)
        for seq, split, start, end, head in items.tolist()
        for row in range(start, end, FEW_ROWS)
    ]
    array, counter = np.array(pieces, np.int64), np.zeros(1, np.int64)
    DECODE[dtype](native.plain(call), array, counter.ctypes.data, _units(call.shape.group, array))


def _units(group_size: int, items: Array) -> int:
    """Blocks of four query heads of the largest decode item."""
    rows, heads = items[:, 3] - items[:, 2], items[:, 5] - items[:, 4]
    return int((rows * heads).max(initial=0)) * -(-group_size // decode.HEADS)


def _work(spec: AttentionSpec, plan: Plan, launch: Launch) -> Work:
    """What to do, worked out once a step and mask."""
    mask = (spec.causal, spec.window_left, spec.window_right)
    key = ("compiled", launch.first_state, *mask, spec.num_kv_heads, spec.group_size)
    found: Work | None = plan.memo.get(key)
    if found is None:
        found = plan.memo[key] = _make_work(spec, plan, launch)
    return found


def _make_work(spec: AttentionSpec, plan: Plan, launch: Launch) -> Work:
    starts = launch.query_start_loc.tolist()
    query_rows = torch.arange(starts[-1]) if launch.rows is None else launch.rows[: starts[-1]]
    lo, hi = spec.bounds(plan.positions[query_rows], plan.seq_lens[query_rows])
    lo, hi = plan.shard.local_count(lo), plan.shard.local_count(hi)
    table = plan.block_table if launch.seqs is None else plan.block_table[launch.seqs]
    facts = (query_rows, lo, hi, plan.positions[query_rows], launch.kv_splits, table)
    seen = (hi - lo).clamp(min=0)
    few: list[int] = []
    many: list[int] = []
    for i, (start, end) in enumerate(pairwise(starts)):
        # The decode kernel takes every row alone, always in the same order: bits depend on nothing else.
        if start < end:
            (few if plan.batch_invariant or end - start <= FEW_ROWS else many).append(i)
    decode_items, prefill_items = _decode_items(spec, launch, starts, few), _prefill_items(spec, launch, starts, many)
    return Work(
        native.Rows(*(np.ascontiguousarray(x.numpy()) for x in facts)),
        decode_items,
        prefill_items,
        _units(spec.group_size, decode_items),
        int((prefill_items[:, 3] - prefill_items[:, 2]).max(initial=0)),
        sum(int(seen[starts[i] : starts[i + 1]].max()) for i in few),
        sum(int(seen[starts[i] : starts[i + 1]].sum()) for i in many),
    )


def _decode_items(spec: AttentionSpec, launch: Launch, starts: list[int], seqs: list[int]) -> Array:
    lengths = launch.kv_splits.diff().tolist()
    pieces = [
        (i, split, row, min(row + FEW_ROWS, starts[i + 1]))
        for i in seqs
        for row in range(starts[i], starts[i + 1], FEW_ROWS)
        for split in range(launch.num_splits)
        if lengths[i][split] or launch.num_splits == 1  # a part that nobody writes counts as empty
    ]
    # Few pieces: give the threads a part of the heads each. The longest come first.
    threads = torch.get_num_threads()
    parts = min(spec.num_kv_heads, -(-2 * threads // max(len(pieces), 1))) if threads > 1 else 1
    edges = [spec.num_kv_heads * part // parts for part in range(parts + 1)]
    pieces.sort(key=lambda piece: -lengths[piece[0]][piece[1]])
    items = [(*piece, a, b) for piece in pieces for a, b in pairwise(edges)]
    return np.array(items, np.int64).reshape(-1, 6)


def _prefill_items(spec: AttentionSpec, launch: Launch, starts: list[int], seqs: list[int]) -> Array:
    tokens = max(1, TILE_ROWS // spec.group_size)
    pieces = [
        (i, split, row, min(row + tokens, starts[i + 1]))
        for i in seqs
        for row in range(starts[i], starts[i + 1], tokens)
        for split in range(launch.num_splits)
    ]
    # Later rows of a causal sequence see more keys: the longest come first, so that threads end together.
    lengths = launch.kv_splits.diff().tolist()
    if spec.causal:
        pieces.sort(key=lambda piece: starts[piece[0] + 1] - piece[3] - lengths[piece[0]][piece[1]])
    items = [(*piece, head) for piece in pieces for head in range(spec.num_kv_heads)]
    return np.array(items, np.int64).reshape(-1, 5)


def _bytes(strides: tuple[int, ...], size: int) -> Any:
    return tuple(stride * size for stride in strides)
