"""Attention over pages in plain PyTorch: correct for every feature, fast enough for small models.

Scores, probabilities and sums are float32 whatever the dtypes of q and of the cache: products of int8 are too, their
sums stay below 2^24 and so are exact. Scales leave the loop where they can: K's of a row multiply its scores, V's of a
row the probabilities, all others q or the output once. Keys and scores live in the plan's scratch memory: fresh memory
of this size costs a page fault every 4 KiB.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.cpu.plain.pages import as_matrix, row_strides
from octavo.kernels.cpu.plain.tiles import Chunk, Tile, make_tile, tiles
from octavo.launch import Launch, Operands, Plan, State
from octavo.quantise import quantise_rows
from octavo.spec import AttentionSpec


def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
    merge: Callable[[State, Tensor | None, State], None],
) -> None:
    """Run one launch; arguments as in `kernels.cpu.attend`, and the merge that the plan's parts meet later: a sink must
    join by the same arithmetic, whatever the number of parts."""
    layer, sinks = _Layer(spec, plan, operands), operands.sinks
    for tile in tiles(spec, plan, launch):
        out, lse = layer.attend(tile)
        if not out.sum().isfinite():
            out, lse = layer.attend_carefully(launch, tile)
        if sinks is not None:
            part = State(out.flatten(0, 1)[None], lse.flatten(0, 1)[None])
            assert part.lse is not None
            merge(part, sinks, part)
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
        self.cache = operands.cache
        self.format = operands.cache.format

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
        q, q_scale = self._query(tile)
        m = q.new_full((batch, packed, 1), -torch.inf)
        may_be_empty = careful or tile.some_see_nothing or len(tile.chunks) > 1
        l, acc = torch.zeros_like(m), q.new_zeros(batch, packed, spec.v_dim)
        for i, chunk in enumerate(tile.chunks):
            scores = self._scores(tile, chunk, q, q_scale, self._gather("k", self.cache.k_cache, chunk))
            v = self._gather("v", self.cache.v_cache, chunk)
            v_scale = self._row_scales(self.cache.v_descale, chunk) if self.format.v_scaled_by_row else None
            if careful:  # 0 * NaN and NaN - inf are NaN
                hidden = ~chunk.visible
                unseen = hidden.all(1)[:, None, :, None]
                scores.masked_fill_(hidden[:, None, :, None], -torch.inf)
                v.view(n, -1, *v.shape[1:]).masked_fill_(unseen, 0.0)
                if v_scale is not None:
                    v_scale = v_scale.masked_fill(unseen.transpose(2, 3), 0.0)
            elif chunk.mask is not None:
                scores.add_(chunk.mask)
            scores = scores.view(batch, packed, -1)
            m_new = m.maximum(scores.amax(-1, keepdim=True))
            # A row that has seen nothing yet has no maximum; (-inf) - (-inf) is NaN.
            peak = torch.where(m_new == -torch.inf, 0.0, m_new) if may_be_empty else m_new
            p = scores.sub_(peak).exp_()
            sums = p.sum(-1, keepdim=True)
            if v_scale is not None:
                p.view(n, spec.num_kv_heads, packed, -1).mul_(v_scale)
            if i == 0:
                l, acc = sums, p @ v
            else:
                rescale = (m - peak).exp()
                l = l * rescale + sums
                acc = torch.baddbmm(acc * rescale, p, v)
            m = m_new
        out = acc / (torch.where(l == 0, 1.0, l) if tile.some_see_nothing else l)
        out, lse = self._by_row(out, n, rows), self._by_row((m + l.log()).squeeze(-1), n, rows)
        return self._scale_out(tile, out), lse

    def attend_carefully(self, launch: Launch, tile: Tile) -> tuple[Tensor, Tensor]:
        """The same where a value is not finite: it must not reach rows that do not see it."""
        out, lse = self.attend(tile, careful=True)
        n, rows = tile.rows.shape
        if rows == 1 or out.isfinite().all():
            return out, lse
        alone = tile.rows.reshape(-1, 1), tile.seqs.repeat_interleave(rows)
        out, lse = self.attend(make_tile(self.spec, self.plan, launch, *alone, tile.split), careful=True)
        return out.view(n, rows, *out.shape[2:]), lse.view(n, rows, -1)

    def _query(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """q [n * num_kv_heads, rows_per_seq * group_size, head_dim] float32, times the softmax scale and what scales
        are known already. For int8 keys: whole numbers, and their factor [n, num_kv_heads, rows, group, 1]."""
        spec, (n, rows) = self.spec, tile.rows.shape
        q = tile.take(self.operands.q).float().view(n, rows, spec.num_kv_heads, spec.group_size, spec.head_dim)
        q = q.transpose(1, 2)
        factor = None
        if self.format.k_scaled_by_row:
            values, scale = quantise_rows(q)
            q, factor = values.float(), (scale * spec.scale).unsqueeze(-1)
        else:
            q = q * spec.scale
        for descale in (self.operands.q_descale, self.cache.k_descale if self.format.is_fp8 else None):
            if descale is not None:
                q = q * self._of_rows(tile, descale).transpose(1, 2)[..., None, None]
        return q.reshape(n * spec.num_kv_heads, rows * spec.group_size, spec.head_dim), factor

    def _scale_out(self, tile: Tile, out: Tensor) -> Tensor:
        """Apply the scales of V that are the same for all keys of a row to out [n, rows, num_q_heads, value_dim]."""
        descale = self.cache.v_descale
        if descale is None or self.format.v_scaled_by_row:
            return out
        if self.format.v_scaled_by_channel:
            factor = descale.unsqueeze(1)
        else:
            factor = self._of_rows(tile, descale)[..., None, None]
        n, rows = tile.rows.shape
        by_head = out.view(n, rows, self.spec.num_kv_heads, self.spec.group_size, self.spec.v_dim)
        return (by_head * factor).view(out.shape)

    def _of_rows(self, tile: Tile, descale: Tensor) -> Tensor:
        """fp8's static scales [] | [num_kv_heads] | [num_seqs, num_kv_heads] as [n, rows_per_seq, num_kv_heads]."""
        num_kv_heads = self.spec.num_kv_heads
        if descale.ndim < 2:
            return descale.expand(*tile.rows.shape, num_kv_heads)
        return descale[self.plan.seqs_of_rows()[tile.rows]]

    def _row_scales(self, scales: Tensor | None, chunk: Chunk) -> Tensor:
        """Scales that lie in the pages, of a chunk's keys: [n, num_kv_heads, 1, width]."""
        assert scales is not None
        heads = torch.arange(self.spec.num_kv_heads).unsqueeze(1)
        return scales[chunk.block.unsqueeze(1), heads, chunk.offset.unsqueeze(1)].unsqueeze(2)

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

    def _scores(self, tile: Tile, chunk: Chunk, q: Tensor, q_scale: Tensor | None, k: Tensor) -> Tensor:
        """Scores [n, num_kv_heads, rows_per_seq, group_size, width] with soft cap and position bias, unmasked."""
        spec, (n, rows) = self.spec, tile.rows.shape
        scores = self.plan.workspace.scratch("scores", (q.shape[0], q.shape[1], k.shape[1]), torch.float32)
        torch.bmm(q, k.transpose(1, 2), out=scores)
        scores = scores.view(n, spec.num_kv_heads, rows, spec.group_size, -1)
        if q_scale is not None:
            scores.mul_(q_scale).mul_(self._row_scales(self.cache.k_descale, chunk).unsqueeze(2))
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
