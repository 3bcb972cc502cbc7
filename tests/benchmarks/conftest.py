"""Benchmarks without the processes that they run in."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.evidence import runs


class InThisProcess(nullcontext["InThisProcess"]):
    """A pool of no processes; what would go to one and back is pickled all the same."""

    def __init__(self, jobs: int, context: Any, initializer: Any) -> None:
        super().__init__(self)

    def submit(self, function: Any, **task: Any) -> Future[Any]:
        future: Future[Any] = Future()
        function, task = pickle.loads(pickle.dumps((function, task)))
        future.set_result(pickle.loads(pickle.dumps(function(**task))))
        return future


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes seconds to start."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # and back, afterwards
    monkeypatch.setattr(runs, "ProcessPoolExecutor", InThisProcess)
