"""The float64 oracle: the contract of the attention in code, dense and one head at a time.

It shares nothing with the kernels but the mask (`AttentionSpec.bounds`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
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


def _distance(spec: AttentionSpec, position: Tensor, seen: slice) -> Tensor:
    """What an ALiBi slope multiplies, for each visible key."""
    signed = torch.arange(seen.start, seen.stop, dtype=torch.float64) - position
    if spec.alibi == "sqrt":
        return -signed.abs().sqrt()
    return signed if spec.causal else -signed.abs()
