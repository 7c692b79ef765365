"""Attention over pages in plain PyTorch: correct for every feature, fast enough for small models.

Scores, probabilities and sums are float32 whatever the dtypes of q and of the cache. Keys and scores live in
the plan's scratch memory: fresh memory of this size costs a page fault every 4 KiB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cpu.plain.merge import merge
from octavo.kernels.cpu.plain.pages import as_matrix, row_strides
from octavo.kernels.cpu.plain.tiles import Chunk, Tile, make_tile, tiles
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec


def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
) -> None:
    """Run one launch; arguments as in `kernels.cpu.attend`."""
    layer, sinks = _Layer(spec, plan, operands), operands.sinks
    for tile in tiles(spec, plan, launch):
        out, lse = layer.attend(tile)
        if not out.sum().isfinite():
            out, lse = layer.attend_carefully(launch, tile)
        if sinks is not None:
            part = State(out.flatten(0, 1)[None], lse.flatten(0, 1)[None])
            assert part.lse is not None
            merge(part, sinks, part, part.out.shape[1])
            out, lse = part.out.view(out.shape), part.lse.view(lse.shape)
        tile.put(state.out[tile.split], out)
        if state.lse is not None:
            tile.put(state.lse[tile.split], lse)


class _Layer:
    """One layer's tensors during a launch."""

    def __init__(self, spec: AttentionSpec, plan: Plan, operands: Operands) -> None:
        self.spec = spec
        self.plan = plan
        self.operands = operands

    def attend(self, tile: Tile, careful: bool = False) -> tuple[Tensor, Tensor]:
        """A tile against its keys, by online softmax over its chunks.

        Args:
            careful: keys that no row of the tile sees may hold NaN or infinities.

        Returns:
            out [n, rows_per_seq, num_q_heads, value_dim] and lse [n, rows_per_seq, num_q_heads], float32. A row
            that sees no key gives (0, -inf).
        """
        spec, (n, rows) = self.spec, tile.rows.shape
        batch, packed = n * spec.num_kv_heads, rows * spec.group_size
        q = tile.take(self.operands.q).float().view(n, rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
        q = (q.transpose(1, 2) * spec.scale).reshape(batch, packed, spec.head_dim)
        m = q.new_full((batch, packed, 1), -torch.inf)
        may_be_empty = tile.some_see_nothing or len(tile.chunks) > 1
        l, acc = torch.zeros_like(m), q.new_zeros(batch, packed, spec.v_dim)
        for i, chunk in enumerate(tile.chunks):
            scores = self._scores(tile, chunk, q, self._gather("k", self.operands.cache.k_cache, chunk))
            v = self._gather("v", self.operands.cache.v_cache, chunk)
            if careful:  # 0 * NaN and NaN - inf are NaN
                hidden = ~chunk.visible
                scores.masked_fill_(hidden[:, None, :, None], -torch.inf)
                v.view(n, -1, *v.shape[1:]).masked_fill_(hidden.all(1)[:, None, :, None], 0.0)
            elif chunk.mask is not None:
                scores.add_(chunk.mask)
            scores = scores.view(batch, packed, -1)
            m_new = m.maximum(scores.amax(-1, keepdim=True))
            # A row that has seen nothing yet has no maximum; (-inf) - (-inf) is NaN.
            peak = torch.where(m_new == -torch.inf, 0.0, m_new) if may_be_empty else m_new
            p = scores.sub_(peak).exp_()
            if i == 0:
                l, acc = p.sum(-1, keepdim=True), p @ v
            else:
                rescale = (m - peak).exp()
                l = l * rescale + p.sum(-1, keepdim=True)
                acc = torch.baddbmm(acc * rescale, p, v)
            m = m_new
        out = acc / (torch.where(l == 0, 1.0, l) if tile.some_see_nothing else l)
        return self._by_row(out, n, rows), self._by_row((m + l.log()).squeeze(-1), n, rows)

    def attend_carefully(self, launch: Launch, tile: Tile) -> tuple[Tensor, Tensor]:
        """The same where a value is not finite: it must not reach rows that do not see it."""
        out, lse = self.attend(tile, careful=True)
        n, rows = tile.rows.shape
        if rows == 1 or out.isfinite().all():
            return out, lse
        alone = tile.rows.reshape(-1, 1), tile.seqs.repeat_interleave(rows)
        out, lse = self.attend(make_tile(self.spec, self.plan, launch, *alone, tile.split), careful=True)
        return out.view(n, rows, *out.shape[2:]), lse.view(n, rows, -1)

    def _gather(self, name: str, pages: Tensor, chunk: Chunk) -> Tensor:
        """K or V of a chunk, [n * num_kv_heads, width, head_dim | value_dim] float32, in scratch memory."""
        num_kv_heads, width = pages.shape[2:]
        shape = (chunk.j.shape[0] * num_kv_heads, chunk.j.shape[1], width)
        strides = row_strides(pages)
        if strides is None:
            heads = torch.arange(num_kv_heads).unsqueeze(1)
            return pages[chunk.block.unsqueeze(1), chunk.offset.unsqueeze(1), heads].float().view(shape)
        stored = self.plan.workspace.scratch(f"{name} stored", shape, pages.dtype)
        torch.index_select(as_matrix(pages), 0, chunk.rows(num_kv_heads, strides), out=stored.view(-1, width))
        if pages.dtype == torch.float32:
            return stored
        return self.plan.workspace.scratch(name, shape, torch.float32).copy_(stored)

    def _scores(self, tile: Tile, chunk: Chunk, q: Tensor, k: Tensor) -> Tensor:
        """Scores [n, num_kv_heads, rows_per_seq, group_size, width] with soft cap and position bias, unmasked."""
        spec, (n, rows) = self.spec, tile.rows.shape
        scores = self.plan.workspace.scratch("scores", (q.shape[0], q.shape[1], k.shape[1]), torch.float32)
        torch.bmm(q, k.transpose(1, 2), out=scores)
        scores = scores.view(n, spec.num_kv_heads, rows, spec.group_size, -1)
        if spec.logits_soft_cap is not None:
            scores.div_(spec.logits_soft_cap).tanh_().mul_(spec.logits_soft_cap)
        if self.operands.alibi_slopes is not None:
            position = self.plan.shard.global_position(chunk.j)
            distance = (position[:, None] - tile.positions.unsqueeze(-1)).float()  # [n, rows, width]
            if spec.alibi == "sqrt":
                distance = -distance.abs().sqrt()
            elif not spec.causal:
                distance = -distance.abs()
            slopes = self.operands.alibi_slopes.view(spec.num_kv_heads, 1, spec.group_size, 1)
            scores.add_(slopes * distance[:, None, :, None])
        return scores

    def _by_row(self, x: Tensor, n: int, rows: int) -> Tensor:
        """[n * num_kv_heads, rows * group_size, ...] -> [n, rows, num_q_heads, ...]."""
        x = x.view(n, self.spec.num_kv_heads, rows, self.spec.group_size, *x.shape[2:]).transpose(1, 2)
        return x.reshape(n, rows, self.spec.num_q_heads, *x.shape[4:])
