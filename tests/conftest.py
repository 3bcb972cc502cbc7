"""What every test gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

with suppress(ImportError):  # make gpu runs where it may be missing
    from hypothesis import HealthCheck, settings

    settings.register_profile("a busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("a busy machine")


LONGEST = ("kernels/test_shim.py", "cli/test_runs.py", "triton/test_interpreter.py", "cli/test_replay.py", "layouts/test_parallel.py")
"""Half a minute and more each. One of them that begins last keeps a single process busy while the other waits."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; all else in the order in which it stands."""
    items.sort(key=lambda item: not item.nodeid.split("::")[0].endswith(LONGEST))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other. Tests of threads set their own number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of somebody else."""
    file = tmp_path_factory.mktemp("elsewhere") / "file"
    file.write_text("theirs")
    return file
