"""What tests of several files here ask for."""

from __future__ import annotations

import pytest

from hdet.optim import moment_storage


@pytest.fixture
def small_tensors_have_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 500 elements, as the matrix of `common.parameters`."""
    monkeypatch.setattr(moment_storage, "SMALLEST", 500)
