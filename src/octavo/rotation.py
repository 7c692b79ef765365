"""A Hadamard rotation of K and q: scores stay, and int8 rows lose less.

A row's scale must reach its largest number. Where a few channels of K or q are much larger than the others, those get
few steps; turned by a Hadamard matrix, every new channel is a sum of all old ones with signs, and none stands out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """What rows of q and K [..., head_dim] are multiplied by from the right.

    Args:
        q, k: [head_dim, head_dim], in the dtype in which products are made; q @ k.T is the unit matrix, so that q . k
            stays what it is.
        batch_invariant: a row's bits do not depend on its neighbours: sums in a fixed order instead of a product of
            matrices, many times slower (docs/measured.md).
    """

    q: Tensor
    k: Tensor
    batch_invariant: bool = False


def hadamard(
    head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, batch_invariant: bool = False
) -> Rotation:
    """The rotation by Hadamard matrices, in blocks as wide as the largest power of two that divides head_dim.

    All entries are powers of two or their negatives, exact in any float dtype. Where the width is no square the matrix
    of K is twice that of q (or the other way round), instead of both having a square root in them.

    Args:
        head_dim: width of a row, at least 1. An odd one has blocks of 1 and stays as it is.
        dtype, device: of q and K. Products are made in this dtype, on a CPU in float32: 16-bit ones are slow there.
        batch_invariant: as for `Rotation`.
    """
    width = _block(head_dim)
    signs = torch.ones(1, 1)
    while signs.shape[0] < width:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    products = torch.float32 if torch.device(device).type == "cpu" else dtype
    whole = torch.kron(torch.eye(head_dim // width), signs).to(device, products)
    log2 = width.bit_length() - 1
    return Rotation(whole * 2.0 ** -((log2 + 1) // 2), whole * 2.0 ** -(log2 // 2), batch_invariant)


def rotate(rows: Tensor, matrix: Tensor, batch_invariant: bool = False) -> Tensor:
    """Rows of q or K, turned.

    Args:
        rows: [..., head_dim] of any float dtype.
        matrix: [head_dim, head_dim], q's or k's of what `hadamard` made.
        batch_invariant: a product of matrices may round a row differently among other neighbours; with this, sums in a
            fixed order do not. They are those of a Hadamard matrix, and no other will do.

    Returns:
        rows @ matrix, in the rows' shape and dtype.
    """
    if not batch_invariant:
        return (rows.to(matrix.dtype) @ matrix).to(rows.dtype)
    width = _block(rows.shape[-1])
    x, span = rows.float(), 1
    while span < width:  # the fast Walsh-Hadamard transform
        first, second = x.reshape(-1, 2, span).unbind(1)
        x, span = torch.stack([first + second, first - second], 1), 2 * span
    return (x.reshape(rows.shape) * matrix[0, 0].float()).to(rows.dtype)


def _block(head_dim: int) -> int:
    """The largest power of two that divides it."""
    return head_dim & -head_dim
