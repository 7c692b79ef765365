"""Write and attend: the only caller of kernels. It launches and merges; the planner thinks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.cache import LayerCache
from octavo.checks import (
    check_block_table,
    check_device,
    check_index,
    check_optional_tensors,
    check_tensors,
    facts,
    facts_of_row,
)
from octavo.errors import Unsupported
from octavo.formats import FP8_FORMATS, HOW_TO_CALIBRATE, KVFormat
from octavo.launch import Operands, Plan, State
from octavo.spec import AttentionSpec


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write new keys and values into their pages.

    Args:
        cache: one layer's views, written in place.
        k: [>= num_slots, num_kv_heads, head_dim], any float dtype; rows past num_slots are padding.
        v: [>= num_slots, num_kv_heads, value_dim], likewise.
        slot_mapping: [num_slots] int64, block * block_size + offset; negative: not stored.

    Raises:
        TypeError, ValueError: a shape, dtype, device or (on CPU) slot does not fit; nothing is written then.
        Unsupported: no kernels run on this device.
    """
    # Checks that do not read numbers take longer than a launch; once for arguments of a kind is enough.
    call = ("append", facts_of_row(k), facts_of_row(v), facts_of_row(slot_mapping))
    family = cache.memo.get(call)
    if family is None or min(k.shape[0], v.shape[0]) < slot_mapping.shape[0]:
        _check_append(cache, k, v, slot_mapping)
        family = cache.memo[call] = kernels.for_device(k.device)
    if slot_mapping.device.type == "cpu" and slot_mapping.numel():
        slots, last = cache.num_blocks * cache.block_size, int(slot_mapping.max())
        if last >= slots:
            raise ValueError(f"slot_mapping holds {last}, the cache has {slots} slots")
    family.append(cache, k, v, slot_mapping)


def _check_append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    check_tensors(k=k, v=v)
    check_index("slot_mapping", slot_mapping, 1, torch.int64)
    num_slots = slot_mapping.shape[0]
    for name, new, pages in (("k", k, cache.k_cache), ("v", v, cache.v_cache)):
        if new.ndim != 3 or new.shape[1:] != pages.shape[2:] or new.shape[0] < num_slots:
            raise ValueError(
                f"{name} must be [at least num_slots = {num_slots}, {pages.shape[2]}, {pages.shape[3]}], "
                f"got {tuple(new.shape)}"
            )
        if not new.is_floating_point():
            raise TypeError(f"{name} must be a float tensor, got {new.dtype}")
    check_device(cache.k_cache.device, k=k, v=v, slot_mapping=slot_mapping)
    kv_format = cache.format
    _check_scales(cache, kv_format)
    for name, descale in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale)):
        if kv_format.is_fp8 and descale is not None and descale.ndim > 1:
            raise ValueError(
                f"{name} must be one number or [num_kv_heads] to write, as slots do not tell the sequence, "
                f"got {tuple(descale.shape)}"
            )


def run(
    plan: Plan,
    spec: AttentionSpec,
    q: Tensor,
    cache: LayerCache,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
) -> None:
    """Attention of one layer.

    With a shard of more than one rank the result is this rank's state, to be reduced over ranks by
    `merge_states`; the sink belongs to that reduction, so `sinks` must be None here.

    Args:
        plan: the step.
        spec: the layer.
        q: [>= num_tokens, num_q_heads, head_dim] float16, bfloat16 or float32, last dimension contiguous; beside an
            fp8 cache also fp8.
        cache: the layer's pages.
        out: [>= num_tokens, num_q_heads, value_dim], written in place; rows past num_tokens stay as they are.
        lse: [>= num_tokens, num_q_heads] float32 or None, written in place: natural log, -inf where a row
            sees no key (with a sink: the sink). Rows that belong to no sequence stay as they are, here and in out.
        alibi_slopes: [num_q_heads] float32, given iff spec.alibi.
        sinks: [num_q_heads] float32, given iff spec.sinks.
        q_descale: float32 [] or [num_seqs, num_kv_heads], what an fp8 q is multiplied by; None: 1.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing is written then.
        Unsupported: no kernel serves this spec, dtype, format and device.
    """
    # The layers of a model are of one kind or a few, and checking each of them takes as long as launching.
    terms = (facts(alibi_slopes), facts(sinks), facts(q_descale))
    call = ("run", spec, cache.facts, facts(q), facts(out), facts(lse), *terms)
    known: Known | None = plan.memo.get(call)
    if known is None or known.check_again:
        check_run(plan, spec, q, cache, out, lse, alibi_slopes, sinks, q_descale)
    if known is None:
        known = plan.memo[call] = Known(kernels.for_device(q.device), reads_tables(plan), {})
    family, _, memo = known
    operands, result = Operands(q, cache, alibi_slopes, sinks, q_descale), State(out, lse)
    if plan.num_states <= 1:
        for launch in plan.launches:
            family.attend(spec, plan, launch, operands, result, memo)
        return
    parts = plan.workspace.states(plan.num_states, plan.num_tokens, spec.num_q_heads, spec.v_dim)
    assert parts.lse is not None
    parts.lse.fill_(-torch.inf)  # a row that a launch leaves out has an empty part there
    for launch in plan.launches:
        family.attend(spec, plan, launch, operands._replace(sinks=None), launch.part_of(parts), memo)
    family.merge(parts, sinks, result, plan.launches[-1].query_start_loc, memo)


class Known(NamedTuple):
    """What is known of calls of one plan whose arguments differ in addresses and numbers only, as a model's layers do.

    family: the kernels that serve them.
    check_again: the checks read numbers, so that every call needs them.
    memo: what the kernels worked out for one of the calls and the others need again.
    """

    family: kernels.Kernels
    check_again: bool
    memo: dict[tuple[Any, ...], Any]


@torch.no_grad()
def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge partial results over parts of the keys.

    The merge is associative up to float32 rounding; (anything, -inf) is its identity.

    Args:
        outs: [num_parts, num_tokens, num_q_heads, value_dim], any float dtype and strides.
        lses: [num_parts, num_tokens, num_q_heads] float32, natural log, any strides.
        sinks: [num_q_heads] float32 or None; joins once.

    Returns:
        out [num_tokens, num_q_heads, value_dim] in outs' dtype, lse [num_tokens, num_q_heads] float32.

    Raises:
        TypeError, ValueError: a shape, dtype or device does not fit.
    """
    check_tensors(outs=outs, lses=lses)
    check_optional_tensors(sinks=sinks)
    check_device(outs.device, lses=lses, sinks=sinks)
    if outs.ndim != 4 or lses.shape != outs.shape[:3] or not outs.shape[0]:
        raise ValueError(
            f"outs must be [num_parts >= 1, num_tokens, num_q_heads, value_dim] and lses "
            f"[num_parts, num_tokens, num_q_heads], got {tuple(outs.shape)} and {tuple(lses.shape)}"
        )
    if lses.dtype != torch.float32 or not outs.is_floating_point():
        raise TypeError(f"outs must be float and lses float32, got {outs.dtype} and {lses.dtype}")
    if sinks is not None and (sinks.shape != lses.shape[2:] or sinks.dtype != torch.float32):
        raise ValueError(f"sinks must be float32 [{lses.shape[2]}], got {sinks.dtype} {tuple(sinks.shape)}")
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    parts = State(outs.float(), lses)
    kernels.for_device(outs.device).merge(parts, sinks, State(out, lse))
    return out, lse


def check_run(
    plan: Plan,
    spec: AttentionSpec,
    q: Tensor,
    cache: LayerCache,
    out: Tensor,
    lse: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None = None,
) -> None:
    """Refuse arguments of `run` that do not fit; see there for what they must be."""
    check_tensors(q=q, out=out)
    check_optional_tensors(lse=lse, alibi_slopes=alibi_slopes, sinks=sinks, q_descale=q_descale)
    kv_format = cache.format
    reason = kernels.unsupported(spec, q.device, q.dtype, kv_format=kv_format)
    if reason is not None:
        raise Unsupported(reason)
    _check_rows(plan, spec, q, out, lse)
    _check_cache(plan, spec, cache)
    if kv_format.is_eight_bit:
        _check_scales(cache, kv_format)
        _check_seq_scales(plan, cache, q, q_descale)
    elif q_descale is not None:
        raise Unsupported(f"q_descale belongs to 8-bit tensors, q is {q.dtype}")
    check_device(q.device, out=out, lse=lse, cache=cache.k_cache, plan=plan.positions)
    _check_head_terms(plan, spec, alibi_slopes, sinks, q.device)


def reads_tables(plan: Plan) -> bool:
    """Whether `check_run` compares the plan's tables with the cache: they may have changed since the last layer."""
    return plan.num_blocks is None and plan.check and bool(plan.launches)


def _check_rows(plan: Plan, spec: AttentionSpec, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
    n, heads = plan.num_tokens, spec.num_q_heads
    for name, rows, width in (("q", q, spec.head_dim), ("out", out, spec.v_dim)):
        if rows.ndim != 3 or rows.shape[0] < n or rows.shape[1:] != (heads, width):
            raise ValueError(f"{name} must be [at least num_tokens = {n}, {heads}, {width}], got {tuple(rows.shape)}")
        if rows.stride(-1) != 1 and rows.numel():
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {rows.stride()}")
    if lse is not None and (lse.dtype != torch.float32 or lse.ndim != 2 or lse.shape[0] < n or lse.shape[1] != heads):
        raise ValueError(
            f"lse must be float32 [at least num_tokens = {n}, {heads}], got {lse.dtype} {tuple(lse.shape)}"
        )
    if not out.is_floating_point():
        raise TypeError(f"out must be a float tensor, got {out.dtype}")
    for name, written in (("out", out), ("lse", lse)):
        if written is not None and any(
            size > 1 and stride == 0 for size, stride in zip(written.shape, written.stride(), strict=True)
        ):
            raise ValueError(f"{name} must give every row memory of its own, got strides {written.stride()}")


def _check_cache(plan: Plan, spec: AttentionSpec, cache: LayerCache) -> None:
    for name, pages, width in (("k_cache", cache.k_cache, spec.head_dim), ("v_cache", cache.v_cache, spec.v_dim)):
        if pages.shape[2:] != (spec.num_kv_heads, width):
            raise ValueError(
                f"{name} must be [num_blocks, block_size, {spec.num_kv_heads}, {width}], got {tuple(pages.shape)}"
            )
    if cache.block_size != plan.block_size:
        raise ValueError(f"the cache has block_size {cache.block_size}, the plan was made for {plan.block_size}")
    if plan.num_blocks is not None and cache.num_blocks < plan.num_blocks:
        raise ValueError(f"the cache has {cache.num_blocks} blocks, the plan was made for {plan.num_blocks}")
    if reads_tables(plan):
        kv_lens = plan.launches[-1].kv_splits[:, -1]
        check_block_table(plan.block_table, kv_lens, plan.block_size, cache.num_blocks)


def _check_scales(cache: LayerCache, kv_format: KVFormat) -> None:
    if kv_format.v_scaled_by_channel and cache.v_descale is None:
        raise ValueError(
            f"cache format int8_kv needs V's scales, v_descale float32 "
            f"[{cache.num_kv_heads}, {cache.v_cache.shape[3]}]: {HOW_TO_CALIBRATE}"
        )


def _check_seq_scales(plan: Plan, cache: LayerCache, q: Tensor, q_descale: Tensor | None) -> None:
    """Scales of fp8 must be those of the plan's sequences; q's must belong to an fp8 q."""
    num_seqs = plan.block_table.shape[0]
    if q_descale is not None:
        if q.dtype not in FP8_FORMATS.values():
            raise Unsupported(f"q_descale belongs to 8-bit tensors, q is {q.dtype}")
        if q_descale.dtype != torch.float32 or q_descale.shape not in ((), (num_seqs, cache.num_kv_heads)):
            raise ValueError(
                f"q_descale must be float32 () or ({num_seqs}, {cache.num_kv_heads}), "
                f"got {q_descale.dtype} {tuple(q_descale.shape)}"
            )
        check_device(q.device, q_descale=q_descale)
    if not cache.format.is_fp8:
        return
    for name, descale in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale)):
        if descale is not None and descale.ndim == 2 and descale.shape[0] != num_seqs:
            raise ValueError(f"{name} is for {descale.shape[0]} sequences, the plan has {num_seqs}")


def _check_head_terms(
    plan: Plan, spec: AttentionSpec, alibi_slopes: Tensor | None, sinks: Tensor | None, device: torch.device
) -> None:
    sharded = plan.shard.is_part
    if sharded and sinks is not None:
        raise ValueError("a rank's partial result has no sink; give sinks to merge_states, which reduces the ranks")
    for name, term, wanted in (
        ("alibi_slopes", alibi_slopes, spec.alibi is not None),
        ("sinks", sinks, spec.sinks and not sharded),
    ):
        if (term is not None) != wanted:
            raise ValueError(f"{name} must be {'given' if wanted else 'None'}: the spec says {spec}")
        if term is not None and (
            term.shape != (spec.num_q_heads,) or term.dtype != torch.float32 or term.device != device
        ):
            raise ValueError(
                f"{name} must be float32 [{spec.num_q_heads}] on {device}, "
                f"got {term.dtype} {tuple(term.shape)} on {term.device}"
            )
