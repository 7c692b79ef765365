"""What a case costs at least, whoever computes it: bytes of K and V to read, arithmetic on the scores in the mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.bench.cases import Case
from octavo.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Work:
    """The useful part of the work.

    Args:
        kv_bytes: K and V, with the scales of their rows, of every key that some row of its sequence sees, each
            sequence by itself.
        flops: multiplications and additions of both products, for every (row, query head, key it sees).
    """

    kv_bytes: int
    flops: int


def row_bounds(spec: AttentionSpec, query_len: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """The keys [lo, hi) that each new row of a sequence sees; two [query_len] int64 tensors."""
    positions = torch.arange(seq_len - query_len, seq_len)
    lo, hi = spec.bounds(positions, torch.full_like(positions, seq_len))
    return lo, hi


def reach(lo: Tensor, hi: Tensor) -> tuple[int, int]:
    """The smallest [start, end) that holds the intervals of a sequence's rows; (0, 0) where they are all empty.

    Rows that follow each other have intervals that move by one key at most, so every key of it is seen.
    """
    sees = hi > lo
    if not bool(sees.any()):
        return 0, 0
    return int(lo[sees].min()), int(hi[sees].max())


def work(case: Case) -> Work:
    """Count the work of a case; see `Work`."""
    spec = case.spec
    width, stored = spec.head_dim + spec.v_dim, case.format
    row_bytes = spec.head_dim * stored.k_dtype.itemsize + spec.v_dim * stored.v_dtype.itemsize
    row_bytes += torch.float32.itemsize * (stored.k_scaled_by_row + stored.v_scaled_by_row)
    keys = visible = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        lo, hi = row_bounds(spec, query_len, seq_len)
        start, end = reach(lo, hi)
        keys += end - start
        visible += int((hi - lo).sum())
    return Work(
        kv_bytes=keys * spec.num_kv_heads * row_bytes,
        flops=2 * width * spec.num_q_heads * visible,
    )


def is_decode(case: Case) -> bool:
    """Whether reading K and V is what the case is about: no sequence has more than one new row."""
    return all(n <= 1 for n in case.query_lens)
