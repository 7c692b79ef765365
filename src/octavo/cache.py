"""The paged KV cache: a page is one contiguous record of bytes."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.formats import KVFormat

Order = Literal["HND", "NHD"]
"""Memory order inside a plane: heads outermost (HND), or rows outermost (NHD)."""

PLANE_ALIGNMENT = 16
"""Planes and records start at multiples of 16 bytes, as vector loads and TMA need."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K and V, as views that any memory order can stand behind.

    Args:
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides, last dimension contiguous.
        v_cache: [num_blocks, block_size, num_kv_heads, value_dim], likewise.

    Raises:
        ValueError: the shapes do not belong together, or a last dimension is not contiguous.
    """

    k_cache: Tensor
    v_cache: Tensor

    def __post_init__(self) -> None:
        k, v = self.k_cache, self.v_cache
        for name, tensor in (("k_cache", k), ("v_cache", v)):
            if tensor.ndim != 4:
                raise ValueError(
                    f"{name} must be [num_blocks, block_size, num_kv_heads, head_dim], got shape {tuple(tensor.shape)}"
                )
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k_cache and v_cache must agree in num_blocks, block_size and num_kv_heads, "
                f"got {tuple(k.shape[:3])} and {tuple(v.shape[:3])}"
            )
        if k.device != v.device:
            raise ValueError(f"k_cache is on {k.device}, v_cache on {v.device}: use one device")

    @property
    def num_blocks(self) -> int:
        return self.k_cache.shape[0]

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The record of one page of one layer: the K plane, then the V plane.

    Engines that own their memory view it through `views`; `PagedKVCache` is the ready-made owner.

    Args:
        block_size: rows of a page.
        num_kv_heads, head_dim, value_dim: shape of a row of K and of V.
        format: what a row stores.
        order: memory order inside a plane, "HND" or "NHD".

    Raises:
        ValueError: a size below 1, or an unknown order; the message lists the known ones.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    format: KVFormat
    order: Order = "HND"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"unknown cache layout {self.order!r}; known layouts: {', '.join(get_args(Order))}")
        for name in ("block_size", "num_kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def _k_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_dim * self.format.k_dtype.itemsize

    @property
    def _v_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.value_dim * self.format.v_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a record, padding included."""
        return _align(self._k_bytes) + _align(self._v_bytes)

    def shape_and_stride_order(
        self, num_blocks: int, num_layers: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cache as one tensor, for engines that allocate by (logical shape, stride order).

        The logical shape is ([num_layers,] num_blocks, 2, block_size, num_kv_heads, head_dim), the second
        of "2" being V; the stride order lists logical dimensions from outermost to innermost in memory.

        Raises:
            ValueError: K and V differ in width or dtype, or a plane needs padding, so that no such tensor
                describes the record; allocate bytes and use `views`.
        """
        if (self.head_dim, self.format.k_dtype) != (self.value_dim, self.format.v_dtype):
            raise ValueError("K and V rows differ, so a page is no single tensor; allocate bytes and use views()")
        if self._k_bytes % PLANE_ALIGNMENT:
            raise ValueError(
                f"a plane of {self._k_bytes} bytes needs padding to {PLANE_ALIGNMENT}; allocate bytes and use views()"
            )
        shape = (num_blocks, 2, self.block_size, self.num_kv_heads, self.head_dim)
        order = (0, 1, 3, 2, 4) if self.order == "HND" else (0, 1, 2, 3, 4)
        if num_layers is None:
            return shape, order
        return (num_layers, *shape), (0, *(dim + 1 for dim in order))

    def views(self, pages: Tensor) -> LayerCache:
        """One layer's K and V inside `pages`.

        Args:
            pages: [num_blocks, page_bytes] uint8, last dimension contiguous, records at multiples of 16 bytes.
        """
        if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != self.page_bytes:
            raise ValueError(
                f"pages must be uint8 [num_blocks, {self.page_bytes}], got {pages.dtype} {tuple(pages.shape)}"
            )
        v_start = _align(self._k_bytes)
        k = self._plane(pages[:, : self._k_bytes], self.format.k_dtype, self.head_dim)
        v = self._plane(pages[:, v_start : v_start + self._v_bytes], self.format.v_dtype, self.value_dim)
        return LayerCache(k, v)

    def _plane(self, plane: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        # Detached: compiled graphs take K and V of one memory only as tensors that name no common base.
        rows = plane.view(dtype)
        if self.order == "NHD":
            return rows.view(-1, self.block_size, self.num_kv_heads, width).detach()
        return rows.view(-1, self.num_kv_heads, self.block_size, width).transpose(1, 2).detach()


class PagedKVCache:
    """Pages of all layers, allocated and zeroed.

    A page of one layer is a contiguous record that holds all that belongs to it, so copying, swapping or
    sending it needs to know nothing of its content.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: sizes, each at least 1.
        value_dim: width of V; None: head_dim.
        format: a format's name ("auto" stores `dtype`).
        dtype: the model's dtype.
        device: where the pages live.
        layout: "HND" (default) or "NHD".

    Raises:
        ValueError: a size below 1, an unknown format or layout.
        Unsupported: a format that this version cannot store.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        format: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        layout: Order = "HND",
    ) -> None:
        if num_layers < 1 or num_blocks < 1:
            raise ValueError(f"num_layers and num_blocks must be at least 1, got {num_layers} and {num_blocks}")
        self.layout = PageLayout(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
            format=KVFormat.parse(format, dtype),
            order=layout,
        )
        self.pages = _zeros((num_layers, num_blocks, self.layout.page_bytes), torch.device(device))
        """[num_layers, num_blocks, page_bytes] uint8: page b of layer i is the record `pages[i, b]`."""

    @property
    def num_layers(self) -> int:
        return self.pages.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.pages.shape[1]

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes of one token over all layers."""
        return self.num_layers * self.layout.page_bytes / self.layout.block_size

    def layer(self, index: int) -> LayerCache:
        """Layer `index`'s views; they share memory with the cache."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer must lie in [0, {self.num_layers}), got {index}")
        return self.layout.views(self.pages[index])

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages `source` to pages `target` in every layer.

        Args:
            source, target: [n] int64 block indices; all sources are read before a target is written.
        """
        self.pages[:, target] = self.pages[:, source]


def _zeros(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Zeroed bytes. On the CPU the system hands zero pages out on first use, so that a cache of gigabytes
    costs no time and no memory until it is filled (`torch.zeros` touches every page)."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, shape[0] * shape[1] * shape[2], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
