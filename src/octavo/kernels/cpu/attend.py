"""Attention over pages in plain PyTorch: correct for every feature, fast enough for small models.

Rows are taken in tiles that share one batched matrix product, keys in chunks with an online softmax. Scores,
probabilities and sums are float32 whatever the dtypes of q and of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels.cpu.merge import merge
from octavo.launch import Launch, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

MAX_TILE_ROWS = 128
"""Rows of one sequence in a tile."""

MAX_BATCHED_ROWS = 8
"""Sequences with at most this many rows each share a tile: decode and speculative decode."""

MAX_SCORES = 1 << 22
"""Scores (heads x rows x keys) held at a time: 16 MB in float32."""

INVARIANT_CHUNK = 512
"""Keys of a chunk in the batch-invariant mode, where matrix products must have the same shape every time."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one call of `attend` works on, besides its rows."""

    spec: AttentionSpec
    plan: Plan
    cache: LayerCache
    q: Tensor  # [>= num_tokens, num_q_heads, head_dim]
    block_table: Tensor  # [n, max_blocks] int32, by launch sequence
    alibi_slopes: Tensor | None  # [num_q_heads] float32


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: Tensor  # [n, rows_per_seq] int64 query rows
    seqs: Tensor  # [n] int64 launch sequences

    def one_by_one(self) -> _Tile:
        """The same rows, each on its own."""
        return _Tile(self.rows.reshape(-1, 1), self.seqs.repeat_interleave(self.rows.shape[1]))


def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    q: Tensor,
    cache: LayerCache,
    state: State,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        q: [>= num_tokens, num_q_heads, head_dim].
        cache: one layer's views.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] and lse (or None) of this launch's
            splits; written at the launch's rows only.
        alibi_slopes: [num_q_heads] float32, given iff spec.alibi.
        sinks: [num_q_heads] float32, given iff this launch writes the final result of a layer with sinks.
    """
    table = plan.block_table if launch.seqs is None else plan.block_table[launch.seqs]
    layer = _Layer(spec, plan, cache, q, table, alibi_slopes)
    for tile in _tiles(launch, plan.batch_invariant):
        lo, hi = spec.bounds(plan.positions[tile.rows], plan.seq_lens[tile.rows])
        lo, hi = plan.shard.local_count(lo), plan.shard.local_count(hi)
        for split in range(launch.num_splits):
            start = launch.kv_splits[tile.seqs, split].unsqueeze(1)
            stop = launch.kv_splits[tile.seqs, split + 1].unsqueeze(1)
            out, lse = _attend_tile(layer, tile, lo.maximum(start), hi.minimum(stop), start)
            if sinks is not None:
                merge(State(out[None], lse[None]), sinks, State(out[None], lse[None]))
            state.out[split, tile.rows] = out.to(state.out.dtype)
            if state.lse is not None:
                state.lse[split, tile.rows] = lse


def _tiles(launch: Launch, one_row: bool) -> Iterator[_Tile]:
    """Cut a launch's rows: neighbours with few rows together, a long sequence in pieces."""
    starts = launch.query_start_loc.tolist()
    splits = launch.kv_splits
    num_keys = (splits[:, -1] - splits[:, 0]).tolist()
    max_rows = 1 if one_row else MAX_TILE_ROWS
    first = 0
    while first < len(num_keys):
        count = starts[first + 1] - starts[first]
        last = first + 1
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
            yield _Tile(rows if launch.rows is None else launch.rows[rows], seqs)
        first = last


def _attend_tile(layer: _Layer, tile: _Tile, lo: Tensor, hi: Tensor, split_start: Tensor) -> tuple[Tensor, Tensor]:
    """Rows against local keys [lo, hi).

    Args:
        lo, hi: [n, rows_per_seq] int; lo >= hi where a row sees nothing.
        split_start: [n, 1] int, where the split begins: the invariant mode aligns its chunks to it.

    Returns:
        out [n, rows_per_seq, num_q_heads, value_dim] and lse [n, rows_per_seq, num_q_heads], float32.
    """
    spec, group = layer.spec, layer.spec.group_size
    n, rows = tile.rows.shape
    sees = lo < hi
    first = torch.where(sees, lo, torch.iinfo(lo.dtype).max).amin(1, keepdim=True)  # [n, 1]
    last = torch.where(sees, hi, 0).amax(1, keepdim=True)
    first = first.minimum(last)
    base = split_start if layer.plan.batch_invariant else first
    num_keys = int((last - base).max())

    shape = (n, spec.num_kv_heads, rows * group)
    acc = torch.zeros(*shape, spec.v_dim)
    if num_keys <= 0:
        return _by_row(acc, rows), _by_row(acc.new_full(shape, -torch.inf), rows)
    q = layer.q[tile.rows].float().view(n, rows, spec.num_kv_heads, group, spec.head_dim)
    q = q.transpose(1, 2).reshape(*shape, spec.head_dim) * spec.scale
    m = acc.new_full((*shape, 1), -torch.inf)
    l = torch.zeros_like(m)
    chunk = INVARIANT_CHUNK
    if not layer.plan.batch_invariant:
        chunk = min(num_keys, max(64, MAX_SCORES // (n * spec.num_q_heads * rows)))
    for offset in range(0, num_keys, chunk):
        j = base + torch.arange(offset, offset + chunk, dtype=base.dtype)  # [n, chunk] local keys
        k, v = _load(layer, tile.seqs, j, first, last)
        visible = (j[:, None] >= lo[..., None]) & (j[:, None] < hi[..., None])  # [n, rows, chunk]
        # 0 * inf and 0 * NaN are NaN: a value must not reach the rows that do not see it. (The sum is one fast
        # pass; it may overflow without an infinity among its terms, which costs time and no more.)
        if not v.sum().isfinite():
            v.masked_fill_(~visible.any(1)[:, None, :, None], 0.0)
            if rows > 1 and not v.isfinite().all():
                alone = tile.one_by_one()
                base_alone = split_start.repeat_interleave(rows, 0)
                out, lse = _attend_tile(layer, alone, lo.reshape(-1, 1), hi.reshape(-1, 1), base_alone)
                return out.view(n, rows, -1, spec.v_dim), lse.view(n, rows, -1)
        scores = _scores(layer, tile, q, k, j)
        scores.masked_fill_(~visible[:, None, :, None], -torch.inf)
        scores = scores.view(*shape, chunk)
        m_new = m.maximum(scores.amax(-1, keepdim=True))
        peak = torch.where(m_new == -torch.inf, 0.0, m_new)
        scores.sub_(peak).exp_()
        rescale = (m - peak).exp()
        l = l * rescale + scores.sum(-1, keepdim=True)
        acc = acc * rescale + scores @ v
        m = m_new
    lse = torch.where(l > 0, m + l.log(), torch.where(l == 0, -torch.inf, torch.nan))
    return _by_row(acc / torch.where(l == 0, 1.0, l), rows), _by_row(lse.squeeze(-1), rows)


def _load(layer: _Layer, seqs: Tensor, j: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """K [n, num_kv_heads, chunk, head_dim] and V at local keys j [n, chunk], in float32.

    A key outside its sequence's [first, last) is replaced by the nearest one inside. So lanes whose weight will
    be 0 hold numbers that the arguments name, and table entries past a sequence's blocks are never used.
    """
    cache = layer.cache
    j = j.maximum(first).minimum(last - 1).clamp(min=0).long()
    block = layer.block_table[seqs.unsqueeze(1), j // cache.block_size].long()
    block = torch.where(first < last, block, 0)  # a sequence without keys names no block at all
    where = (block.unsqueeze(1), (j % cache.block_size).unsqueeze(1), torch.arange(cache.num_kv_heads).unsqueeze(1))
    return _gather(cache.k_cache, where).float(), _gather(cache.v_cache, where).float()


def _gather(pages: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Rows pages[where] of pages [num_blocks, block_size, num_kv_heads, width].

    Where rows lie at multiples of their width, as in every page that we lay out, they are rows of one matrix,
    and `index_select` fetches them five times faster than indexing does (measured, 9 heads of 64, 2k rows).
    """
    width, strides = pages.shape[3], pages.stride()[:3]
    if any(stride % width for stride in strides):
        return pages[where]
    reach = sum((size - 1) * stride for size, stride in zip(pages.shape, strides, strict=False))
    matrix = pages.as_strided((reach // width + 1, width), (width, 1))
    row = sum(index * (stride // width) for index, stride in zip(where, strides, strict=True))
    assert isinstance(row, Tensor)
    return matrix.index_select(0, row.reshape(-1)).view(*row.shape, width)


def _scores(layer: _Layer, tile: _Tile, q: Tensor, k: Tensor, j: Tensor) -> Tensor:
    """Scores [n, num_kv_heads, rows_per_seq, group_size, chunk] with soft cap and position bias, unmasked."""
    spec = layer.spec
    n, rows = tile.rows.shape
    scores = (q @ k.transpose(-1, -2)).view(n, spec.num_kv_heads, rows, spec.group_size, -1)
    if spec.logits_soft_cap is not None:
        scores.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
    if layer.alibi_slopes is not None:
        distance = layer.plan.shard.global_position(j)[:, None] - layer.plan.positions[tile.rows].unsqueeze(-1)
        distance = distance.float()  # [n, rows, chunk]
        if spec.alibi == "sqrt":
            distance = -distance.abs().sqrt()
        elif not spec.causal:
            distance = -distance.abs()
        slopes = layer.alibi_slopes.view(spec.num_kv_heads, 1, spec.group_size, 1)
        scores.add_(slopes * distance[:, None, :, None])
    return scores


def _by_row(x: Tensor, rows: int) -> Tensor:
    """[n, num_kv_heads, rows * group_size, ...] -> [n, rows, num_q_heads, ...]."""
    n, num_kv_heads, packed = x.shape[:3]
    x = x.reshape(n, num_kv_heads, rows, packed // rows, *x.shape[3:]).transpose(1, 2)
    return x.reshape(n, rows, -1, *x.shape[4:])
