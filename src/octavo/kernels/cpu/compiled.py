"""From a launch to the compiled kernels: items of work, addresses, threads."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu import jobs, native, prefill_matrix_products, rows
from octavo.kernels.cpu.decode_tile import HEADS
from octavo.kernels.cpu.stored import KINDS, WIDE_KINDS
from octavo.kernels.cpu.workers import Workers
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

FEW_ROWS = 8
"""Rows up to which a sequence goes to the decode kernel: decode and speculative decode. An item has as many, so
that its accumulators stay in the second-level cache."""

LEAST_TILE_ROWS, MOST_TILE_ROWS = 192, 384
"""Rows (tokens x group) of a prefill item: enough to pay for widening its keys."""

TILE_NUMBERS = 96 * 1024
"""Numbers of an item's queries and accumulators: they stay in the second-level cache."""

FLOPS_PER_BYTE = 6
"""Floating-point operations that take as long as reading a byte."""

_WORKERS = Workers()

Array = np.ndarray[Any, Any]


class Work(NamedTuple):
    """A launch's work for layers with one mask and one shape of heads."""

    arrays: native.Rows
    rows: tuple[int, ...]  # addresses and sizes of the arrays, as `native.pack` takes them
    decode: tuple[int, int, int]  # decode items likewise: address, number, largest
    prefill: tuple[int, int, int]
    decode_items: Array  # [n, 6] int64, see `decode.work`
    prefill_items: Array  # [n, 5] int64, see `prefill.work`
    decode_keys: int  # keys read by the decode items, per KV head
    prefill_pairs: int  # (row, key) pairs of the prefill items, per query head


def attend(spec: AttentionSpec, plan: Plan, launch: Launch, operands: Operands, state: State) -> None:
    """Run one launch."""
    work = _work(spec, plan, launch)
    if not len(work.decode_items) and not len(work.prefill_items):
        return
    if operands.q.dtype not in WIDE_KINDS:
        operands = operands._replace(q=operands.q.float())
    sinks = operands.sinks
    # In the invariant mode the sink joins by the same arithmetic whether the plan has one state or more.
    sink_later = sinks is not None and plan.batch_invariant
    out, lse = state
    if out.dtype not in WIDE_KINDS or sink_later:
        out = plan.workspace.scratch("out", tuple(out.shape), torch.float32)
    if sink_later:
        lse = plan.workspace.scratch("lse", tuple(out.shape[:3]), torch.float32)
        operands = operands._replace(sinks=None)
    _run(spec, plan, work, operands, State(out, lse))
    if out is state.out:
        return
    written = torch.from_numpy(work.arrays.rows)
    result = State(out[:, written], None if lse is None else lse[:, written])
    if sink_later:
        merge(result, sinks, result, len(written))
        if state.lse is not None:
            assert result.lse is not None
            state.lse[:, written] = result.lse
    state.out[:, written] = result.out.to(state.out.dtype)


def on_units(q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype) -> bool:
    """Whether prefill is products of bfloat16: on matrix units always, with dot products where no number is split, as
    they are twice as fast as those of float32."""
    units = prefill_matrix_products.UNITS
    return units == "tiles" or (
        units == "dots" and q_dtype == torch.bfloat16 and not {k_dtype, v_dtype} & jobs.IN_PARTS
    )


def can_append(cache: LayerCache, k: Tensor, v: Tensor) -> bool:
    """Whether `append` serves these tensors."""
    return all(
        new.dtype in WIDE_KINDS and pages.dtype in KINDS and new.stride(2) == 1 and new.shape[2] % 8 == 0
        for new, pages in ((k, cache.k_cache), (v, cache.v_cache))
    )


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write rows to slots; arguments as in `kernels.cpu.append`."""
    slots = slot_mapping.contiguous()
    # Named, so that they outlive the job.
    statics = [_static(scale, cache.num_kv_heads) for scale in (cache.k_descale, cache.v_descale)]
    new_k, new_v = (
        (
            new.data_ptr(),
            *_bytes(new.stride()[:2], new.element_size()),
            KINDS[new.dtype],
            pages.data_ptr(),
            *_bytes(pages.stride()[:3], pages.element_size()),
            KINDS[pages.dtype],
            new.shape[2],
            *_row_scales(scale),
            *((0, 0) if static is None else (static.data_ptr(), static.stride(0) * 4)),
        )
        for new, pages, scale, static in (
            (k, cache.k_cache, cache.k_descale, statics[0]),
            (v, cache.v_cache, cache.v_descale, statics[1]),
        )
    )
    num_slots = len(slots)
    job = rows.pack_append((slots.data_ptr(), num_slots), new_k, new_v, cache.block_size, cache.num_kv_heads)
    moved = num_slots * cache.num_kv_heads * (k.shape[2] + v.shape[2]) * k.element_size()
    _WORKERS.run(jobs.compiled("append"), job, _threads(moved))


def can_merge(parts: State, result: State) -> bool:
    """Whether `merge` serves these tensors."""
    out = parts.out
    return (
        out.dtype == torch.float32
        and result.out.dtype in WIDE_KINDS
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
    given = None if sinks is None else sinks.contiguous()
    job = rows.pack_merge(_flat(facts), _floats(given))
    _WORKERS.run(jobs.compiled("merge"), job, _threads(num_parts * num_rows * num_heads * width * 4))


def _run(spec: AttentionSpec, plan: Plan, work: Work, operands: Operands, state: State) -> None:
    """Both kernels' items, on as many threads as they are worth."""
    shape, transforms = _facts(spec, plan)
    tensors = _tensors(operands, state)
    slopes = None if operands.alibi_slopes is None else operands.alibi_slopes * native.LOG2_E
    sinks = None if operands.sinks is None else operands.sinks.contiguous()
    terms = _floats(slopes), _floats(sinks)
    items, cache = work.prefill_items, operands.cache
    _kept, scales = _scales(plan, operands)
    redo = np.zeros(len(items), np.uint8)
    marks = _address(redo) if len(items) else 0
    k_dtype, v_dtype = cache.k_cache.dtype, cache.v_cache.dtype
    dtypes = operands.q.dtype, k_dtype, v_dtype
    used = *dtypes, on_units(*dtypes)
    pages = jobs.pages_of(*used, len(work.decode_items) > 0, len(items) > 0)
    job = native.pack(shape, tensors, transforms, work.rows, *terms, work.decode, work.prefill, marks, scales, pages)
    key_bytes = spec.head_dim * k_dtype.itemsize + spec.v_dim * v_dtype.itemsize
    pair_flops = 2 * spec.group_size * (spec.head_dim + spec.v_dim)
    cost = spec.num_kv_heads * (work.decode_keys * key_bytes + work.prefill_pairs * pair_flops // FLOPS_PER_BYTE)
    kernel = jobs.compiled("attend")
    _WORKERS.run(kernel, job, _threads(cost))
    if len(items) and redo.any():
        # Again, a row at a time: the decode kernel touches only what a row sees.
        pieces = [
            (seq, split, row, min(row + FEW_ROWS, end), head, head + 1)
            for seq, split, start, end, head in items[redo != 0].tolist()
            for row in range(start, end, FEW_ROWS)
        ]
        alone = np.array(pieces, np.int64)
        again, pages = _items(alone, _units(spec.group_size, alone)), jobs.pages_of(*used, True, False)
        job = native.pack(shape, tensors, transforms, work.rows, *terms, again, (0, 0, 0), 0, scales, pages)
        _WORKERS.run(kernel, job, 1)


def _facts(spec: AttentionSpec, plan: Plan) -> tuple[native.Shape, native.Transforms]:
    """What all launches and layers of a step and spec have in common."""
    key = ("facts", spec)
    found: tuple[native.Shape, native.Transforms] | None = plan.memo.get(key)
    if found is not None:
        return found
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
    plan.memo[key] = shape, transforms
    return shape, transforms


def _tensors(operands: Operands, state: State) -> tuple[int, ...]:
    """A flat `native.Tensors`."""
    q, (out, lse) = operands.q, state
    k, v = operands.cache.k_cache, operands.cache.v_cache
    return (
        q.data_ptr(),
        *_bytes(q.stride()[:2], q.element_size()),
        KINDS[q.dtype],
        k.data_ptr(),
        *_bytes(k.stride()[:3], k.element_size()),
        v.data_ptr(),
        *_bytes(v.stride()[:3], v.element_size()),
        out.data_ptr(),
        *_bytes(out.stride()[:3], out.element_size()),
        KINDS[out.dtype],
        0 if lse is None else lse.data_ptr(),
        *((0, 0, 0) if lse is None else _bytes(lse.stride(), 4)),
    )


def _scales(plan: Plan, operands: Operands) -> tuple[list[Tensor], tuple[int, ...]]:
    """A flat `native.Scales`, and the tensors that must outlive it."""
    cache, kept = operands.cache, []
    found: list[tuple[int, ...]] = [(0, 0, 0), _row_scales(cache.k_descale), _row_scales(cache.v_descale), (0, 0, 0, 0)]
    if cache.format.is_fp8:
        k, v = (_by_query(plan, cache, x) for x in (cache.k_descale, cache.v_descale))
        if operands.q_descale is not None:
            q = _by_query(plan, cache, operands.q_descale)
            k = q if k is None or q is None else k * q
        kept = [x for x in (k, v) if x is not None]
        if k is not None:
            found[0] = (k.data_ptr(), *_bytes(k.stride(), 4))
        if v is not None:
            found[3] = (v.data_ptr(), *_bytes(v.stride(), 4), 0)
    elif cache.format.v_scaled_by_channel:
        assert cache.v_descale is not None
        v = cache.v_descale.contiguous()
        kept, found[3] = [v], (v.data_ptr(), 0, v.stride(0) * 4, 4)
    return kept, tuple(x for each in found for x in each)


def _by_query(plan: Plan, cache: LayerCache, descale: Tensor | None) -> Tensor | None:
    """fp8's static scales [] | [num_kv_heads] | [num_seqs, num_kv_heads] as [num_tokens, num_kv_heads]."""
    if descale is None:
        return None
    if descale.ndim < 2:
        return descale.expand(plan.num_tokens, cache.num_kv_heads)
    return descale[plan.seqs_of_rows()]


def _row_scales(scales: Tensor | None) -> tuple[int, int, int, int]:
    """Address and strides in bytes (block, row, head) of scales by row [num_blocks, num_kv_heads, block_size]; zeros
    where scales are others."""
    if scales is None or scales.ndim != 3:
        return 0, 0, 0, 0
    block, head, row = scales.stride()
    return scales.data_ptr(), block * 4, row * 4, head * 4


def _static(scales: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """Static scales as `rows.Copy` reads them: a number or contiguous channels a KV head. None: rows
    have theirs, or there are none."""
    if scales is None or scales.ndim == 3:
        return None
    return scales.contiguous() if scales.ndim == 2 else scales.expand(num_kv_heads)


def _units(group_size: int, items: Array) -> int:
    """Blocks of four query heads of the largest decode item."""
    num_rows, heads = items[:, 3] - items[:, 2], items[:, 5] - items[:, 4]
    return int((num_rows * heads).max(initial=0)) * -(-group_size // HEADS)


def _work(spec: AttentionSpec, plan: Plan, launch: Launch) -> Work:
    """What to do, worked out once a step and mask."""
    mask = (spec.causal, spec.window_left, spec.window_right)
    heads = (spec.num_kv_heads, spec.group_size, spec.head_dim, spec.v_dim)
    key = ("compiled", launch.first_state, *mask, *heads)
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
    arrays = native.Rows(*(np.ascontiguousarray(x.numpy()) for x in facts))
    return Work(
        arrays,
        (
            *(_address(array) for array in arrays),
            len(arrays.rows),
            *arrays.kv_splits.shape,
            arrays.block_table.shape[1],
        ),
        _items(decode_items, _units(spec.group_size, decode_items)),
        _items(prefill_items, int((prefill_items[:, 3] - prefill_items[:, 2]).max(initial=0))),
        decode_items,
        prefill_items,
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
    tokens = max(1, _tile_rows(spec, sum(starts[i + 1] - starts[i] for i in seqs)) // spec.group_size)
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


def _tile_rows(spec: AttentionSpec, num_tokens: int) -> int:
    """Rows of a prefill item: as many as the cache holds, if every thread still gets several items."""
    shared = num_tokens * spec.num_q_heads // (4 * torch.get_num_threads())
    return max(LEAST_TILE_ROWS, min(MOST_TILE_ROWS, TILE_NUMBERS // (spec.head_dim + spec.v_dim), shared))


def _threads(num_bytes: int) -> int:
    """Threads for work that takes as long as reading so many bytes."""
    return 1 if num_bytes < _WORKERS.least_bytes else torch.get_num_threads()


def _items(items: Array, largest: int) -> tuple[int, int, int]:
    """Items as `native.pack` takes them; the array must live as long as they are used."""
    return _address(items) if len(items) else 0, len(items), largest


def _address(array: Array) -> int:
    """Where an array lies; it must live as long as that is used."""
    return int(array.ctypes.data)


def _floats(tensor: Tensor | None) -> tuple[int, int]:
    """Address and length of a contiguous tensor, which must live as long as they are used; None is empty."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.numel())


def _flat(facts: Any) -> tuple[int, ...]:
    return tuple(x for fact in facts for x in (fact if isinstance(fact, tuple) else (fact,)))


def _bytes(strides: tuple[int, ...], size: int) -> Any:
    return tuple(stride * size for stride in strides)
