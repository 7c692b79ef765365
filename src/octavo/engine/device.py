"""Where a model runs if nobody says."""

from __future__ import annotations

import warnings

import torch

from octavo.backend import Backend
from octavo.spec import AttentionSpec


def best_device() -> torch.device:
    """A GPU if there is one whose attention can be served, else the CPU; a GPU that cannot be served is named."""
    gpu = torch.device("cuda")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    reason = Backend.supports(spec=AttentionSpec(1, 1, 64), dtype=torch.float16, device=gpu)
    if reason is None:
        return gpu
    warnings.warn(f"the model runs on the CPU: {reason}", RuntimeWarning, stacklevel=2)
    return torch.device("cpu")
