"""FlashAttention 3 (the distribution `fa3-fwd`) on keys that are dense already.

Its wheel is built without pages, windows and float16. Sequences of equal lengths take its entry for fixed lengths,
which is faster on short prompts, few new tokens its entry for a cache with the schedule made before, and all others
its entry for packed sequences. Written for and tried with fa3-fwd 0.0.3.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.bench.cases import Problem
from octavo.bench.installed import version

Form = Literal["best", "packed"]
"""The best entry for a case, or always that for packed sequences."""

HEAD_DIMS = (64, 96, 128, 192, 256)

FEW_ROWS = 16
"""New tokens up to which the keys are split over the device."""


def missing() -> str | None:
    """Why it cannot be used here; None: it can, as far as one sees without loading it."""
    if importlib.util.find_spec("fa3_fwd") is None:
        return "FlashAttention 3 is not installed; its distribution is fa3-fwd"
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    return None


def unsupported(form: Form, problem: Problem) -> str | None:
    spec, case = problem.spec, problem.case
    if case.dtype != torch.bfloat16 or case.cache_dtype not in (None, case.dtype):
        return f"q, K and V must be bf16, they are {case.dtype} and {case.cache_dtype or case.dtype}"
    if case.format.is_eight_bit:
        return f"it is measured with K and V of 16 bits, not with {case.kv_format}"
    if spec.head_dim not in HEAD_DIMS or spec.v_dim not in (spec.head_dim, 128):
        return f"its head_dim is one of {', '.join(map(str, HEAD_DIMS))}, value_dim the same or 128"
    features = {
        "windows": spec.window_left is not None or spec.window_right is not None,
        "ALiBi": spec.alibi is not None,
        "sinks": spec.sinks,
    }
    for name, wanted in features.items():
        if wanted:
            return f"the wheel has no {name}"
    if form == "packed" and max(case.query_lens) <= FEW_ROWS:
        return "few new tokens are measured with its best entry"
    if problem.q.device.type != "cuda":
        return f"it is for CUDA devices, the problem is on {problem.q.device}"
    if torch.cuda.get_device_capability(problem.q.device)[0] != 9:
        return "it is for Hopper"
    return None


def variant(form: Form, problem: Problem) -> str:
    return f"{version('fa3-fwd')} {_entry(form, problem)}, dense"


def prepare(form: Form, problem: Problem) -> Callable[[], Tensor]:
    """Timed: one call. Before: K and V of the sequences next to each other, and the schedule of few new tokens."""
    module = importlib.import_module("fa3_fwd_interface")
    spec, case = problem.spec, problem.case
    entry = _entry(form, problem)
    q = problem.q[: problem.batch.num_tokens]
    options: dict[str, Any] = {"softmax_scale": spec.scale, "causal": spec.causal}
    if spec.logits_soft_cap is not None:
        options["softcap"] = spec.logits_soft_cap
    if entry == "packed":
        keys, values = torch.cat(problem.keys), torch.cat(problem.values)
        seq_starts = torch.tensor([0, *accumulate(case.seq_lens)], dtype=torch.int32, device=q.device)
        longest = (max(case.query_lens), max(case.seq_lens))
        # 0: it splits the keys as it sees fit.
        options["num_splits"] = 0 if max(case.query_lens) <= FEW_ROWS else 1
        starts = problem.batch.query_start_loc
        return lambda: _first(module.flash_attn_varlen_func(q, keys, values, starts, seq_starts, *longest, **options))
    keys, values = torch.stack(problem.keys), torch.stack(problem.values)
    rows = q.view(len(keys), -1, spec.num_q_heads, spec.head_dim)
    if entry == "fixed":
        return lambda: _first(module.flash_attn_func(rows, keys, values, **options)).flatten(0, 1)
    lens = problem.batch.seq_lens
    schedule = module.get_scheduler_metadata(
        len(keys),
        rows.shape[1],
        keys.shape[1],
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        lens,
        qkv_dtype=case.dtype,
        headdim_v=spec.v_dim,
        causal=spec.causal,
        has_softcap=spec.logits_soft_cap is not None,
    )
    return lambda: _first(
        module.flash_attn_with_kvcache(rows, keys, values, cache_seqlens=lens, scheduler_metadata=schedule, **options)
    ).flatten(0, 1)


def _entry(form: Form, problem: Problem) -> Literal["packed", "fixed", "cache"]:
    case = problem.case
    if form == "packed" or len(set(zip(case.query_lens, case.seq_lens, strict=True))) > 1:
        return "packed"
    return "cache" if max(case.query_lens) <= FEW_ROWS else "fixed"


def _first(result: Any) -> Tensor:
    """Versions differ in whether the softmax sums come with the output."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
