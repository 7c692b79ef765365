"""K and V of a tile of keys: where their rows stand in pages, and how they are loaded."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.eight_bit import unpack


@triton.jit
def find_rows(
    table_ptr,  # of this sequence
    j,  # [BLOCK_KV] int32, the local keys of tile t
    t,
    first,  # the sequence's pages are looked up only where they hold keys of [first, last)
    last,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """(block, row) of the keys of a tile: block [BLOCK_KV] int64, row in the block past `rows_in_block`.

    Keys outside [first, last) get a row of the nearest block that holds a key; it need not hold one itself.
    """
    first_page, last_page = first // BLOCK_SIZE, (last - 1) // BLOCK_SIZE
    if BLOCK_KV % BLOCK_SIZE == 0:
        # A block's number is loaded once for all its keys.
        PAGES: tl.constexpr = BLOCK_KV // BLOCK_SIZE
        page = tl.minimum(tl.maximum(t * PAGES + tl.arange(0, PAGES), first_page), last_page)
        block = tl.broadcast_to(tl.load(table_ptr + page)[:, None], [PAGES, BLOCK_SIZE])
        return tl.reshape(block, [BLOCK_KV]).to(tl.int64), 0
    elif BLOCK_SIZE % BLOCK_KV == 0:
        TILES: tl.constexpr = BLOCK_SIZE // BLOCK_KV
        block = tl.load(table_ptr + t // TILES + tl.arange(0, 1))
        return tl.broadcast_to(block, [BLOCK_KV]).to(tl.int64), t % TILES * BLOCK_KV
    else:
        page = tl.minimum(tl.maximum(j // BLOCK_SIZE, first_page), last_page)
        return tl.load(table_ptr + page).to(tl.int64), j % BLOCK_SIZE


@triton.jit
def rows_in_block(
    plane_ptr,
    row_stride,
    COLUMN: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Pointers [BLOCK_KV, BLOCK_DIM] to which every tile adds its blocks: what a loop over tiles works out once."""
    at = scales_in_block(plane_ptr, row_stride, BLOCK_SIZE, BLOCK_KV)
    return at[:, None] + (COLUMN + tl.arange(0, BLOCK_DIM))[None, :]


@triton.jit
def scales_in_block(plane_ptr, row_stride, BLOCK_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The same for one number of a row: [BLOCK_KV]."""
    row = tl.zeros([BLOCK_KV], tl.int64)
    if BLOCK_KV % BLOCK_SIZE == 0 or BLOCK_SIZE % BLOCK_KV == 0:
        row += tl.arange(0, BLOCK_KV) % BLOCK_SIZE
    return plane_ptr + row * row_stride


@triton.jit
def load_keys(
    rows,  # [BLOCK_KV, BLOCK_DIM] pointers of `rows_in_block`
    offset,  # [BLOCK_KV] int64, elements
    there,  # [BLOCK_KV] bool, the rows to load, or None: all
    COLUMN: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Columns [COLUMN, COLUMN + BLOCK_DIM) of K or V rows: [BLOCK_KV, BLOCK_DIM], 0 past DIM and in rows not there."""
    at = rows + offset[:, None]
    in_row = (COLUMN + tl.arange(0, BLOCK_DIM))[None, :] < DIM
    if COLUMN + BLOCK_DIM <= DIM:
        if there is None:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=there[:, None], other=0)
    elif there is None:
        x = tl.load(at, mask=in_row, other=0)
    else:
        x = tl.load(at, mask=there[:, None] & in_row, other=0)
    if UPCAST and x.dtype.is_floating():
        x = x.to(tl.float32)
    return x


@triton.jit
def load_pairs(
    rows,  # [BLOCK_KV, BLOCK_DIM] pointers to int16, or to the bytes of even columns
    offset,  # [BLOCK_KV] int64, elements
    there,  # [BLOCK_KV] bool, the rows to load, or None: all
    BLOCK_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NUMBER: tl.constexpr,
    TYPE: tl.constexpr,
    ISA: tl.constexpr,
):
    """The even columns and the odd ones of 8-bit rows as TYPE: [BLOCK_KV, BLOCK_DIM] each, 0 past DIM and where not
    there."""
    if rows.dtype.element_ty == tl.int16:
        pairs = load_keys(rows, offset, there, 0, BLOCK_DIM, DIM // 2, False)
    else:
        at, column = rows + offset[:, None], 2 * tl.arange(0, BLOCK_DIM)[None, :]
        low, high = column < DIM, column + 1 < DIM
        if there is not None:
            low, high = low & there[:, None], high & there[:, None]
        low, high = tl.load(at, mask=low, other=0).to(tl.uint8), tl.load(at + 1, mask=high, other=0).to(tl.uint8)
        pairs = low.to(tl.int16) | (high.to(tl.int16) << 8)
    return unpack(pairs, NUMBER, TYPE, ISA)
