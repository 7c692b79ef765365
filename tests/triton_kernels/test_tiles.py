"""The choice of a tile is a pure function; here are its rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from octavo.kernels.triton.tiles import Shape, Tile, choose, shared_bytes

LLAMA = Shape(
    max_rows=4,
    head_dim=128,
    value_dim=128,
    q_bytes=2,
    kv_bytes=2,
    batch_invariant=False,
    shared_limit=227 << 10,
    warpgroups=True,
)
WIDTHS = (16, 32, 64, 128, 256, 512)


def test_decode_and_prefill_run_with_what_was_measured() -> None:
    """docs/measured.md has the timings of these and of their neighbours."""
    assert choose(LLAMA) == Tile(rows=16, keys=128, num_warps=4, num_stages=3, max_registers=232)
    assert choose(replace(LLAMA, warpgroups=False)) == Tile(rows=16, keys=128, num_warps=4, num_stages=3)
    assert choose(replace(LLAMA, kv_bytes=1)) == Tile(rows=16, keys=128, num_warps=4, num_stages=5, max_registers=232)
    assert choose(replace(LLAMA, max_rows=16)) == Tile(rows=16, keys=64, num_warps=4, num_stages=7)
    prefill = replace(LLAMA, max_rows=1 << 16)
    assert choose(prefill) == Tile(rows=128, keys=64, num_warps=8, num_stages=4, max_registers=128)
    assert choose(replace(prefill, kv_bytes=1)) == Tile(rows=64, keys=64, num_warps=4, num_stages=5)
    assert choose(replace(prefill, warpgroups=False)) == Tile(rows=128, keys=64, num_warps=8, num_stages=5)
    assert choose(replace(prefill, head_dim=192)) == Tile(rows=128, keys=64, num_warps=8, num_stages=5)
    wide = replace(prefill, head_dim=256, value_dim=256)
    assert choose(wide) == Tile(rows=128, keys=64, num_warps=8, num_stages=4)


def test_two_programs_of_few_registers_fit_a_multiprocessor() -> None:
    """128 registers a thread are a half only if shared memory allows two programs."""
    for width in (16, 64, 96, 128):
        shape = replace(LLAMA, max_rows=1 << 16, head_dim=width, value_dim=width)
        tile = choose(shape)
        assert tile.max_registers is not None
        assert 2 * tile.max_registers * tile.num_warps * 32 <= 1 << 16
        assert 2 * shared_bytes(shape, tile.rows, tile.keys, tile.num_stages) <= shape.shared_limit


@pytest.mark.parametrize("limit", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("max_rows", [1, 17, 4096])
def test_a_tile_fits(limit: int, width: int, size: int, max_rows: int) -> None:
    shape = replace(
        LLAMA, max_rows=max_rows, head_dim=width, value_dim=width, q_bytes=size, kv_bytes=size, shared_limit=limit
    )
    tile = choose(shape)
    if (limit, width, size) != (64 << 10, 512, 4):  # no tile is small enough
        assert shared_bytes(shape, tile.rows, tile.keys, tile.num_stages) <= limit
    assert min(tile.rows, tile.keys) >= 16
    for n in (tile.rows, tile.keys, tile.num_warps):
        assert n & (n - 1) == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_the_invariant_mode_does_not_look_at_the_batch(width: int) -> None:
    shape = replace(LLAMA, head_dim=width, value_dim=width, batch_invariant=True)
    assert len({choose(replace(shape, max_rows=n)) for n in (1, 4, 100, 1 << 20)}) == 1


def test_a_sequence_with_few_rows_needs_one_tile() -> None:
    """Otherwise each program looks for its sequence first."""
    for rows in range(1, 129):
        assert rows <= choose(replace(LLAMA, max_rows=rows)).rows < max(2 * rows, 17)
