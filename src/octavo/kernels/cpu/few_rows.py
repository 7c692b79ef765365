"""A launch's sequences with few rows, handed to the Numba kernel."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu import decode
from octavo.kernels.cpu.merge import merge
from octavo.kernels.cpu.workers import Workers
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

SMALL = 1 << 21
"""Bytes of K and V below which one thread is faster than waking another."""

MAX_ITEM_ROWS = 8
"""Rows of an item: so many accumulators stay in the second-level cache."""

_TAGS = {torch.float32: np.float32, torch.float16: np.int16, torch.bfloat16: np.uint16}
_NOTHING = np.empty(0, np.float32)
_WORKERS = Workers()


def attend_few_rows(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
    max_rows: int | None,
) -> None:
    """Run the launch's sequences with at most max_rows rows (None: all); arguments as in `attend`."""
    items, step, num_keys = _items(spec, plan, launch, max_rows)
    if not len(items):
        return
    q, cache, alibi_slopes, sinks = operands
    q = q.float()
    out, lse = state
    # In the invariant mode the sink joins by the same arithmetic whether the plan has one state or more.
    sink_later = sinks is not None and plan.batch_invariant
    if out.dtype != torch.float32 or sink_later:
        out = plan.workspace.scratch("out", tuple(out.shape), torch.float32)
    if sink_later:
        lse = plan.workspace.scratch("lse", tuple(out.shape[:3]), torch.float32)
    size = cache.k_cache.element_size()
    tensors = decode.Tensors(
        q.data_ptr(),
        _bytes(q.stride()[:2], 4),
        cache.k_cache.data_ptr(),
        _bytes(cache.k_cache.stride()[:3], size),
        cache.v_cache.data_ptr(),
        _bytes(cache.v_cache.stride()[:3], size),
        out.data_ptr(),
        _bytes(out.stride()[:3], 4),
        0 if lse is None else lse.data_ptr(),
        (0, 0, 0) if lse is None else _bytes(lse.stride(), 4),
    )
    shard = plan.shard
    shape = decode.Shape(
        spec.group_size, spec.head_dim, spec.v_dim, plan.block_size, shard.dcp_world, shard.dcp_rank, shard.interleave
    )
    bias = 0 if spec.alibi is None else 3 if spec.alibi == "sqrt" else 1 if spec.causal else 2
    transforms = decode.Scores(spec.scale, spec.logits_soft_cap or 0.0, bias)
    slopes = _NOTHING if alibi_slopes is None else alibi_slopes.contiguous().numpy()
    sink_logits = _NOTHING if sinks is None or sink_later else sinks.contiguous().numpy()
    counter = np.zeros(1, np.int64)
    tag = np.empty(1, _TAGS[cache.k_cache.dtype])
    max_heads = int((items[:, 5] - items[:, 4]).max())
    rows_of_item = int((items[:, 3] - items[:, 2]).max())

    def work() -> None:
        decode.work(
            items,
            counter.ctypes.data,
            rows_of_item,
            max_heads,
            tensors,
            shape,
            transforms,
            step,
            slopes,
            sink_logits,
            tag,
        )

    moved = num_keys * spec.num_kv_heads * (spec.head_dim + spec.v_dim) * size
    _WORKERS.run(work, 1 if moved < SMALL else min(torch.get_num_threads(), len(items)))
    if out is state.out:
        return
    written = torch.from_numpy(step.rows)[_rows_of(items)]
    result = State(out[:, written], None if lse is None else lse[:, written])
    if sink_later:
        merge(result, sinks, result)
    state.out[:, written] = result.out.to(state.out.dtype)
    if sink_later and state.lse is not None:
        assert result.lse is not None
        state.lse[:, written] = result.lse


def _items(
    spec: AttentionSpec, plan: Plan, launch: Launch, max_rows: int | None
) -> tuple[np.ndarray[Any, Any], decode.Rows, int]:
    """What to do, the facts of the rows, and the keys that will be read; worked out once a step and mask."""
    key = (
        "few rows",
        launch.first_state,
        spec.causal,
        spec.window_left,
        spec.window_right,
        spec.num_kv_heads,
        max_rows,
    )
    found = plan.memo.get(key)
    if found is None:
        found = plan.memo[key] = _make_items(spec, plan, launch, max_rows)
    return found


def _make_items(
    spec: AttentionSpec, plan: Plan, launch: Launch, max_rows: int | None
) -> tuple[np.ndarray[Any, Any], decode.Rows, int]:
    starts = launch.query_start_loc.tolist()
    rows = torch.arange(starts[-1]) if launch.rows is None else launch.rows[: starts[-1]]
    lo, hi = spec.bounds(plan.positions[rows], plan.seq_lens[rows])
    lo, hi = plan.shard.local_count(lo), plan.shard.local_count(hi)
    table = plan.block_table if launch.seqs is None else plan.block_table[launch.seqs]
    step = decode.Rows(
        *(np.ascontiguousarray(x.numpy()) for x in (rows, lo, hi, plan.positions[rows], launch.kv_splits, table))
    )
    chosen = [i for i in range(len(starts) - 1) if 0 < starts[i + 1] - starts[i] <= (max_rows or starts[-1])]
    pieces = [
        (i, split, row, min(row + MAX_ITEM_ROWS, starts[i + 1]))
        for i in chosen
        for row in range(starts[i], starts[i + 1], MAX_ITEM_ROWS)
        for split in range(launch.num_splits)
    ]
    # Few pieces: give the threads a part of the heads each. Their order puts the longest first.
    threads = torch.get_num_threads()
    parts = min(spec.num_kv_heads, -(-2 * threads // max(len(pieces), 1))) if threads > 1 else 1
    edges = [spec.num_kv_heads * part // parts for part in range(parts + 1)]
    bounds = step.kv_splits
    pieces.sort(key=lambda piece: -int(bounds[piece[0], piece[1] + 1] - bounds[piece[0], piece[1]]))
    items = [(*piece, a, b) for piece in pieces for a, b in pairwise(edges)]
    seen = (hi.minimum(torch.as_tensor(bounds[:, -1].max(initial=0))) - lo).clamp(min=0)
    num_keys = sum(int(seen[starts[i] : starts[i + 1]].max()) for i in chosen)
    return np.array(items, np.int64).reshape(-1, 6), step, num_keys


def _rows_of(items: np.ndarray[Any, Any]) -> Tensor:
    """The launch rows of the items, each once."""
    spans = {(int(a), int(b)) for a, b in items[:, 2:4]}
    return torch.cat([torch.arange(a, b) for a, b in sorted(spans)])


def _bytes(strides: tuple[int, ...], size: int) -> Any:
    return tuple(stride * size for stride in strides)
