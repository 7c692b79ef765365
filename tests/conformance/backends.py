"""The kernel families under test. One line here runs the whole suite over a new one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel family.

    Args:
        name: as `paged_attention(backend=...)` knows it.
        device: where its tensors live; on "cuda" its tests are marked gpu.
        numba: whether the CPU family may use Numba; without it everything runs in PyTorch.
    """

    name: str
    device: str
    numba: bool = True


BACKENDS = (
    Backend("cpu", device="cpu"),
    Backend("cpu", device="cpu", numba=False),
    Backend("triton", device="cuda"),
)
