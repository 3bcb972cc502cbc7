"""What every test gets."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # read as torch is loaded: threads that spin while they wait take the time of other tests
import torch

with suppress(ImportError):  # make gpu runs where it may be missing
    from hypothesis import HealthCheck, settings

    # In CI the examples are always the same; HDET_ADVERSARY=1 draws others (CONTRIBUTING.md).
    settings.register_profile(
        "a busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow],
        derandomize="HDET_ADVERSARY" not in os.environ,
    )  # fmt: skip
    settings.load_profile("a busy machine")


LONGEST = [
    "kernels/test_shim.py",
    "triton/test_interpreter.py",
    "triton/test_compiled.py",
    "kernels/test_step.py",
    "trial/test_no_trace.py",
    "trial/test_arms.py",
    "examples/test_bytes.py",
    "trial/test_layouts.py",
    "faults/test_lost.py",
    "checkpoint/test_resume.py",
    "cli/test_report.py",
]
"""A quarter of a minute and more each, the longest first.

One of them that begins last keeps a single process busy while the others wait.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, which --no-loadscope-reorder leaves so; all else in the order in
    which it stands."""
    place = {f"tests/{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    """A million objects are there for good: the collector does not go through them in each test."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # for the modules that look for leaks as the process ends


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other.

    Tests of threads set their own number.
    """
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
