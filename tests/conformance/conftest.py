"""Every test that takes `backend` runs once per kernel family."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import octavo.kernels.cpu
from conformance.backends import BACKENDS, Backend


@pytest.fixture(
    scope="module",  # not longer: tests elsewhere must not run without Numba
    params=[pytest.param(b, marks=[pytest.mark.gpu] if b.device == "cuda" else []) for b in BACKENDS],
    ids=[b.name if b.numba else f"{b.name} without numba" for b in BACKENDS],
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.param.numba:
            patch.setattr(octavo.kernels.cpu, "HAS_NUMBA", False)
        yield request.param
