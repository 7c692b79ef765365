"""From a case to a result: the loop over ranks, the cascade, the split, as a test asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import octavo
from conformance.backends import Backend
from octavo import kernels
from octavo.bench.cases import Case, Problem, build
from octavo.launch import Plan
from octavo.planner import Planner, PrefixGroup
from octavo.spec import AttentionSpec, KVShard


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut; the result must not depend on it.

    Args:
        num_splits: parts of every key range; None: the planner's choice.
        cascade: levels of shared prefixes, in lengths that the tables may be unable to share (then less is).
        world, interleave: ranks that hold the keys.
        invariant: the batch-invariant mode (num_splits must be None).
    """

    num_splits: int | None = None
    cascade: tuple[tuple[PrefixGroup, ...], ...] = ()
    world: int = 1
    interleave: int = 1
    invariant: bool = False


WHOLE = Cut()


def solve(
    backend: Backend, case: Case, cut: Cut = WHOLE, *, poison: float = float("nan"), seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of a case under a cut: out [num_tokens, H, value_dim] in its dtype, lse [num_tokens, H], on CPU.

    Each rank gets pages of its own with `poison` in every row that holds no key.
    """
    parts = []
    for rank in range(cut.world):
        problem = build(
            case,
            seed=seed,
            page_seed=rank,
            poison=poison,
            padding_rows=2,
            shard=KVShard(cut.world, rank, cut.interleave),
            device=backend.device,
        )
        parts.append(attend(problem, make_plan(problem, cut)))
    out, lse = over_ranks(parts, problem.sinks)
    return out.to(case.dtype).cpu(), lse.cpu()


def over_ranks(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The reduction over ranks; one rank's result is whole already, and a merge would hide what is wrong with it."""
    if len(parts) == 1:
        return parts[0]
    return octavo.merge_states(*(torch.stack(side) for side in zip(*parts, strict=True)), sinks)


def make_plan(problem: Problem, cut: Cut = WHOLE) -> Plan:
    """The plan of a problem under a cut (whose world the problem's shard must fit)."""
    planner = Planner(
        num_q_heads=problem.spec.num_q_heads,
        value_dim=problem.spec.v_dim,
        block_size=problem.case.block_size,
        num_blocks=problem.cache.num_blocks,
        device=problem.q.device,
        shard=problem.shard,
        batch_invariant=cut.invariant,
        check=True,
    )
    levels = [[replace(group, length=shareable(problem, group)) for group in level] for level in cut.cascade]
    return planner.plan(problem.batch, num_splits=cut.num_splits, prefix_levels=levels)


def attend(problem: Problem, plan: Plan, spec: AttentionSpec | None = None) -> tuple[Tensor, Tensor]:
    """Run a plan on a problem. A rank's partial result is float32; rows that nobody writes would be 99.

    Skips the test where the kernels of this device say that they do not serve the cache's format yet.
    """
    skip_if_unserved(problem)
    spec = problem.spec if spec is None else spec
    sharded = problem.shard.dcp_world > 1
    dtype = torch.float32 if sharded else problem.case.dtype
    rows = problem.q.shape[0]
    out = torch.full((rows, spec.num_q_heads, spec.v_dim), 99.0, dtype=dtype, device=problem.q.device)
    lse = torch.full((rows, spec.num_q_heads), 99.0, device=problem.q.device)
    octavo.run(
        plan,
        spec,
        problem.q,
        problem.cache,
        out,
        lse,
        alibi_slopes=problem.alibi_slopes,
        sinks=None if sharded else problem.sinks,
        q_descale=problem.q_descale,
    )
    n = plan.num_tokens
    assert bool((out[n:] == 99).all()), "a padding row of out was written"
    assert bool((lse[n:] == 99).all()), "a padding row of lse was written"
    assert bool((out[:n][lse[:n] == -torch.inf] == 0).all()), "a row that sees no key has an output"
    return out[:n], lse[:n]


def skip_if_unserved(problem: Problem) -> None:
    """Skip the test if the kernels of the problem's device say that they do not serve an 8-bit format."""
    kv_format = problem.cache.format
    if kv_format.is_eight_bit:
        reason = kernels.unsupported(problem.spec, problem.q.device, problem.q.dtype, kv_format=kv_format)
        if reason is not None:
            pytest.skip(reason)


def shareable(problem: Problem, group: PrefixGroup) -> int:
    """The longest prefix, up to the group's, whose pages this rank's tables share; ends inside a page if it can.

    `build` shares full pages only.
    """
    block_size, local_count = problem.case.block_size, problem.shard.local_count
    full = local_count(group.length) // block_size
    fits = [n for n in range(group.length + 1) if -(-local_count(n) // block_size) <= full]
    return max((n for n in fits if n % block_size), default=max(fits))


def seen_slots(problem: Problem) -> Tensor:
    """[num_blocks, block_size] bool: the rows of the cache that some query of the batch sees, key by key."""
    spec, batch = problem.spec, problem.batch
    seen = torch.zeros(problem.cache.num_blocks, problem.case.block_size, dtype=torch.bool)
    table = batch.block_table.tolist()
    for i, (q_len, seq_len) in enumerate(zip(problem.case.query_lens, problem.case.seq_lens, strict=True)):
        for position in range(seq_len - q_len, seq_len):
            for local in range(problem.shard.local_count(seq_len)):
                j = problem.shard.global_position(local)
                if visible(spec, position, j, seq_len):
                    block = table[i][local // problem.case.block_size]
                    seen[block, local % problem.case.block_size] = True
    return seen


def visible(spec: AttentionSpec, position: int, j: int, seq_len: int) -> bool:
    """The mask as SPEC section 1 words it, one key at a time; shares nothing with `AttentionSpec.bounds`."""
    return (
        0 <= j < seq_len
        and (not spec.causal or j <= position)
        and (spec.window_left is None or j >= position - spec.window_left)
        and (spec.window_right is None or j <= position + spec.window_right)
    )


def rows_of(case: Case) -> Iterator[tuple[int, int, int]]:
    """(sequence, position, number of keys) of every query row, in order."""
    for i, (q_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for position in range(seq_len - q_len, seq_len):
            yield i, position, seq_len


def groups(*groups: tuple[Sequence[int], int]) -> tuple[PrefixGroup, ...]:
    """Prefix groups from (sequences, length) pairs."""
    return tuple(PrefixGroup(tuple(seqs), length) for seqs, length in groups)
