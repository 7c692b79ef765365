"""Which tile a launch runs with: a pure function of the layer, the launch's bounds and the device."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROWS = 16
"""Rows of the smallest tile: the matrix units' own height."""

INVARIANT_ROWS = 64
"""Rows of every tile in the batch-invariant mode."""

SLACK = 3 << 10
"""Bytes of shared memory for reductions and the like."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program is cut.

    Args:
        rows: rows of a tile, a row being one query head of one token.
        keys: keys that the loop takes at a time.
        num_warps: of a program.
        num_stages: of the loop over keys. A page's number is loaded before its rows, so that two stages are one of
            keys.
        max_registers: of a thread; None: as many as it wants.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice depends on.

    Args:
        max_rows: bound of the rows (tokens x group size) of a launch sequence.
        head_dim, value_dim: widths as loaded, with what pads them.
        q_bytes, kv_bytes: bytes of an element of q and of V; 4 where they meet in float32.
        batch_invariant: the choice must not depend on max_rows.
        shared_limit: bytes of shared memory that a program may use.
        warpgroups: whether four warps multiply together, with both factors in shared memory (Hopper).
    """

    max_rows: int
    head_dim: int
    value_dim: int
    q_bytes: int
    kv_bytes: int
    batch_invariant: bool
    shared_limit: int
    warpgroups: bool


def choose(shape: Shape) -> Tile:
    """The tile of a launch: the fastest of those measured, made smaller until it fits."""
    tile = _wanted(shape)
    rows, keys, num_stages = tile.rows, tile.keys, tile.num_stages
    while num_stages > 1 and not _fits(shape, rows, keys, num_stages):
        num_stages -= 1
    while keys > 16 and not _fits(shape, rows, keys, num_stages):
        keys //= 2
    while rows > MIN_ROWS and not _fits(shape, rows, keys, num_stages):
        rows //= 2
    return Tile(rows, keys, tile.num_warps, num_stages, tile.max_registers)


def shared_bytes(shape: Shape, rows: int, keys: int, num_stages: int) -> int:
    """About what a tile needs of shared memory: K and V under way, and q or the probabilities once."""
    key_bytes = (shape.head_dim + shape.value_dim) * shape.kv_bytes
    row_bytes = max(shape.head_dim, shape.value_dim) * shape.q_bytes
    # Hopper's matrix units read shared memory while the next keys arrive.
    buffers = (num_stages + 1) // 2 if rows >= 64 else max(1, num_stages // 2)
    return buffers * keys * key_bytes + rows * row_bytes


def _fits(shape: Shape, rows: int, keys: int, num_stages: int) -> bool:
    return shared_bytes(shape, rows, keys, num_stages) + SLACK <= shape.shared_limit


def _wanted(shape: Shape) -> Tile:
    width = max(shape.head_dim, shape.value_dim)
    if max(shape.q_bytes, shape.kv_bytes) == 4:
        return Tile(min(_rows(shape), 32), 32, 8, 5) if width <= 128 else Tile(16, 16, 8, 5)
    if width > 256:
        return Tile(min(_rows(shape), 32), 32, 8, 5)
    rows = _rows(shape)
    if rows > 64 and shape.warpgroups and shape.kv_bytes == 1 and width <= 128:
        return Tile(64, 64, 4, 5)  # V passes through registers, of which larger tiles leave none to spare
    if rows > 64 and shape.warpgroups:
        # Two programs of 128 registers a thread hide each other's waits, though the accumulators hardly fit.
        return Tile(128, 64, 8, 4, 128) if width <= 128 else Tile(128, 64, 8, 5)
    if rows > 64:
        return Tile(128, 64, 4 if width <= 64 else 8, 5)
    if rows > 16 or shape.batch_invariant:
        return Tile(rows, 64 if width <= 128 else 32, 4, 5)
    if shape.max_rows > 8:
        return Tile(rows, 64 if width <= 128 else 32, 4, 7)
    # Two of these fit a multiprocessor. Where three do, the pieces of a step crowd a part of the device: 8 % more for
    # 32 sequences of 8k. With a limit the compiler uses that many registers, without one perhaps so few that three fit.
    if width > 128:
        return Tile(rows, 64, 4, 3)
    if width > 64:
        return Tile(rows, 128, 4, 5 if shape.kv_bytes == 1 else 3, 232 if shape.warpgroups else None)
    return Tile(rows, 128, 4, 5)


def _rows(shape: Shape) -> int:
    """Rows of the tile: those of a sequence, up to 128."""
    return INVARIANT_ROWS if shape.batch_invariant else 1 << (min(max(shape.max_rows, MIN_ROWS), 128) - 1).bit_length()
