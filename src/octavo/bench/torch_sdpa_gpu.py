"""PyTorch's scaled_dot_product_attention on a GPU, on keys that are dense already: FlashAttention 2, or cuDNN.

The calls are those of `torch_sdpa`: equal sequences together, the query heads of a KV head as rows where there is one
new row, `is_causal` for whole prompts. What would need a mask of numbers is refused: FlashAttention takes none, and
cuDNN computes what a mask hides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.bench.cases import Problem
from octavo.bench.torch_sdpa import attend, gather, lacking, pieces
from octavo.errors import Unsupported

Kernel = Literal["flash", "cudnn"]

KERNELS: dict[Kernel, SDPBackend] = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def unsupported(problem: Problem) -> str | None:
    reason = lacking(problem)
    if reason is not None:
        return reason
    if any(piece.form == "masked" for piece in pieces(problem.case)):
        return "it would need a mask of numbers: rows see different keys and are no whole prompt"
    if problem.q.device.type != "cuda":
        return f"it is for CUDA devices, the problem is on {problem.q.device}"
    return None


def variant(problem: Problem) -> str:
    return f"dense, {' and '.join(dict.fromkeys(piece.form for piece in pieces(problem.case)))}"


def prepare(kernel: Kernel, problem: Problem) -> Callable[[], Tensor]:
    """Timed: the calls, and copying their outputs together where there are several. Before: gathering K and V.

    Raises:
        Unsupported: torch's kernel does not take these shapes.
    """
    backend = KERNELS[kernel]
    parts = [(piece.rows, piece.form, gather(problem, piece, problem.case.dtype)) for piece in pieces(problem.case)]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            outs = [attend(problem.spec, problem.q[rows], form, operands) for rows, form, operands in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives the reason as warnings, one for each condition
        try:
            call()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise Unsupported(f"torch {torch.__version__} has no {kernel} kernel for it") from error
    return call
