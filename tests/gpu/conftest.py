"""Marks the tests of this folder, and skips them with the reason where they cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hdet import kernels


def why_not(backend: str) -> str | None:
    """None, or why that backend cannot be tested here."""
    if not torch.cuda.is_available():
        return "there is no GPU here"
    state = kernels.available()[backend]
    return None if state == kernels.USABLE else f'backend="{backend}": {state}'


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param
