"""Who is measured: Octavo, and its peers in the best form that we know of them.

A provider gets a problem, does all that an engine does once a step or less, and returns the call that an engine
makes for every layer. Writing the new K and V into the cache is in nobody's call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.bench import torch_sdpa, vllm_cpu
from octavo.bench.cases import Problem
from octavo.errors import Unsupported
from octavo.launch import Plan
from octavo.planner import Planner
from octavo.run import check_run, run


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute a problem.

    Args:
        name: how the command line and reports call it.
        missing: why it cannot be used in this installation; None: it can.
        unsupported: why it does not compute a problem; None: it does. Asked only if nothing is missing.
        variant: in which form it computes a problem that it supports.
        prepare: makes the call, which returns out [num_tokens, num_q_heads, value_dim] in q's dtype. It is called
            with the number of threads set that the call will have.
    """

    name: str
    missing: Callable[[], str | None]
    unsupported: Callable[[Problem], str | None]
    variant: Callable[[Problem], str]
    prepare: Callable[[Problem], Callable[[], Tensor]]


def octavo_unsupported(problem: Problem) -> str | None:
    """What `run` would refuse."""
    out = _output(problem)
    try:
        check_run(
            _plan(problem),
            problem.spec,
            problem.q,
            problem.cache,
            out,
            None,
            problem.alibi_slopes,
            problem.sinks,
        )
    except Unsupported as error:
        return str(error)
    return None


def octavo_prepare(problem: Problem) -> Callable[[], Tensor]:
    """Timed: `run` on the paged cache, into the same output each time. Before: the plan."""
    plan, out = _plan(problem), _output(problem)

    def call() -> Tensor:
        run(
            plan,
            problem.spec,
            problem.q,
            problem.cache,
            out,
            alibi_slopes=problem.alibi_slopes,
            sinks=problem.sinks,
        )
        return out

    return call


def octavo_variant(problem: Problem) -> str:
    return f"{problem.case.order} pages of {problem.case.block_size}"


def _plan(problem: Problem) -> Plan:
    planner = Planner(
        num_q_heads=problem.spec.num_q_heads,
        value_dim=problem.spec.v_dim,
        block_size=problem.case.block_size,
        num_blocks=problem.cache.num_blocks,
        device=problem.q.device,
    )
    return planner.plan(problem.batch, prefix_levels=[[group] for group in problem.case.shared])


def _output(problem: Problem) -> Tensor:
    """Memory for the output; what nobody writes is not a number, and is found."""
    spec = problem.spec
    return problem.q.new_full((problem.batch.num_tokens, spec.num_q_heads, spec.v_dim), torch.nan)


OCTAVO = Provider("octavo", lambda: None, octavo_unsupported, octavo_variant, octavo_prepare)
TORCH_SDPA = Provider("torch-sdpa", lambda: None, torch_sdpa.unsupported, torch_sdpa.variant, torch_sdpa.prepare)
VLLM_CPU = Provider("vllm-cpu", vllm_cpu.missing, vllm_cpu.unsupported, vllm_cpu.variant, vllm_cpu.prepare)

PROVIDERS: tuple[Provider, ...] = (OCTAVO, TORCH_SDPA, VLLM_CPU)
"""All of them; Octavo first, the others are compared with it."""
