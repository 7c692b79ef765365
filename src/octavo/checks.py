"""Checks of tensors that callers hand in: the message names the argument, what came and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor


def facts(value: object) -> object:
    """All of an argument that checks look at, if they do not read its numbers: equal facts pass the same checks."""
    if not isinstance(value, Tensor):
        return type(value)
    return type(value), value.shape, value.stride(), value.dtype, value.device


def facts_of_row(value: object) -> object:
    """The same without the number of rows."""
    if not isinstance(value, Tensor):
        return type(value)
    return type(value), value.shape[1:], value.stride(), value.dtype, value.device


def check_tensors(**named: object) -> None:
    """Every argument must be a tensor.

    Raises:
        TypeError: one is not.
    """
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}")


def check_optional_tensors(**named: object) -> None:
    """Every argument that is not None must be a tensor.

    Raises:
        TypeError: one is not.
    """
    check_tensors(**{name: value for name, value in named.items() if value is not None})


def check_index(name: str, tensor: Tensor, ndim: int, dtype: torch.dtype) -> None:
    """A table or a list of offsets must have this number of dimensions and this dtype.

    Raises:
        TypeError, ValueError: it has not.
    """
    check_tensors(**{name: tensor})
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")


def check_device(device: torch.device, **named: Tensor | None) -> None:
    """Every argument that is not None must live on `device`.

    Raises:
        ValueError: one does not.
    """
    for name, tensor in named.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the others are on {device}: use one device")


def check_block_table(block_table: Tensor, kv_lens: Tensor, block_size: int, num_blocks: int | None) -> None:
    """A table must name enough blocks for its sequences, all of them inside the cache. Reads the tensors.

    Args:
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's blocks are not looked at.
        kv_lens: [num_seqs] int32, keys of each sequence that live here.
        num_blocks: blocks of the cache; None: any.

    Raises:
        ValueError: it is too narrow, or an entry lies outside.
    """
    if not kv_lens.numel():
        return
    width = block_table.shape[1]
    used = -(-kv_lens // block_size)
    if int(used.max()) > width:
        raise ValueError(
            f"block_table has {width} columns, {int(kv_lens.max())} keys in blocks of {block_size} need "
            f"{int(used.max())}"
        )
    if num_blocks is None:
        return
    in_use = torch.arange(width, device=block_table.device) < used[:, None]
    outside = in_use & ((block_table < 0) | (block_table >= num_blocks))
    if bool(outside.any()):
        seq, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_table[{seq}, {column}] = {int(block_table[seq, column])} lies outside the cache's "
            f"{num_blocks} blocks"
        )
