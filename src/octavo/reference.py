"""The float64 oracle: the contract of the attention in code, dense and one head at a time.

It shares nothing with the kernels but the mask (`AttentionSpec.bounds`) and, for int8 keys, how q is quantised, which
is part of the contract. Stored numbers become real ones first (`real`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
from octavo.cache import LayerCache
from octavo.quantise import quantise_rows
from octavo.spec import AttentionSpec


def attention(
    spec: AttentionSpec,
    batch: AttentionBatch,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64.

    Args:
        spec, batch: as for the kernels.
        q: [>= num_tokens, num_q_heads, head_dim].
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: [num_blocks, block_size, num_kv_heads, value_dim].
        alibi_slopes, sinks: [num_q_heads] or None.

    Returns:
        out [num_tokens, num_q_heads, value_dim] and lse [num_tokens, num_q_heads], float64; rows of no
        sequence hold (0, -inf).
    """
    out = torch.zeros(batch.num_tokens, spec.num_q_heads, spec.v_dim, dtype=torch.float64)
    lse = torch.full((batch.num_tokens, spec.num_q_heads), -torch.inf, dtype=torch.float64)
    block_size = k_cache.shape[1]
    starts = batch.query_start_loc.tolist()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = range(starts[i], starts[i + 1])
        pages = batch.block_table[i, : -(-seq_len // block_size)].long()
        k = k_cache[pages].double().flatten(0, 1)[:seq_len]
        v = v_cache[pages].double().flatten(0, 1)[:seq_len]
        for row in rows:
            position = torch.tensor(seq_len - len(rows) + row - starts[i])
            lo, hi = spec.bounds(position, torch.tensor(seq_len))
            for head in range(spec.num_q_heads):
                slope = None if alibi_slopes is None else alibi_slopes[head].double()
                seen = slice(int(lo), int(hi))
                key_head = head // spec.group_size
                scores = k[seen, key_head] @ q[row, head].double() * spec.scale
                if spec.logits_soft_cap is not None:
                    scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
                if slope is not None:
                    scores = scores + slope * _distance(spec, position, seen)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                if not scores.numel():
                    continue
                lse[row, head] = scores.logsumexp(0)
                weights = scores.softmax(0)[: seen.stop - seen.start]
                out[row, head] = weights @ v[seen, key_head]
    return out, lse


def real(
    batch: AttentionBatch, q: Tensor, cache: LayerCache, q_descale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, K and V as the real numbers that a layer attends with: stored number x scale, in float64.

    q is quantised as kernels do where K is int8. Pages that no sequence of the batch names keep their stored numbers
    where scales are per sequence.

    Args:
        batch: whose sequences fp8's scales per sequence are.
        q: [>= num_tokens, num_q_heads, head_dim].
        cache: the layer's pages and scales.
        q_descale: of an fp8 q, [] or [num_seqs, num_kv_heads]; None: 1.

    Returns:
        q, k_cache and v_cache in their shapes.
    """
    fp8 = cache.format.is_fp8
    k = _real_pages(batch, cache.k_cache, cache.k_descale, fp8)
    v = _real_pages(batch, cache.v_cache, cache.v_descale, fp8)
    if cache.format.k_scaled_by_row:
        values, scale = quantise_rows(q)
        return values.double() * scale.double().unsqueeze(-1), k, v
    real_q = q.double()
    if q_descale is not None:
        seqs = torch.zeros(len(q), dtype=torch.long)
        seqs[: int(batch.query_start_loc[-1])] = torch.arange(batch.num_seqs).repeat_interleave(
            batch.query_start_loc.diff()
        )
        by_row = q_descale.double().expand(batch.num_seqs, cache.num_kv_heads)[seqs]
        real_q = real_q * by_row.repeat_interleave(q.shape[1] // cache.num_kv_heads, 1).unsqueeze(-1)
    return real_q, k, v


def _real_pages(batch: AttentionBatch, pages: Tensor, descale: Tensor | None, fp8: bool) -> Tensor:
    """Pages [num_blocks, block_size, num_kv_heads, width] times their scales, float64."""
    real = pages.double()
    if descale is None:
        return real
    scale = descale.double()
    if not fp8 and scale.ndim == 3:  # per row
        return real * scale.transpose(1, 2).unsqueeze(-1)
    if not fp8 or scale.ndim < 2:  # per channel, per head, or one
        return real * (scale if not fp8 else scale.unsqueeze(-1))
    scaled = real.clone()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_table[i, : -(-seq_len // pages.shape[1])].long()
        scaled[blocks] = real[blocks] * scale[i].unsqueeze(-1)
    return scaled


def _distance(spec: AttentionSpec, position: Tensor, seen: slice) -> Tensor:
    """What an ALiBi slope multiplies, for each visible key."""
    signed = torch.arange(seen.start, seen.stop, dtype=torch.float64) - position
    if spec.alibi == "sqrt":
        return -signed.abs().sqrt()
    return signed if spec.causal else -signed.abs()
