"""Skips the tests of this folder, with the reason, where they cannot run."""

from __future__ import annotations

import pytest

from ..kernels.cases import why_not


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param
