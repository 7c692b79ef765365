"""From rows of K, V and Q to stored numbers: the definitions that every writer, kernel and oracle follows bit by bit.

A stored number means `stored * scale`. All arithmetic is float32; divisions are correctly rounded, `rint` rounds half
to even. A reciprocal instead of the division, or one that is only nearly right, changes some int8 value in a quarter
of all rows.

What is not finite stays visible, or saturates where a format says so:

- a scale made from its row: a row with a NaN or an infinity gets scale NaN and values 0, so whoever sees it reads NaN;
- fp8 saturates: what lies beyond the largest number, infinities too, becomes that number; NaN stays NaN;
- int8 V by channel saturates likewise, but has no code for NaN: there the token's K scale becomes NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import KVFormat

INT8_MAX = 127
"""Largest stored int8; -128 is not used."""


class StoredRows(NamedTuple):
    """Rows of K and V as a cache stores them.

    k, v: [n, num_kv_heads, head_dim | value_dim] in the format's dtypes.
    k_scale, v_scale: [n, num_kv_heads] float32, or None where the format has no scale per row.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def store_rows(
    format: KVFormat, k: Tensor, v: Tensor, k_descale: Tensor | None = None, v_descale: Tensor | None = None
) -> StoredRows:
    """New rows as `format` stores them.

    Args:
        format: how.
        k, v: [n, num_kv_heads, head_dim | value_dim] of any float dtype.
        k_descale, v_descale: static scales as a `LayerCache` holds them; for fp8 [] or [num_kv_heads].
    """
    if format.is_fp8:
        per_k, per_v = (None if x is None else x.unsqueeze(-1) for x in (k_descale, v_descale))
        return StoredRows(to_fp8(k, format.k_dtype, per_k), to_fp8(v, format.v_dtype, per_v), None, None)
    if not format.k_scaled_by_row:
        return StoredRows(k.to(format.k_dtype), v.to(format.v_dtype), None, None)
    stored_k, k_scale = quantise_rows(k)
    if format.v_scaled_by_row:
        stored_v, v_scale = quantise_rows(v)
        return StoredRows(stored_k, stored_v, k_scale, v_scale)
    if not format.v_scaled_by_channel:
        return StoredRows(stored_k, v.to(format.v_dtype), k_scale, None)
    assert v_descale is not None
    hidden = v.isnan().any(-1)
    return StoredRows(stored_k, quantise_channels(v, v_descale), k_scale.masked_fill(hidden, torch.nan), None)


def real_rows(
    format: KVFormat, rows: StoredRows, k_descale: Tensor | None = None, v_descale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers that stored rows stand for: (k, v) [n, num_kv_heads, head_dim | value_dim] float32.

    Args:
        format, k_descale, v_descale: as `store_rows` was given them.
        rows: what it returned.
    """
    k_scale = k_descale if rows.k_scale is None else rows.k_scale
    v_scale = v_descale if rows.v_scale is None else rows.v_scale
    if k_scale is not None:
        k_scale = k_scale.unsqueeze(-1)
    if v_scale is not None and not format.v_scaled_by_channel:
        v_scale = v_scale.unsqueeze(-1)
    k, v = rows.k.float(), rows.v.float()
    return k if k_scale is None else k * k_scale, v if v_scale is None else v * v_scale


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8 with a scale of their own: `scale = absmax / 127`, `rint(x / scale)`.

    Args:
        x: [..., width] of any float dtype; taken as float32.

    Returns:
        values [..., width] int8 in -127 .. 127, and scale [...] float32. A row of zeros (and one so small that its
        scale is 0) has scale 0 and values 0; a row with a NaN or an infinity has scale NaN and values 0.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scale = largest / torch.full_like(largest, INT8_MAX)  # by a plain number, a GPU would multiply by its reciprocal
    scale = scale.masked_fill(~scale.isfinite(), torch.nan)
    return quantise_channels(x, scale.unsqueeze(-1)), scale


def quantise_channels(x: Tensor, scale: Tensor) -> Tensor:
    """Numbers as int8 under given scales: `clamp(rint(x / scale), -127, 127)`.

    Args:
        x: any shape and float dtype; taken as float32.
        scale: float32, broadcast over x. Where it is 0 or NaN, or x is NaN, the value is 0.
    """
    values = (x.float() / scale).round().clamp(-INT8_MAX, INT8_MAX)
    return values.masked_fill((scale == 0) | values.isnan(), 0.0).to(torch.int8)


def to_fp8(x: Tensor, dtype: torch.dtype, descale: Tensor | None = None) -> Tensor:
    """Numbers as fp8 under a given scale: `x / descale`, saturated, rounded to nearest, half to even.

    Args:
        x: any shape and float dtype; taken as float32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        descale: float32, above 0, broadcast over x; None: 1.
    """
    most = torch.finfo(dtype).max
    x = x.float() if descale is None else x.float() / descale
    return x.clamp(-most, most).to(dtype)
