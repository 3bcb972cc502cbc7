"""Skips the tests of this folder, with the reason, where they cannot run."""

from __future__ import annotations

import pytest
import torch

from hdet import kernels


def why_not(backend: str) -> str | None:
    """None, or why that backend cannot be tested here."""
    if not torch.cuda.is_available():
        return "there is no GPU here"
    state = kernels.available()[backend]
    return None if state == kernels.USABLE else f'backend="{backend}": {state}'


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param
