"""`append`, `run` and `merge_states` as operators of PyTorch, for `torch.compile` and exported graphs.

An operator takes tensors and numbers only, so `attend` spreads a plan over them: what changes from step to step
is a tensor or an int (which compiled graphs keep symbolic), what a layer is stays a constant. Outside compiled
graphs the plain functions say the same and cost less on the host.

K, V and their scales share memory and are all written, which AOTAutograd takes if none names another's base
(`PageLayout` sees to that; under inference mode all views are so) and if the number of blocks does not change between
calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.cache import LayerCache
from octavo.launch import Launch, Plan, Workspace
from octavo.run import append as plain_append
from octavo.run import merge_states as plain_merge_states
from octavo.run import run as plain_run
from octavo.spec import AttentionSpec, KVShard


def append(cache: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """`octavo.append` as one node of a graph; same arguments and errors."""
    scales = cache.k_descale, cache.v_descale
    in_pages, static = zip(*((x, None) if x is not None and x.ndim == 3 else (None, x) for x in scales), strict=True)
    _append(cache.k_cache, cache.v_cache, *in_pages, *static, k, v, slot_mapping)


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
    """`octavo.run` as one node of a graph; same arguments and errors.

    A graph is traced again when the number of launches changes, or which of their tensors are absent; not
    when lengths or splits do.
    """
    launches = plan.launches
    _attend(
        q,
        cache.k_cache,
        cache.v_cache,
        cache.k_descale,
        cache.v_descale,
        out,
        lse,
        alibi_slopes,
        sinks,
        q_descale,
        spec.scale,
        spec.causal,
        spec.window_left,
        spec.window_right,
        spec.logits_soft_cap,
        spec.alibi,
        plan.positions,
        plan.seq_lens,
        plan.block_table,
        [launch.query_start_loc for launch in launches],
        [launch.kv_splits for launch in launches],
        [launch.rows for launch in launches],
        [launch.seqs for launch in launches],
        [launch.first_state for launch in launches],
        [plan.num_tokens if x.max_query_len is None else x.max_query_len for x in launches],
        [launch.pieces for launch in launches],
        [launch.tickets for launch in launches],
        plan.num_states,
        plan.shard.dcp_world,
        plan.shard.dcp_rank,
        plan.shard.interleave,
        plan.batch_invariant,
    )


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`octavo.merge_states` as one node of a graph; same arguments, results and errors."""
    out, lse = _merge(outs, lses, sinks)
    return out, lse


@torch.library.custom_op("octavo::append", mutates_args=("k_cache", "v_cache", "k_scales", "v_scales"))
def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Scales in the pages are written, static ones read."""
    k_descale, v_descale = k_descale if k_scales is None else k_scales, v_descale if v_scales is None else v_scales
    plain_append(LayerCache(k_cache, v_cache, k_descale, v_descale), k, v, slot_mapping)


@torch.library.custom_op("octavo::merge", mutates_args=())
def _merge(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> list[Tensor]:
    return list(plain_merge_states(outs, lses, sinks))


@torch.library.custom_op("octavo::attend", mutates_args=("out", "lse"))
def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    logits_soft_cap: float | None,
    alibi: str | None,
    positions: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    query_start_locs: Sequence[Tensor],
    kv_splits: Sequence[Tensor],
    rows: Sequence[Tensor | None],
    seqs: Sequence[Tensor | None],
    first_states: Sequence[int],
    max_query_lens: Sequence[int],
    pieces: Sequence[Tensor | None],
    tickets: Sequence[Tensor | None],
    num_states: int,
    dcp_world: int,
    dcp_rank: int,
    interleave: int,
    batch_invariant: bool,
) -> None:
    """A plan and a spec put together again, and run. Partial results live as long as the call."""
    spec = AttentionSpec(
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        value_dim=v_cache.shape[3],
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        alibi=alibi,  # type: ignore[arg-type]  # an operator knows no Literal
        sinks=sinks is not None,
    )
    columns = zip(query_start_locs, kv_splits, first_states, rows, seqs, max_query_lens, pieces, tickets, strict=True)
    workspace = Workspace(q.device)
    workspace.reserve(num_states, positions.shape[0], spec.num_q_heads, spec.v_dim)
    plan = Plan(
        launches=tuple(Launch(*column) for column in columns),
        positions=positions,
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=None,
        num_states=num_states,
        block_size=k_cache.shape[1],
        num_blocks=k_cache.shape[0],
        workspace=workspace,
        shard=KVShard(dcp_world, dcp_rank, interleave),
        batch_invariant=batch_invariant,
    )
    cache = LayerCache(k_cache, v_cache, k_descale, v_descale)
    plain_run(plan, spec, q, cache, out, lse, alibi_slopes=alibi_slopes, sinks=sinks, q_descale=q_descale)


@_append.register_fake
def _(*operands: object) -> None:
    """Writes in place, returns nothing."""


@_merge.register_fake
def _(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(outs[0]), torch.empty_like(lses[0])]


@_attend.register_fake
def _(*operands: object) -> None:
    """Writes in place, returns nothing."""
