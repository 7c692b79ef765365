"""Every test that takes `backend` runs once per kernel family."""

from __future__ import annotations

import pytest

from conformance.backends import BACKENDS, Backend


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param
