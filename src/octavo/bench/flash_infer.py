"""FlashInfer's wrappers over the same pages as Octavo, called as serving engines call them.

Once a step: `plan`, from lengths on the host. For every layer: `run`. FlashInfer compiles a kernel for each
combination of head_dim, dtypes and features when it is first planned, which takes minutes and nvcc.
Written for and tried with FlashInfer 0.6.8.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.bench.cases import Problem
from octavo.bench.installed import version

Form = Literal["tensor-cores", "cuda-cores", "fa2", "fa3"]
"""Its decode wrapper with either kind of kernel, or its prefill wrapper with either backend."""

DECODE: tuple[Form, ...] = ("tensor-cores", "cuda-cores")

HEAD_DIMS = (64, 128, 256)

WORKSPACE_BYTES = 512 << 20
"""Its documentation asks for 128 MB, but 1024 requests can take 335 MB."""


@dataclass(frozen=True, slots=True)
class Pages:
    """A batch's pages as FlashInfer takes them.

    Args:
        starts: [num_seqs + 1] int32 on the host, where each sequence's pages begin in `blocks`.
        blocks: [num_pages] int32 on the device, the sequences' blocks one after the other.
        last: [num_seqs] int32 on the host, keys in each sequence's last page.
        query_starts: [num_seqs + 1] int32 on the host, cumulative new tokens.
    """

    starts: Tensor
    blocks: Tensor
    last: Tensor
    query_starts: Tensor


def missing() -> str | None:
    """Why it cannot be used here; None: it can, as far as one sees without loading it."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; its distribution is flashinfer-python"
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    return None


def unsupported(form: Form, problem: Problem) -> str | None:
    spec, case = problem.spec, problem.case
    if case.dtype not in (torch.bfloat16, torch.float16) or case.cache_dtype not in (None, case.dtype):
        return f"q, K and V must all be bf16 or fp16, they are {case.dtype} and {case.cache_dtype or case.dtype}"
    if case.format.k_scaled_by_row:
        return f"it has no cache format {case.kv_format}"
    if problem.cache.k_descale is not None or problem.cache.v_descale is not None:
        return "it is measured without scales of fp8, of which it has one for a tensor"
    if case.format.is_fp8 and form == "fa3":
        return "its fa3 backend is measured with 16-bit pages"
    if spec.head_dim not in HEAD_DIMS or spec.v_dim != spec.head_dim:
        return f"its head_dim is one of {', '.join(map(str, HEAD_DIMS))} over pages, and value_dim is the same"
    features = {"window to the right": spec.window_right is not None, "ALiBi": spec.alibi is not None}
    for name, wanted in (features | {"sinks": spec.sinks}).items():
        if wanted:
            return f"it is measured without {name}"
    if not all(case.query_lens) or not all(case.seq_lens):
        return "a sequence has no new token or no key"
    if form in DECODE and max(case.query_lens) > 1:
        return "its decode wrapper is for one new token"
    if form not in DECODE and max(case.query_lens) == 1:
        return "its prefill wrapper is measured with more than one new token"
    if problem.q.device.type != "cuda":
        return f"it is for CUDA devices, the problem is on {problem.q.device}"
    if form == "fa3" and torch.cuda.get_device_capability(problem.q.device)[0] != 9:
        return "its fa3 backend is for Hopper"
    return None


def variant(form: Form, problem: Problem) -> str:
    return f"{version('flashinfer-python')} {form}, {problem.case.order} pages of {problem.case.block_size}"


def prepare(form: Form, problem: Problem) -> Callable[[], Tensor]:
    return prepare_layers(form, [problem])[0]


def prepare_layers(form: Form, problems: Sequence[Problem]) -> list[Callable[[], Tensor]]:
    """Timed: `run` on the paged cache, into the same output each time. Before: `plan`, once for all layers."""
    wrapper = planned(form, problems[0])
    return [layer(wrapper, problem) for problem in problems]


def planned(form: Form, problem: Problem) -> Any:
    """A wrapper that has planned a step."""
    pages = pages_of(problem)
    wrapper = make(form, problem)
    plan(form, wrapper, problem, pages)
    return wrapper


def make(form: Form, problem: Problem) -> Any:
    """A wrapper for such steps.

    It is planned for exactly these lengths. Engines that replay graphs with other lengths take the mode for CUDA
    graphs, whose grid does not fit as well: on an H100 it was up to 3 % slower, and 1 x 8k keys on CUDA cores took
    30 us and not 20. (A skewed batch on tensor cores took 926 us and not 1010.)
    """
    module = importlib.import_module("flashinfer")
    order = problem.case.order
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.q.device)
    if form in DECODE:
        return module.BatchDecodeWithPagedKVCacheWrapper(workspace, order, use_tensor_cores=form == "tensor-cores")
    return module.BatchPrefillWithPagedKVCacheWrapper(workspace, order, backend=form)


def plan(form: Form, wrapper: Any, problem: Problem, pages: Pages) -> None:
    """Plan a step; it returns when the plan is made, its copy to the device may still be under way."""
    spec = problem.spec
    shape = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, problem.case.block_size)
    options = {
        "sm_scale": spec.scale,
        "window_left": -1 if spec.window_left is None else spec.window_left,
        "logits_soft_cap": spec.logits_soft_cap,
        "q_data_type": problem.case.dtype,
        "kv_data_type": problem.cache.k_cache.dtype,
    }
    if form in DECODE:
        wrapper.plan(pages.starts, pages.blocks, pages.last, *shape, **options)
    else:
        wrapper.plan(pages.query_starts, pages.starts, pages.blocks, pages.last, *shape, causal=spec.causal, **options)


def pages_of(problem: Problem) -> Pages:
    case, table = problem.case, problem.batch.block_table
    counts = [-(-n // case.block_size) for n in case.seq_lens]
    last = [n - (count - 1) * case.block_size for n, count in zip(case.seq_lens, counts, strict=True)]
    return Pages(
        starts=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        blocks=torch.cat([table[i, :count] for i, count in enumerate(counts)]),
        last=torch.tensor(last, dtype=torch.int32),
        query_starts=torch.tensor([0, *accumulate(case.query_lens)], dtype=torch.int32),
    )


def layer(wrapper: Any, problem: Problem) -> Callable[[], Tensor]:
    """The call of one layer on a planned wrapper."""
    caches = (problem.cache.k_cache, problem.cache.v_cache)
    if problem.case.order == "HND":
        caches = (caches[0].transpose(1, 2), caches[1].transpose(1, 2))
    q = problem.q[: problem.batch.num_tokens]
    out = q.new_full((len(q), problem.spec.num_q_heads, problem.spec.v_dim), torch.nan)

    def call() -> Tensor:
        wrapper.run(q, caches, out=out)
        return out

    return call
