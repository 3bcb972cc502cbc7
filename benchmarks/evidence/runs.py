"""Many runs in a few processes: what is in the file already is skipped, what is new is appended, so
a benchmark can be stopped and started."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..harness import emit

Record = dict[str, Any]
"""a line of the results"""
Task = dict[str, Any]
"""the arguments of a run, which its line repeats"""


def identity(*names: str) -> Callable[[Record | Task], tuple[Hashable, ...]]:
    """What makes two runs the same run: these values of its line, rates to six digits, lists as
    they are printed."""
    return lambda record: tuple(
        f"{value:.6g}"
        if isinstance(value := record[name], float)
        else str(value)
        if isinstance(value, list)
        else value
        for name in names
    )


def finite(loss: float) -> float | None:
    """JSON has no infinity."""
    return loss if math.isfinite(loss) else None


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def read(path: str | None) -> list[Record]:
    """The lines of a results file; none if there is no file yet."""
    return (
        [json.loads(line) for line in Path(path).read_text().splitlines()]
        if path and Path(path).exists()
        else []
    )


def run_missing(
    function: Callable[..., Record],
    tasks: Iterable[Task],
    records: list[Record],
    key: Callable[[Record], Hashable],
    *,
    path: str | None,
    jobs: int,
) -> None:
    """Call ``function(**task)`` for each task that no record stands for, in ``jobs`` processes of
    one thread each.

    ``function`` is a module's own; its result, which must carry the task's key, is printed,
    appended to ``path`` and to ``records``. The first error, Ctrl-C and SIGTERM end the benchmark
    and its processes; what was under way is run again next time.
    """
    done = {key(record) for record in records}
    missing = {key(task): task for task in tasks if key(task) not in done}
    if not missing:
        return
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Kernels read this when they are loaded, in the children.
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _pool(jobs) as pool:
        futures = [pool.submit(function, **task) for task in missing.values()]
        try:
            for future in as_completed(futures):
                records.append(future.result())
                emit(records[-1], path)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _pool(jobs: int) -> Executor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_one_thread)


def _one_thread() -> None:
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends Ctrl-C to all; the parent ends this one
    torch.set_num_threads(1)
