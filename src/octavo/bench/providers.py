"""Who is measured: Octavo, and its peers in the best form that we know of them.

A provider gets a problem, does all that an engine does once a step or less, and returns the call that an engine
makes for every layer. Writing the new K and V into the cache is in nobody's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.bench import flash_attn3, flash_infer, torch_sdpa, torch_sdpa_gpu, vllm_cpu, vllm_triton
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
        layers: the same for some layers of one step: problems of one case, with q, K and V of their own. None: each
            one by itself, because there is nothing that layers share.
        devices: types of the devices that it is measured on.
    """

    name: str
    missing: Callable[[], str | None]
    unsupported: Callable[[Problem], str | None]
    variant: Callable[[Problem], str]
    prepare: Callable[[Problem], Callable[[], Tensor]]
    layers: Callable[[Sequence[Problem]], list[Callable[[], Tensor]]] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")

    def calls(self, problems: Sequence[Problem]) -> list[Callable[[], Tensor]]:
        """The calls of some layers of one step."""
        if self.layers is None or len(problems) == 1:
            return [self.prepare(problem) for problem in problems]
        return self.layers(problems)


def octavo_unsupported(problem: Problem) -> str | None:
    """What `run` would refuse."""
    out = _output(problem)
    try:
        check_run(
            octavo_plan(problem),
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
    return octavo_layer(octavo_plan(problem), problem)


def octavo_layers(problems: Sequence[Problem]) -> list[Callable[[], Tensor]]:
    """The same for layers that share a plan."""
    plan = octavo_plan(problems[0])
    return [octavo_layer(plan, problem) for problem in problems]


def octavo_layer(plan: Plan, problem: Problem) -> Callable[[], Tensor]:
    out = _output(problem)

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


def octavo_planner(problem: Problem) -> Planner:
    return Planner(
        num_q_heads=problem.spec.num_q_heads,
        num_kv_heads=problem.spec.num_kv_heads,
        value_dim=problem.spec.v_dim,
        block_size=problem.case.block_size,
        num_blocks=problem.cache.num_blocks,
        device=problem.q.device,
    )


def octavo_plan(problem: Problem) -> Plan:
    return octavo_planner(problem).plan(problem.batch, prefix_levels=[[group] for group in problem.case.shared])


def _output(problem: Problem) -> Tensor:
    """Memory for the output; what nobody writes is not a number, and is found."""
    spec = problem.spec
    return problem.q.new_full((problem.batch.num_tokens, spec.num_q_heads, spec.v_dim), torch.nan)


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "it needs a CUDA device"


def _flash_infer(form: flash_infer.Form) -> Provider:
    return Provider(
        f"flashinfer-{form}",
        flash_infer.missing,
        partial(flash_infer.unsupported, form),
        partial(flash_infer.variant, form),
        partial(flash_infer.prepare, form),
        layers=partial(flash_infer.prepare_layers, form),
        devices=("cuda",),
    )


def _sdpa_gpu(kernel: torch_sdpa_gpu.Kernel) -> Provider:
    return Provider(
        f"torch-sdpa-{kernel}",
        _no_gpu,
        torch_sdpa_gpu.unsupported,
        torch_sdpa_gpu.variant,
        partial(torch_sdpa_gpu.prepare, kernel),
        devices=("cuda",),
    )


def _flash_attn3(name: str, form: flash_attn3.Form) -> Provider:
    return Provider(
        name,
        flash_attn3.missing,
        partial(flash_attn3.unsupported, form),
        partial(flash_attn3.variant, form),
        partial(flash_attn3.prepare, form),
        devices=("cuda",),
    )


OCTAVO = Provider("octavo", lambda: None, octavo_unsupported, octavo_variant, octavo_prepare, layers=octavo_layers)
TORCH_SDPA = Provider(
    "torch-sdpa",
    lambda: None,
    torch_sdpa.unsupported,
    torch_sdpa.variant,
    torch_sdpa.prepare,
    devices=("cpu",),
)
VLLM_CPU = Provider(
    "vllm-cpu", vllm_cpu.missing, vllm_cpu.unsupported, vllm_cpu.variant, vllm_cpu.prepare, devices=("cpu",)
)
VLLM_TRITON = Provider(
    "vllm-triton",
    vllm_triton.missing,
    vllm_triton.unsupported,
    vllm_triton.variant,
    vllm_triton.prepare,
    layers=vllm_triton.prepare_layers,
    devices=("cuda",),
)

PROVIDERS: tuple[Provider, ...] = (
    OCTAVO,
    TORCH_SDPA,
    VLLM_CPU,
    _flash_infer("tensor-cores"),
    _flash_infer("cuda-cores"),
    _flash_infer("fa2"),
    _flash_infer("fa3"),
    _flash_attn3("fa3", "best"),
    _flash_attn3("fa3-packed", "packed"),
    _sdpa_gpu("cudnn"),
    _sdpa_gpu("flash"),
    VLLM_TRITON,
)
"""All of them; Octavo first, the others are compared with it."""
