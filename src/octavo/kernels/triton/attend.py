"""Attention over pages: which tile a launch runs with, and the launch of the one kernel (see attend_kernel.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.kernels.triton.attend_kernel import attend_kernel
from octavo.kernels.triton.tiles import Shape, Tile, choose
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

MAX_WINDOW = 1 << 30
"""A radius past every position: larger ones would overflow int32."""


def attend(spec: AttentionSpec, plan: Plan, launch: Launch, operands: Operands, state: State) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        operands: the layer's tensors.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] of any float dtype and lse (or None) of
            this launch's splits; written at the launch's rows only.
    """
    q, cache, alibi_slopes, sinks = operands
    tensors = (q, cache.k_cache, cache.v_cache, *state, alibi_slopes, sinks)
    layer = (spec, *map(_facts, tensors))
    prepared = plan.memo.get((launch.first_state, layer))
    if prepared is None:
        _prepare(spec, plan, launch, tensors, layer)
    else:
        prepared.run(*tensors, *prepared.rest)


class Prepared(NamedTuple):
    """A compiled kernel with its grid, and what follows a layer's tensors: addresses of what the plan keeps, numbers.

    Triton's own launch would look at each of 60 arguments again, which takes 100 us longer.
    """

    run: Callable[..., None]
    rest: tuple[Any, ...]


def _facts(x: Tensor | None) -> tuple[Any, ...] | None:
    """What a compiled kernel depends on."""
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16)


def _prepare(spec: AttentionSpec, plan: Plan, launch: Launch, tensors: tuple[Any, ...], layer: tuple[Any, ...]) -> None:
    """Run a launch for the first layer of its kind, and keep with the plan what the others need."""
    q, k_cache, v_cache, out, lse, alibi_slopes, sinks = tensors
    num_seqs, num_splits = launch.kv_splits.shape[0], launch.num_splits
    max_rows = max_query_len(plan, launch) * spec.group_size
    if not max_rows or not num_seqs:
        return
    tile = choose_tile(spec, plan.batch_invariant, max_rows, num_seqs, q, k_cache)
    one_tile = max_rows <= tile.rows
    pieces = launch.pieces if one_tile else None
    if pieces is not None:
        num_tiles = pieces.shape[0]
    else:
        num_tiles = num_seqs if one_tile else plan.num_tokens * spec.group_size // tile.rows + num_seqs
    part_rows = 1 if pieces is None else 1 << (max_rows - 1).bit_length()
    constants = {
        "CAUSAL": spec.causal,
        "SQRT_ALIBI": spec.alibi == "sqrt",
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP_SIZE": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "VALUE_DIM": spec.v_dim,
        "BLOCK_HEAD": padded(spec.head_dim),
        "BLOCK_VALUE": padded(spec.v_dim),
        "BLOCK_SIZE": plan.block_size,
        "WORLD": plan.shard.dcp_world,
        "INTERLEAVE": plan.shard.interleave,
        "BLOCK_M": tile.rows,
        "BLOCK_KV": tile.keys,
        "STAGES": tile.num_stages,
        "ONE_TILE": one_tile,
        "PART_ROWS": part_rows,
        "SAME_STRIDES": k_cache.stride() == v_cache.stride(),
        "SAME_INTERVAL": same_interval(spec, plan, launch),
        "INVARIANT": plan.batch_invariant,
        "UPCAST": not isinstance(attend_kernel, triton.JITFunction),
    }
    units = exponent_units(spec)
    rest = (
        launch.query_start_loc,
        launch.kv_splits,
        launch.rows,
        launch.seqs,
        pieces,
        *parts_of(plan, 0 if pieces is None else num_tiles * spec.num_kv_heads, part_rows, spec.v_dim),
        plan.positions,
        plan.seq_lens,
        plan.block_table,
        q.stride()[:2],
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        out.stride()[:3],
        (0, 0, 0) if lse is None else lse.stride(),
        plan.block_table.stride(0),
        (1 if alibi_slopes is None else alibi_slopes.stride(0), 1 if sinks is None else sinks.stride(0)),
        num_seqs,
        num_splits,
        num_tiles,
        units.factor,
        units.pre_scale,
        spec.logits_soft_cap,
        None if spec.window_left is None else min(spec.window_left, MAX_WINDOW),
        None if spec.window_right is None else min(spec.window_right, MAX_WINDOW),
        plan.shard.dcp_rank,
    )
    grid = (num_tiles * spec.num_kv_heads * num_splits, 1, 1)
    compiled_for = (layer, tile, launch.rows is None, launch.seqs is None, pieces is None, *constants.values())
    compiled = plan.workspace.kernels.get(compiled_for)
    if compiled is None:
        compiled = attend_kernel[grid](*tensors, *rest, **constants, num_warps=tile.num_warps)
        if compiled is None:  # interpreted
            return
        plan.workspace.kernels[compiled_for] = compiled
    else:
        compiled[grid](*tensors, *rest, *constants.values())
    addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in rest)
    plan.memo[launch.first_state, layer] = Prepared(compiled[grid], (*addresses, *constants.values()))


class Parts(NamedTuple):
    """Memory of the parts that pieces leave until the last of a sequence merges them.

    out [num_parts, PART_ROWS, value_dim] and lse [num_parts, PART_ROWS] float32, undefined; tickets [num_parts]
    int32, 0 between launches.
    """

    out: Tensor | None
    lse: Tensor | None
    tickets: Tensor | None


def parts_of(plan: Plan, num_parts: int, rows: int, value_dim: int) -> Parts:
    """The plan's memory for that many parts."""
    if not num_parts:
        return Parts(None, None, None)
    workspace = plan.workspace
    return Parts(
        workspace.scratch("parts", (num_parts, rows, value_dim), torch.float32),
        workspace.scratch("part lse", (num_parts, rows), torch.float32),
        workspace.zeros("part tickets", (num_parts,), torch.int32),
    )


class ExponentUnits(NamedTuple):
    """How scores become powers of two: exp(s) = 2 ** (t * factor), factor > 0, with t as `transform_scores` leaves it.

    The last multiplication of the scores is thus one with the exponential's. pre_scale: None, or what q . k is
    multiplied by first.
    """

    factor: float
    pre_scale: float | None


def exponent_units(spec: AttentionSpec) -> ExponentUnits:
    """The units of a layer's scores."""
    log2e = math.log2(math.e)
    if spec.logits_soft_cap is not None:
        return ExponentUnits(log2e if spec.alibi else spec.logits_soft_cap * log2e, spec.scale / spec.logits_soft_cap)
    if spec.alibi or spec.scale <= 0:
        return ExponentUnits(log2e, spec.scale)
    return ExponentUnits(spec.scale * log2e, None)


def max_query_len(plan: Plan, launch: Launch) -> int:
    """A bound of the rows of a launch sequence."""
    return plan.num_tokens if launch.max_query_len is None else min(launch.max_query_len, plan.num_tokens)


def same_interval(spec: AttentionSpec, plan: Plan, launch: Launch) -> bool:
    """Whether all rows of a launch sequence see the same keys: then no row's value can stray to another."""
    if launch.rows is not None:
        return False
    bounded = spec.causal or spec.window_left is not None or spec.window_right is not None
    return max_query_len(plan, launch) == 1 or not bounded


def choose_tile(
    spec: AttentionSpec, batch_invariant: bool, max_rows: int, num_seqs: int, q: Tensor, k_cache: Tensor
) -> Tile:
    """The tile of a launch of num_seqs sequences with at most max_rows rows each."""
    same = q.dtype == k_cache.dtype
    return choose(
        Shape(
            max_rows=max_rows,
            num_seqs=num_seqs,
            head_dim=padded(spec.head_dim),
            value_dim=padded(spec.v_dim),
            q_bytes=q.element_size() if same else 4,
            kv_bytes=k_cache.element_size() if same else 4,
            batch_invariant=batch_invariant,
            shared_limit=shared_limit(q.device),
        )
    )


def padded(width: int) -> int:
    """The width of a tile that holds `width` columns: a power of two, at least what the matrix units take."""
    return max(16, 1 << (width - 1).bit_length())


@lru_cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type == "cpu":  # interpreted
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)
