"""PyTorch's scaled_dot_product_attention on a CPU, on keys that are dense already.

It gets all that it is known to be fastest with there:

- K and V are gathered, head by head contiguous, before the timing, and cut to the keys that the rows see: a mask is
  never skipped, so a masked key costs what a visible one costs.
- Sequences of equal lengths that follow each other are one call: with two threads and one KV head a call for each
  sequence would use one of them.
- Rows that all see all of the keys need no mask. Where a sequence has one new row, the query heads of a KV head
  are the rows: up to ten times faster in bfloat16 than as a group of heads. A row that would still be alone is given
  twice: one row times a matrix has no fast path in bfloat16, and takes 2.6 times as long as two.
- A whole prompt is `is_causal`. It aligns the diagonal at the top left, so it is right only where q_len == kv_len.
- Everything else has a mask of numbers in q's dtype (a mask of truth values is converted to it in every call).
- Windows are cut into blocks of rows with keys of their own: 2048 rows with a window of 512 take a third of the time
  in blocks of 128 (of 192: the same; of 512: half of the time).
- float16 is computed in float32, with K and V converted before the timing: it has no fast path of its own (half the
  speed of bfloat16 and worse).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.bench.cases import Case, Problem
from octavo.bench.work import reach, row_bounds
from octavo.spec import AttentionSpec

WINDOW_ROWS = 128
"""Rows of a block where a window leaves out keys."""


Form = Literal["folded", "unmasked", "causal", "masked"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one call computes: the same rows of some sequences of equal lengths.

    Args:
        seqs: the sequences, which follow each other.
        rows: their rows in q and in the output.
        lo, hi: [rows of one sequence], the keys that each row sees.
    """

    seqs: range
    rows: slice
    lo: Tensor
    hi: Tensor

    @property
    def form(self) -> Form:
        """How it is called: with heads as rows, with nothing hidden, with is_causal, or with a mask."""
        start, end = reach(self.lo, self.hi)
        if bool((self.lo == start).all()) and bool((self.hi == end).all()):
            return "folded" if len(self.lo) == 1 else "unmasked"
        diagonal = torch.arange(1, len(self.hi) + 1)
        return "causal" if not bool(self.lo.any()) and torch.equal(self.hi, diagonal) else "masked"


@dataclass(frozen=True, slots=True)
class Operands:
    """What a call is given besides q.

    Args:
        keys, values: [num_seqs, num_kv_heads, keys that the rows see, head_dim | value_dim], contiguous.
        mask: [rows of a sequence, keys] in the dtype of the keys, 0 or -inf; None: no mask.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


def unsupported(problem: Problem) -> str | None:
    if problem.q.device.type != "cpu":
        return f"this form of it is for CPUs, the problem is on {problem.q.device}"
    return lacking(problem)


def lacking(problem: Problem) -> str | None:
    """What PyTorch's attention cannot do on any device; None: nothing that the problem needs."""
    spec, case = problem.spec, problem.case
    if case.cache_dtype not in (None, case.dtype):
        return f"q is {case.dtype}, K and V are {case.cache_dtype}"
    if case.format.is_eight_bit:
        return f"it has no cache format {case.kv_format}"
    features = {"soft cap": spec.logits_soft_cap is not None, "ALiBi": spec.alibi is not None, "sinks": spec.sinks}
    for name, wanted in features.items():
        if wanted:
            return f"it has no {name}"
    if any(bool((piece.lo == piece.hi).any()) for piece in pieces(case)):
        return "a row sees no key, for which it gives NaN"
    return None


def variant(problem: Problem) -> str:
    """The forms of the calls that a step is made of."""
    forms = dict.fromkeys(piece.form for piece in pieces(problem.case))
    return f"dense, {' and '.join(forms)}{', in float32' if problem.case.dtype == torch.float16 else ''}"


def prepare(problem: Problem) -> Callable[[], Tensor]:
    """Timed: the calls, and copying their outputs together where there are several; for float16 also the conversion
    of q and of the output. Before: gathering K and V, and the masks."""
    spec, dtype = problem.spec, _compute_dtype(problem)
    work = [(piece.rows, piece.form, gather(problem, piece, dtype)) for piece in pieces(problem.case)]
    out = problem.q.new_full((problem.batch.num_tokens, spec.num_q_heads, spec.v_dim), torch.nan)

    def call() -> Tensor:
        if len(work) == 1:
            rows, form, operands = work[0]
            return attend(spec, problem.q[rows].to(dtype), form, operands).to(out.dtype)
        for rows, form, operands in work:
            out[rows] = attend(spec, problem.q[rows].to(dtype), form, operands)
        return out

    return call


def attend(spec: AttentionSpec, q: Tensor, form: Form, operands: Operands) -> Tensor:
    """One call, from q [rows, num_q_heads, head_dim] to the same rows of the output."""
    keys, values = operands.keys, operands.values
    if form == "folded":
        grouped = q.view(len(keys), spec.num_kv_heads, spec.group_size, spec.head_dim)
        if spec.group_size == 1:
            grouped = grouped.expand(-1, -1, 2, -1)
        out = scaled_dot_product_attention(grouped, keys, values, scale=spec.scale)[:, :, : spec.group_size]
    else:
        out = scaled_dot_product_attention(
            q.view(len(keys), -1, spec.num_q_heads, spec.head_dim).transpose(1, 2),
            keys,
            values,
            attn_mask=operands.mask,
            is_causal=form == "causal",
            scale=spec.scale,
            enable_gqa=spec.group_size > 1,
        ).transpose(1, 2)  # its memory is in this order, so what follows copies nothing
    return out.reshape(-1, spec.num_q_heads, spec.v_dim)


def pieces(case: Case) -> Iterator[Piece]:
    """Cut a step into calls, in the order of the rows."""
    lens = list(zip(case.query_lens, case.seq_lens, strict=True))
    row = 0
    for (query_len, seq_len), equal in groupby(range(len(lens)), key=lens.__getitem__):
        seqs = list(equal)
        lo, hi = row_bounds(case.spec, query_len, seq_len)
        if query_len > WINDOW_ROWS and bool(lo.any()):
            for seq in seqs:
                for first in range(0, query_len, WINDOW_ROWS):
                    last = min(first + WINDOW_ROWS, query_len)
                    rows = slice(row + first, row + last)
                    yield Piece(range(seq, seq + 1), rows, lo[first:last], hi[first:last])
                row += query_len
        elif query_len:
            yield Piece(range(seqs[0], seqs[-1] + 1), slice(row, row + query_len * len(seqs)), lo, hi)
            row += query_len * len(seqs)


def gather(problem: Problem, piece: Piece, dtype: torch.dtype) -> Operands:
    """K and V of a piece head by head, in the dtype that it is computed in, and its mask."""
    start, end = reach(piece.lo, piece.hi)
    keys, values = (
        torch.stack([tensors[seq][start:end].transpose(0, 1) for seq in piece.seqs]).to(dtype)
        for tensors in (problem.keys, problem.values)
    )
    mask = None
    if piece.form == "masked":
        j = torch.arange(start, end)
        hidden = (j < piece.lo[:, None]) | (j >= piece.hi[:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)
    return Operands(keys, values, mask)


def _compute_dtype(problem: Problem) -> torch.dtype:
    return torch.float32 if problem.case.dtype == torch.float16 else problem.case.dtype
