"""Lets kernels compile before the first request: one small step for each kernel that serving can reach.

Triton's attention is compiled on several threads first, then each step runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.batch import AttentionBatch
from octavo.cache import LayerCache
from octavo.launch import Operands, Plan, State
from octavo.planner import INVARIANT_SPLIT, MAX_PIECE_SEQS, Planner
from octavo.run import append, run
from octavo.spec import AttentionSpec

CPU_QUERY_LENS = (1, 32)
"""New tokens of the sequences that the CPU's kernels are compiled with: decode and prefill."""

MANY_ROWS = 512
"""New tokens past which a sequence is only more of the same tiles."""


class Step(NamedTuple):
    """A step to run: one sequence with query_len new tokens, the others with one; all have seq_len keys or more."""

    num_seqs: int
    query_len: int
    seq_len: int
    prefix_len: int = 0


@torch.no_grad()
def warm_up(
    planner: Planner,
    spec: AttentionSpec,
    cache: LayerCache,
    dtype: torch.dtype,
    *,
    max_num_seqs: int,
    max_seq_len: int,
    prefixes: bool = False,
    lse: bool = False,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> int:
    """Compile every kernel that steps of a layer can reach, with q, k, v and out contiguous and of one dtype.

    Steps run on page 0, which they read and do not write.

    Args:
        planner: as it will plan.
        spec: the layer.
        cache: its pages, at least one.
        dtype: of q, new keys and values, and out.
        max_num_seqs, max_seq_len: of the steps to come.
        prefixes: plans will have shared prefixes.
        lse: steps will want their LSE.
        alibi_slopes: as for `run`.
        sinks: [num_q_heads] float32, given iff spec.sinks.

    Returns:
        The number of steps that ran.

    Raises:
        Unsupported: no kernels serve the layer.
    """
    device = cache.k_cache.device
    layer = _Layer(spec, cache, dtype, alibi_slopes, None if planner.shard.is_part else sinks, lse)
    todo = list(steps(planner, device, max_num_seqs, max_seq_len, prefixes))
    if planner.on_device(device):
        todo = _compile_ahead(planner, layer, todo)
    for step in todo:
        layer.serve(_plan(planner, step, device))
    return len(todo)


def _compile_ahead(planner: Planner, layer: _Layer, todo: Sequence[Step]) -> list[Step]:
    """Compile attention for all steps, and return those that reach a kernel which the others before do not."""
    from octavo.kernels import triton

    device = layer.cache.k_cache.device
    seen: set[object] = set()
    kept: list[Step] = []
    calls: list[triton.Call] = []
    # Of the largest step: they live until all is compiled, when an engine may have taken most of the memory.
    operands, state = layer.tensors(max((step.num_seqs - 1 + step.query_len for step in todo), default=0))
    for step in todo:
        plan = _plan(planner, step, device)
        reached = {(triton.variant(layer.spec, plan, x, operands), plan.num_states > 1) for x in plan.launches}
        if reached <= seen:
            continue
        seen |= reached
        kept.append(step)
        for launch in plan.launches:
            if plan.num_states > 1:
                parts = plan.workspace.states(plan.num_states, plan.num_tokens, *state.out.shape[1:])
                call = triton.call_of(layer.spec, plan, launch, operands._replace(sinks=None), launch.part_of(parts))
            else:
                call = triton.call_of(layer.spec, plan, launch, operands, state)
            if call is not None:
                calls.append(call)
    triton.compile_ahead(device, calls)
    return kept


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with zeros for all that a step brings; arguments as for `warm_up`."""

    spec: AttentionSpec
    cache: LayerCache
    dtype: torch.dtype
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    lse: bool

    def tensors(self, num_rows: int) -> tuple[Operands, State]:
        """What `run` hands to kernels, for steps of at most so many rows."""
        spec = self.spec
        q, out = (self._zeros(num_rows, spec.num_q_heads, width) for width in (spec.head_dim, spec.v_dim))
        lse = torch.empty(num_rows, spec.num_q_heads, device=q.device) if self.lse else None
        return Operands(q, self.cache, self.alibi_slopes, self.sinks), State(out, lse)

    def serve(self, plan: Plan) -> None:
        """Write to no slot and attend to what the pages hold."""
        assert plan.slot_mapping is not None
        spec, ((q, cache, slopes, sinks, _), (out, lse)) = self.spec, self.tensors(plan.num_tokens)
        k, v = (self._zeros(plan.num_tokens, spec.num_kv_heads, width) for width in (spec.head_dim, spec.v_dim))
        append(cache, k, v, plan.slot_mapping)
        run(plan, spec, q, cache, out, lse, alibi_slopes=slopes, sinks=sinks)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.cache.k_cache.device)


def steps(
    planner: Planner, device: torch.device, max_num_seqs: int, max_seq_len: int, prefixes: bool
) -> Iterator[Step]:
    """Steps among which there is one for every kernel."""
    if not planner.on_device(device):
        yield from (Step(1, n, n) for n in CPU_QUERY_LENS)
        return
    powers = [1 << i for i in range(MANY_ROWS.bit_length())]
    query_lens = sorted({n for n in (*range(1, 17), *powers, *(p + 1 for p in powers)) if n <= max_seq_len})
    whole_runs = planner.shard.dcp_world * planner.shard.interleave  # of tokens, so that each rank holds some
    two_splits = min(max_seq_len, 2 * INVARIANT_SPLIT * whole_runs)
    for num_seqs in (1, MAX_PIECE_SEQS + 1):
        for query_len in query_lens if num_seqs <= max_num_seqs else ():
            yield Step(num_seqs, query_len, query_len)
            if planner.batch_invariant:
                yield Step(num_seqs, query_len, max(query_len, two_splits))
    if prefixes and max_num_seqs > 1:
        shared = (INVARIANT_SPLIT if planner.batch_invariant else 1) * whole_runs
        yield from (Step(2, query_len, shared + query_len, shared) for query_len in query_lens)


def _plan(planner: Planner, step: Step, device: torch.device) -> Plan:
    query_lens = [step.query_len] + [1] * (step.num_seqs - 1)
    blocks = -(-step.seq_len // planner.block_size)
    table = torch.zeros(step.num_seqs, blocks, dtype=torch.int32)
    slots = torch.full((sum(query_lens),), -1)
    seq_lens = [step.seq_len] * step.num_seqs
    batch = AttentionBatch.from_lengths(query_lens, seq_lens, table, slot_mapping=slots, device=device)
    return planner.plan(batch, common_prefix_len=step.prefix_len)
