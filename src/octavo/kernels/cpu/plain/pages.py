"""Pages as a matrix of rows.

In every page that we lay out, the rows of K (or V) stand at multiples of their width, so that all rows of all
pages are rows of one matrix, and `index_select` reaches them: 198 us where indexing takes 975 us (docs/measured.md).
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_strides(pages: Tensor) -> tuple[int, int, int] | None:
    """(block, row, head) strides of pages [num_blocks, block_size, num_kv_heads, width] counted in rows of
    `as_matrix(pages)`; None where rows do not stand at multiples of their width."""
    width = pages.shape[3]
    block, row, head, _ = pages.stride()
    if block % width or row % width or head % width:
        return None
    return block // width, row // width, head // width


def as_matrix(pages: Tensor) -> Tensor:
    """[rows, width]: the memory of the pages from their first row to their last."""
    width = pages.shape[3]
    reach = sum((size - 1) * stride for size, stride in zip(pages.shape, pages.stride()[:3], strict=False))
    return pages.as_strided((reach // width + 1, width), (width, 1))


def row_index(strides: tuple[int, int, int], block: Tensor, offset: Tensor, num_kv_heads: int) -> Tensor:
    """Where rows stand in the matrix: [..., num_kv_heads, width] int64 for block and offset [..., 1, width]."""
    heads = torch.arange(num_kv_heads).unsqueeze(1)
    return block * strides[0] + offset * strides[1] + heads * strides[2]
