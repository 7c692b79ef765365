"""Merge partial results: the one reduction behind splits, cascade levels and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.launch import State


def merge(parts: State, sinks: Tensor | None, result: State, num_rows: int) -> None:
    """Merge the first num_rows rows; arguments as in `kernels.cpu.merge`."""
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
    result.out[0, :num_rows] = (out / torch.where(total == 0, 1.0, total).unsqueeze(-1))[:num_rows]
    if result.lse is not None:
        result.lse[0, :num_rows] = (peak + total.log())[:num_rows]
