"""The paged KV cache: a page is one contiguous record of bytes."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from octavo.checks import facts as facts_of
from octavo.errors import Unsupported
from octavo.formats import EIGHT_BIT_FORMATS, KVFormat

Order = Literal["HND", "NHD"]
"""Memory order inside a plane: heads outermost (HND), or rows outermost (NHD)."""

PLANE_ALIGNMENT = 16
"""Planes and records start at multiples of 16 bytes, as vector loads and TMA need."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K and V, as views that any memory order can stand behind; real number = stored number x descale.

    Args:
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides, last dimension contiguous.
        v_cache: [num_blocks, block_size, num_kv_heads, value_dim], likewise.
        k_descale: float32, any strides, by K's dtype. int8: [num_blocks, num_kv_heads, block_size], a scale per row,
            written by `append`. fp8: static, [] or [num_kv_heads] or (to attend only) [num_seqs, num_kv_heads];
            None: 1. Sequences that share pages need equal ones. Other dtypes: None.
        v_descale: the same by V's dtype; for int8 a scale per row, or static [num_kv_heads, value_dim], a scale per
            channel, without which the cache can be neither written nor read.

    Raises:
        ValueError: the shapes do not belong together, or a last dimension is not contiguous.
        TypeError: no format stores K and V so.
        Unsupported: a scale for numbers that need none.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    format: KVFormat = field(init=False, compare=False)
    """How K and V are stored."""
    facts: object = field(init=False, compare=False, repr=False)
    """What checks look at: caches with equal facts pass the same ones."""
    memo: dict[tuple[Any, ...], Any] = field(init=False, compare=False, repr=False, default_factory=dict)
    """What kernels and checks worked out for writing these pages and need again."""

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
        if k.dtype == torch.int8 and self.k_descale is None:
            raise ValueError("k_cache is int8 and needs k_descale, [num_blocks, num_kv_heads, block_size] float32")
        for name, pages, descale in (("k", k, self.k_descale), ("v", v, self.v_descale)):
            if descale is not None:
                _check_descale(name, pages, descale)
        found = KVFormat.of_pages(k.dtype, v.dtype, self.v_descale is not None and self.v_descale.ndim == 3)
        if found is None:
            raise TypeError(
                f"no cache format has K of {k.dtype} and V of {v.dtype}; each must be float16, bfloat16 or float32, "
                f"or both as one of {', '.join(EIGHT_BIT_FORMATS)} has them"
            )
        object.__setattr__(self, "format", found)
        object.__setattr__(self, "facts", tuple(facts_of(x) for x in (k, v, self.k_descale, self.v_descale)))

    @property
    def num_blocks(self) -> int:
        return self.k_cache.shape[0]

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]

    def descales_of_seqs(self, num_seqs: int) -> tuple[Tensor | None, Tensor | None]:
        """fp8's static scales as views [num_seqs, num_kv_heads], whatever they are given per; None: 1."""
        shape = (num_seqs, self.num_kv_heads)
        k, v = self.k_descale, self.v_descale
        return None if k is None else k.expand(shape), None if v is None else v.expand(shape)


def _check_descale(name: str, pages: Tensor, descale: Tensor) -> None:
    """A scale must have a shape that pages of this dtype may have scales of."""
    num_blocks, block_size, num_kv_heads, width = pages.shape
    by_row = (num_blocks, num_kv_heads, block_size)
    if pages.dtype.itemsize > 1:
        raise Unsupported(f"{name}_descale belongs to 8-bit tensors, {name}_cache is {pages.dtype}")
    if pages.dtype == torch.int8:
        allowed: tuple[tuple[int, ...], ...] = (by_row,) if name == "k" else (by_row, (num_kv_heads, width))
        fits = descale.shape in allowed
        words = " or ".join(map(str, allowed))
    else:
        fits = descale.shape in ((), (num_kv_heads,)) or (descale.ndim == 2 and descale.shape[1] == num_kv_heads)
        words = f"(), ({num_kv_heads},) or (num_seqs, {num_kv_heads})"
    if descale.dtype != torch.float32 or not fits:
        raise ValueError(
            f"{name}_descale of a {pages.dtype} cache must be float32 {words}, "
            f"got {descale.dtype} {tuple(descale.shape)}"
        )
    if descale.device != pages.device:
        raise ValueError(f"{name}_descale is on {descale.device}, {name}_cache on {pages.device}: use one device")


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The record of one page of one layer: the planes of K, V, K's scales and V's scales, as far as there are any.

    The scale of a row is float32; a plane of scales is [num_kv_heads, block_size] in either memory order.

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
    def _scale_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * torch.float32.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's rows and scales. `block_size` times this is `page_bytes`, where no plane needs padding:
        in pages of any multiple of 16 rows."""
        num_scales = self.format.k_scaled_by_row + self.format.v_scaled_by_row
        return (self._k_bytes + self._v_bytes + num_scales * self._scale_bytes) // self.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a record, padding included."""
        num_scales = self.format.k_scaled_by_row + self.format.v_scaled_by_row
        return _align(self._k_bytes) + _align(self._v_bytes) + num_scales * _align(self._scale_bytes)

    def shape_and_stride_order(
        self, num_blocks: int, num_layers: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The cache as one tensor, for engines that allocate by (logical shape, stride order).

        The logical shape is ([num_layers,] num_blocks, 2, block_size, num_kv_heads, head_dim), the second
        of "2" being V; the stride order lists logical dimensions from outermost to innermost in memory.

        Raises:
            ValueError: K and V differ in width or dtype, rows have scales, or a plane needs padding, so that no such
                tensor describes the record; allocate bytes and use `views`.
        """
        if self.format.k_scaled_by_row:
            raise ValueError(f"pages of {self.format.name} hold scales too; allocate bytes and use views()")
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

    def views(self, pages: Tensor, *, k_descale: Tensor | None = None, v_descale: Tensor | None = None) -> LayerCache:
        """One layer's K and V inside `pages`.

        Args:
            pages: [num_blocks, page_bytes] uint8, last dimension contiguous, records at multiples of 16 bytes.
            k_descale, v_descale: static scales, as `LayerCache` describes them; scales of rows are in the pages.

        Raises:
            ValueError, Unsupported: pages or scales do not fit the format.
        """
        if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != self.page_bytes:
            raise ValueError(
                f"pages must be uint8 [num_blocks, {self.page_bytes}], got {pages.dtype} {tuple(pages.shape)}"
            )
        v_start = _align(self._k_bytes)
        k = self._plane(pages[:, : self._k_bytes], self.format.k_dtype, self.head_dim)
        v = self._plane(pages[:, v_start : v_start + self._v_bytes], self.format.v_dtype, self.value_dim)
        scale_start = v_start + _align(self._v_bytes)
        descales: list[Tensor | None] = []
        for name, given, in_pages in (
            ("k_descale", k_descale, self.format.k_scaled_by_row),
            ("v_descale", v_descale, self.format.v_scaled_by_row),
        ):
            if not in_pages:
                descales.append(given)
                continue
            if given is not None:
                raise ValueError(f"{name} must be None: pages of {self.format.name} hold the scales of their rows")
            plane = pages[:, scale_start : scale_start + self._scale_bytes].view(torch.float32)
            descales.append(plane.view(-1, self.num_kv_heads, self.block_size).detach())
            scale_start += _align(self._scale_bytes)
        return LayerCache(k, v, *descales)

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
        format: a format's name ("auto" stores `dtype`, "int8_k" stores V in it).
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

    def layer(self, index: int, *, k_descale: Tensor | None = None, v_descale: Tensor | None = None) -> LayerCache:
        """Layer `index`'s views; they share memory with the cache.

        Args:
            k_descale, v_descale: the layer's static scales, as `LayerCache` describes them: int8_kv needs v_descale.
        """
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer must lie in [0, {self.num_layers}), got {index}")
        return self.layout.views(self.pages[index], k_descale=k_descale, v_descale=v_descale)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages `source` to pages `target` in every layer.

        Args:
            source, target: [n] int64 block indices; all sources are read before a target is written.
        """
        self.pages[:, target] = self.pages[:, source]


def _zeros(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Zeroed bytes. On the CPU the system hands zeroed memory out on first use, 2 MB at a time, so that a cache of
    gigabytes costs no time and no memory until it is filled (`torch.zeros` touches all of it)."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, shape[0] * shape[1] * shape[2], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            # 16 keys of a head fill 4 KB: where that is a page of the system's, the processor looks up each of them.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
