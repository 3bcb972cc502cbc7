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

    # In CI the examples are always the same; HDET_ADVERSARY=1 draws others (docs/promises.md).
    settings.register_profile(
        "a busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow],
        derandomize="HDET_ADVERSARY" not in os.environ,
    )  # fmt: skip
    settings.load_profile("a busy machine")


SLOW = (
    "kernels/test_shim.py",
    "triton/",
    "build/",
    "adversary/",
    "faults/",
    "optim/test_dtensor.py",
    "optim/test_release.py::test_sharded",
    "checkpoint/test_folder.py::test_every_rank_raises_the_same_error",
    "checkpoint/test_layouts.py::test_shards_are_cut_anew",
    "checkpoint/test_resume.py::test_resumed_run_is_the_same_run[hsdp-FusedEightBit",
    "checkpoint/test_resume.py::test_resumed_run_is_the_same_run[shards",
    "converge/test_ways.py::test_the_average_is_right_and_the_same_everywhere[4-bf16",
    "converge/test_ways.py::test_the_average_is_right_and_the_same_everywhere[4-int8",
    "converge/test_local_phases.py::test_a_run_resumes_bitwise_in_both_phases",
    "ensemble/test_agreement.py::test_what_differs_is_named",
    "ensemble/test_agreement.py::test_what_may_differ_is_let_pass",
    "trial/test_layouts.py",
    "trial/test_no_trace.py::test_under_ddp",
    "benchmarks/",
    "cli/test_report.py::test_any",
    "cli/test_report.py::test_what_is_accepted",
    "knobs/test_forward_knobs.py::test_four_processes",
    "ensemble/test_four_groups.py",
    "layouts/test_parallel.py",
    "gpu/",
    "test_rooms.py",
)
"""Folders, files and tests (by how their names begin) for `make test-all`, the longest first: what
compilers, sanitizers and interpreters prove, long searches for examples, shards of several
processes, killed ones, and benchmarks; and what `make gpu` runs."""


def _repeats(test: str, case: set[str]) -> bool:
    """Does a parametrised test of optim/, but for test_against_torch.py, run here on a rule that is
    another's but for its formula, or on the torch backend with any rule but AdamW? kernels/ has all
    formulas on all backends."""
    if not test.startswith("optim/") or "against_torch" in test:
        return False
    is_like_another = not case.isdisjoint({"nadamw", "mars", "cautious_lion"})
    return is_like_another or ("torch" in case and "adamw" not in case)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `make test` leaves out as a whole is not even imported: that takes a tenth of its
    time."""
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    name += "/" if collection_path.is_dir() else ""
    return True if config.option.markexpr == "not slow" and name.startswith(SLOW) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow, and puts it first, which --no-loadscope-reorder leaves so: a long file
    that begins last keeps a single process busy while the others wait."""

    def place_of(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((i for i, prefix in enumerate(SLOW) if name.startswith(prefix)), len(SLOW))

    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").rstrip("]").partition("[")
        if place_of(item) < len(SLOW) or _repeats(test, set(case.split("-"))):
            item.add_marker("slow")
    items.sort(key=place_of)


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
