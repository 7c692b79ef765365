"""Attention over pages: which tile a launch runs with, and the launch of the one kernel (see attend_kernel.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attend_kernel import attend_kernel
from octavo.kernels.triton.launching import Call, again, current_stream, misaligned
from octavo.kernels.triton.stored import as_bytes, as_pairs, number, scale_strides
from octavo.kernels.triton.tiles import Shape, Tile, choose
from octavo.launch import Launch, Operands, Plan, State
from octavo.spec import AttentionSpec

if TYPE_CHECKING:
    from octavo.cache import LayerCache

MIN_COLUMNS = 16
"""Columns that the matrix units take at least, of numbers of 16 bits and more."""

MIN_COLUMNS_INT8 = 32
"""The same of int8."""

TENSORS = 10
"""Arguments of the kernel that are a layer's own; the others are the plan's, or numbers."""

MAX_WINDOW = 1 << 30
"""A radius past every position: larger ones would overflow int32."""


def attend(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
    memo: dict[tuple[Any, ...], Any],
) -> None:
    """Run one launch.

    Args:
        spec: what is computed.
        plan: the step.
        launch: which rows meet which keys.
        operands: the layer's tensors.
        state: out [num_splits, >= num_tokens, num_q_heads, value_dim] of any float dtype and lse (or None) of
            this launch's splits, or a final result; written at the launch's rows only.
        memo: where launches are kept for calls whose arguments have the same shapes, strides and dtypes.
    """
    q, cache, slopes, sinks, q_scale = operands
    k, v, (out, lse), k_scale, v_scale = cache.k_cache, cache.v_cache, state, cache.k_descale, cache.v_descale
    at = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        None if slopes is None else slopes.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if q_scale is None else q_scale.data_ptr(),
        None if k_scale is None else k_scale.data_ptr(),
        None if v_scale is None else v_scale.data_ptr(),
    )
    # Of all but the numbers that are loaded one by one.
    alignment = misaligned(at[0], at[1], at[2], at[3], at[5] or 0, at[6] or 0, at[8] or 0, at[9] or 0)
    key = (launch.first_state, current_stream(q.device), alignment)
    prepared = memo.get(key)
    if prepared is None:
        _prepare(spec, plan, launch, operands, state, memo, key)
    else:
        prepared.run(*at, *prepared.rest)


class Prepared(NamedTuple):
    """A compiled kernel with its grid, and what follows a layer's tensors: addresses of what the plan keeps, numbers.

    Triton's own launch would look at each of 60 arguments again, which takes 100 us longer.
    """

    run: Callable[..., None]
    rest: tuple[Any, ...]
    held: tuple[Tensor, ...]  # what the addresses are of


class Variant(NamedTuple):
    """What a compiled kernel depends on, of one layer's launches: those of one variant share a kernel.

    max_rows: of a launch sequence, if its parts are merged in the kernel; else 1.
    """

    tile: Tile
    one_tile: bool
    in_pieces: bool
    max_rows: int
    same_interval: bool
    gathered: bool


def variant(spec: AttentionSpec, plan: Plan, launch: Launch, operands: Operands) -> Variant:
    """The variant of a launch that has rows and sequences."""
    max_rows = max_query_len(plan, launch) * spec.group_size
    tile = choose_tile(spec, plan.batch_invariant, max_rows, operands.q, operands.cache)
    one_tile = max_rows <= tile.rows
    in_pieces = launch.pieces is not None and one_tile
    return Variant(
        tile,
        one_tile,
        in_pieces,
        1 << (max_rows - 1).bit_length() if in_pieces else 1,
        same_interval(spec, plan, launch),
        launch.rows is not None,
    )


def _prepare(
    spec: AttentionSpec,
    plan: Plan,
    launch: Launch,
    operands: Operands,
    state: State,
    memo: dict[tuple[Any, ...], Any],
    key: tuple[Any, ...],
) -> None:
    """Run a launch for the first layer of its kind, and keep in `memo` what the others need."""
    call = call_of(spec, plan, launch, operands, state)
    if call is None:
        return
    tensors, rest, constants = call.arguments[:TENSORS], call.arguments[TENSORS:], tuple(call.constants.values())
    q, cache = operands.q, operands.cache
    compiled_for = (
        key[2],
        spec,
        (q.dtype, cache.k_cache.dtype, cache.v_cache.dtype, state.out.dtype),
        tuple(x is None for x in call.arguments),
        *_facts(tensors),
        *call.options.values(),
        *constants,
    )
    compiled = plan.workspace.kernels.get(compiled_for)
    if compiled is None:
        compiled = call.start()
        if compiled is None:  # interpreted
            return
        plan.workspace.kernels[compiled_for] = compiled
    else:
        again(compiled, call.grid, key[1])(*call.arguments, *constants)
    held = tuple(x for x in rest if isinstance(x, Tensor))
    addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in rest)
    memo[key] = Prepared(again(compiled, call.grid, key[1]), (*addresses, *constants), held)


def call_of(spec: AttentionSpec, plan: Plan, launch: Launch, operands: Operands, state: State) -> Call | None:
    """The kernel's call for a launch; arguments as in `attend`. None: it has no rows."""
    q, cache, alibi_slopes, sinks, q_scale = operands
    (out, lse), kv_format = state.in_parts(), cache.format
    k_cache = as_pairs(cache.k_cache) if kv_format.is_fp8 else cache.k_cache
    v_cache = as_pairs(cache.v_cache) if cache.v_cache.dtype.itemsize == 1 else cache.v_cache
    num_seqs, num_splits = launch.kv_splits.shape[0], launch.num_splits
    if not max_query_len(plan, launch) or not num_seqs:
        return None
    form = variant(spec, plan, launch, operands)
    assert all(x is None or num_splits == 1 or x.stride(0) == plan.num_tokens * x.stride(1) for x in (out, lse))
    tile = form.tile
    pieces, tickets = (launch.pieces, launch.tickets) if form.in_pieces else (None, None)
    if pieces is not None:
        num_tiles = pieces.shape[0]
        _check_tickets(tickets, num_tiles * spec.num_kv_heads)
    else:
        num_tiles = num_seqs if form.one_tile else plan.num_tokens * spec.group_size // tile.rows + num_seqs
    head_width, value_width = widths(spec, cache)
    v_type, shift = weights(cache, q.dtype)
    row_seqs = launch.rows is not None and q_scale is not None and q_scale.ndim == 2
    constants = {
        "CAUSAL": spec.causal,
        "SQRT_ALIBI": spec.alibi == "sqrt",
        "NUM_KV_HEADS": spec.num_kv_heads,
        "GROUP_SIZE": spec.group_size,
        "HEAD_DIM": spec.head_dim,
        "VALUE_DIM": spec.v_dim,
        "BLOCK_HEAD": head_width.block,
        "REST_HEAD": head_width.rest,
        "BLOCK_VALUE": value_width.block,
        "REST_VALUE": value_width.rest,
        "BLOCK_SIZE": plan.block_size,
        **dict(zip(("K_BLOCK", "K_ROW", "K_HEAD"), k_cache.stride()[:3], strict=True)),
        **dict(zip(("V_BLOCK", "V_ROW", "V_HEAD"), v_cache.stride()[:3], strict=True)),
        **dict(zip(("K_SCALE_BLOCK", "K_SCALE_HEAD", "K_SCALE_ROW"), scale_strides(cache.k_descale), strict=True)),
        **dict(
            zip(
                ("V_SCALE_BLOCK", "V_SCALE_HEAD", "V_SCALE_ROW"),
                scale_strides(cache.v_descale, kv_format.v_scaled_by_channel),
                strict=True,
            )
        ),
        "Q_NUMBER": number(q.dtype),
        "K_NUMBER": number(cache.k_cache.dtype),
        "V_NUMBER": number(cache.v_cache.dtype),
        "V_SCALED_BY_ROW": kv_format.v_scaled_by_row,
        "V_TYPE": v_type,
        "SHIFT": shift,
        "ISA": instructions(q.device),
        "WORLD": plan.shard.dcp_world,
        "INTERLEAVE": plan.shard.interleave,
        "BLOCK_M": tile.rows,
        "BLOCK_KV": tile.keys,
        "STAGES": tile.num_stages,
        "ONE_TILE": form.one_tile,
        "PART_ROWS": form.max_rows,
        "SAME_INTERVAL": form.same_interval,
        "UPCAST": not isinstance(attend_kernel, triton.JITFunction),
    }
    units = exponent_units(spec)
    tensors = (
        as_bytes(q), k_cache, v_cache, out, lse, alibi_slopes, sinks, q_scale, cache.k_descale, cache.v_descale,
    )  # fmt: skip
    rest = (
        launch.query_start_loc,
        launch.kv_splits,
        launch.rows,
        launch.seqs,
        pieces,
        *parts_of(plan, 0 if pieces is None else num_tiles * spec.num_kv_heads, form.max_rows, spec.v_dim),
        tickets,
        plan.positions,
        plan.seq_lens,
        plan.seqs_of_rows() if row_seqs else None,
        plan.block_table,
        q.stride()[:2],
        out.stride()[1:3],
        (0, 0) if lse is None else lse.stride()[1:],
        plan.block_table.stride(0),
        (1 if alibi_slopes is None else alibi_slopes.stride(0), 1 if sinks is None else sinks.stride(0)),
        (0, 0) if q_scale is None else scale_strides(q_scale)[:2],
        plan.num_tokens,
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
    options = {"num_warps": tile.num_warps}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return Call(attend_kernel, grid, (*tensors, *rest), constants, options)


def _facts(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a compiled kernel depends on of a layer's tensors, beside their dtypes and alignment."""
    q, _, _, out, lse, *terms = (None if x is None else x.stride() for x in tensors)
    return (q, *(x and x[1:] for x in (out, lse)), *terms)  # from split to split is not compiled in


def _check_tickets(tickets: Tensor | None, needed: int) -> None:
    found = 0 if tickets is None else tickets.shape[0]
    if found < needed:
        raise ValueError(f"the plan has {found} tickets, this layer needs {needed}: give the planner the widest layer")


class Parts(NamedTuple):
    """Memory of the parts that pieces leave until the last of a sequence merges them.

    out [num_parts, PART_ROWS, value_dim] and lse [num_parts, PART_ROWS] float32, undefined.
    """

    out: Tensor | None
    lse: Tensor | None


def parts_of(plan: Plan, num_parts: int, rows: int, value_dim: int) -> Parts:
    """Memory for that many parts, of the stream that is current."""
    if not num_parts:
        return Parts(None, None)
    return Parts(
        plan.workspace.scratch("parts", (num_parts, rows, value_dim), torch.float32),
        plan.workspace.scratch("part lse", (num_parts, rows), torch.float32),
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


def choose_tile(spec: AttentionSpec, batch_invariant: bool, max_rows: int, q: Tensor, cache: LayerCache) -> Tile:
    """The tile of a launch whose sequences have at most max_rows rows each."""
    k_width, v_width = widths(spec, cache)
    eight_bit = cache.format.is_eight_bit
    wide = q.dtype == torch.float32 if eight_bit else q.dtype != cache.k_cache.dtype
    return choose(
        Shape(
            max_rows=max_rows,
            head_dim=sum(k_width),
            value_dim=sum(v_width),
            q_bytes=4 if wide else max(2, q.element_size()),
            kv_bytes=4 if wide else cache.v_cache.element_size(),
            batch_invariant=batch_invariant,
            shared_limit=shared_limit(q.device),
            warpgroups=has_warpgroups(q.device),
        )
    )


def widths(spec: AttentionSpec, cache: LayerCache) -> tuple[Width, Width]:
    """The parts that K and V are loaded in: columns that follow each other, or the even and the odd ones."""
    k_bytes, v_bytes = cache.k_cache.dtype.itemsize, cache.v_cache.dtype.itemsize
    if cache.format.is_fp8:
        k_width = halves(spec.head_dim)
    else:
        k_width = cut(spec.head_dim, MIN_COLUMNS_INT8 if k_bytes == 1 else MIN_COLUMNS)
    return k_width, halves(spec.v_dim) if v_bytes == 1 else cut(spec.v_dim)


def weights(cache: LayerCache, q_dtype: torch.dtype) -> tuple[Any, int]:
    """What 8-bit V is multiplied as, and the power of two in the weights of V, where float16 would lose small ones."""
    if cache.v_cache.dtype in (torch.bfloat16, torch.float32):
        return None, 0
    if not cache.format.v_scaled_by_row:
        return tl.float16, 14
    # The scales of V's rows multiply the weights: as large as the model's dtype allows.
    return {torch.bfloat16: (tl.bfloat16, 0), torch.float16: (tl.float16, 6)}.get(q_dtype, (tl.float32, 0))


class Width(NamedTuple):
    """Columns as a kernel loads them: `block`, then `rest` more; powers of two, rest possibly 0."""

    block: int
    rest: int


def halves(width: int) -> Width:
    """The even and the odd columns of a row."""
    half = max(MIN_COLUMNS, 1 << (width - 1).bit_length() >> 1)
    return Width(half, half)


def cut(width: int, least: int = MIN_COLUMNS) -> Width:
    """The parts of a row of `width` columns, with the least padding that two parts of `least` or more allow."""
    whole = max(least, 1 << (width - 1).bit_length())
    if whole == least:
        return Width(whole, 0)
    rest = max(least, 1 << (width - whole // 2 - 1).bit_length())
    return Width(whole, 0) if rest == whole // 2 else Width(whole // 2, rest)


@lru_cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether four warps multiply together (Hopper's wgmma)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def instructions(device: torch.device) -> int:
    """NVIDIA's compute capability times 10; 0 elsewhere."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may use."""
    if device.type == "cpu":  # interpreted
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)
