"""Merge partial results: the one reduction behind splits, cascade levels and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.launch import State


def merge(parts: State, sinks: Tensor | None, result: State, query_start_loc: Tensor | None = None) -> None:
    """Merge parts by their LSE, the sink as one more part without a value.

    Parts are added one after another, so that empty parts at the end (a longer neighbour in the batch
    brings them) leave every bit as it is.

    Args:
        parts: out [num_parts, num_tokens, num_q_heads, value_dim], lse [num_parts, num_tokens, num_q_heads]
            float32, any strides. The output of a part with lse = -inf is not read as a number.
        sinks: [num_q_heads] float32 or None.
        result: out [1, ...] of any float dtype, lse [1, ...] float32 or None; written in place.
        query_start_loc: [num_seqs + 1] int32; rows from its last entry on belong to no sequence and stay as
            they are. None: all rows are written.
    """
    assert parts.lse is not None
    peak = parts.lse.amax(0)  # [num_tokens, num_q_heads]
    if sinks is not None:
        peak = peak.maximum(sinks)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # so that (-inf) - (-inf) never happens
    total = torch.zeros_like(peak) if sinks is None else (sinks - peak).exp()
    out = torch.zeros_like(parts.out[0])
    for part_out, part_lse in zip(parts.out, parts.lse, strict=True):
        weight = (part_lse - peak).exp()
        total = total + weight
        present = (part_lse != -torch.inf).unsqueeze(-1)
        out += torch.where(present, part_out * weight.unsqueeze(-1), 0.0)
    n = len(out) if query_start_loc is None else int(query_start_loc[-1])
    result.out[0, :n] = (out / torch.where(total == 0, 1.0, total).unsqueeze(-1))[:n]
    if result.lse is not None:
        result.lse[0, :n] = (peak + total.log())[:n]
