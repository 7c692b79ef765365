"""The one-call form: plan and run once."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import kernels, reference
from octavo.batch import AttentionBatch
from octavo.cache import LayerCache
from octavo.checks import check_index, check_optional_tensors, check_tensors
from octavo.planner import Planner
from octavo.run import check_run, run
from octavo.spec import AttentionSpec


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_left: int | None = None,
    window_right: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sqrt_alibi: bool = False,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int | None = None,
    common_prefix_len: int = 0,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch of sequences over their pages, in one call.

    For newcomers and tests; an engine plans once a step with `Planner` and calls `run` per layer.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float16, bfloat16 or float32; beside an fp8 cache also fp8.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides, last dimension contiguous.
        v_cache: [num_blocks, block_size, num_kv_heads, value_dim], likewise.
        block_table: [num_seqs, max_blocks] int32.
        seq_lens: [num_seqs] int32, keys of each sequence, new ones included (they are in the cache already).
        query_start_loc: [num_seqs + 1] int32, cumulative new tokens.
        softmax_scale: None: head_dim ** -0.5.
        causal: key j needs j <= position of the query.
        window_left, window_right: window radii in keys, the query itself not counted; None: open.
        logits_soft_cap: scores become cap * tanh(score / cap); None: off.
        alibi_slopes: [num_q_heads] float, position bias; converted to float32. None: off.
        sqrt_alibi: the bias is -slope * sqrt(distance).
        sinks: [num_q_heads] float, one more logit per head, without a value; converted to float32.
        q_descale: scale of an fp8 q, float32 [] or [num_seqs, num_kv_heads]; None: 1.
        k_descale, v_descale: scales of 8-bit caches, float32. fp8: [], [num_kv_heads] or [num_seqs, num_kv_heads];
            None: 1. int8: [num_blocks, num_kv_heads, block_size], for V also [num_kv_heads, value_dim].
        num_splits: parts of the keys; None: the planner's choice.
        common_prefix_len: keys that all sequences share page by page, read once.
        batch_invariant: a sequence's output bits do not depend on the others.
        backend: None: the best for the device; or "reference", "cpu", "triton", "gluon".

    Returns:
        out [num_tokens, num_q_heads, value_dim] in q's dtype (bfloat16 for an fp8 q); lse [num_tokens, num_q_heads]
        float32, natural log, -inf for a row that sees no key. Rows of q past query_start_loc[-1] are padding: out 0,
        lse -inf.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
        Unsupported: the backend cannot compute this, with the reason.

    Example:
        >>> import torch, octavo
        >>> cache = octavo.PagedKVCache(num_layers=1, num_blocks=4, block_size=16, num_kv_heads=2,
        ...                             head_dim=64, dtype=torch.float32).layer(0)
        >>> new = torch.randn(2, 5, 2, 64)                                  # K and V of five tokens
        >>> octavo.append(cache, new[0], new[1], torch.arange(32, 37))      # into block 2
        >>> out, lse = octavo.paged_attention(
        ...     torch.randn(5, 8, 64), cache.k_cache, cache.v_cache,
        ...     block_table=torch.tensor([[2]], dtype=torch.int32),
        ...     seq_lens=torch.tensor([5], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 5], dtype=torch.int32))
        >>> out.shape, lse.shape
        (torch.Size([5, 8, 64]), torch.Size([5, 8]))
    """
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, query_start_loc=query_start_loc)
    check_optional_tensors(
        alibi_slopes=alibi_slopes, sinks=sinks, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
    )
    check_index("block_table", block_table, 2, torch.int32)
    if q.ndim != 3:
        raise ValueError(f"q must be [num_tokens, num_q_heads, head_dim], got shape {tuple(q.shape)}")
    if sqrt_alibi and alibi_slopes is None:
        raise ValueError("sqrt_alibi=True needs alibi_slopes")
    cache = LayerCache(k_cache, v_cache, k_descale, v_descale)
    if q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[2]}, k_cache {k_cache.shape[3]}")
    spec = AttentionSpec(
        num_q_heads=q.shape[1],
        num_kv_heads=cache.num_kv_heads,
        head_dim=q.shape[2],
        value_dim=v_cache.shape[3],
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        alibi=None if alibi_slopes is None else "sqrt" if sqrt_alibi else "linear",
        sinks=sinks is not None,
    )
    batch = AttentionBatch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        num_tokens=max(int(query_start_loc.flatten()[-1]), 0) if query_start_loc.numel() else 0,
        max_query_len=q.shape[0],
        max_seq_len=block_table.shape[1] * cache.block_size,
    )
    planner = Planner(
        num_q_heads=spec.num_q_heads,
        value_dim=spec.v_dim,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        device=q.device,
        batch_invariant=batch_invariant,
    )
    if backend != "reference":
        kernels.select(spec, q.device, q.dtype, backend, cache.format)
    plan = planner.plan(batch, num_splits=num_splits, common_prefix_len=common_prefix_len)
    slopes = None if alibi_slopes is None else alibi_slopes.float()
    sink_logits = None if sinks is None else sinks.float()
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    out = torch.zeros(q.shape[0], spec.num_q_heads, spec.v_dim, dtype=dtype, device=q.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if backend != "reference":
        run(plan, spec, q, cache, out, lse, alibi_slopes=slopes, sinks=sink_logits, q_descale=q_descale)
        return out, lse
    check_run(plan, spec, q, cache, out, lse, slopes, sink_logits, q_descale)
    real = reference.real(batch, q, cache, q_descale)
    exact = reference.attention(spec, batch, *real, alibi_slopes=slopes, sinks=sink_logits)
    for result, value in zip((out, lse), exact, strict=True):
        result[: batch.num_tokens] = value
    return out, lse
