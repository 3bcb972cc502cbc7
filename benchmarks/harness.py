"""What the benchmarks share: processes over gloo, alternating measurements, counted collectives,
results as JSON lines.

Machines are shared and noisy, so every figure is a ratio of two things measured in turn in one run,
and a median.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def parser_of(doc: str | None, *, writes: bool = True) -> argparse.ArgumentParser:
    """``doc``: a module's own, printed as it is; ``writes``: with an option for JSON lines."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if writes:
        made.add_argument("--json", help="append the results to this file, as JSON lines")
    return made


def spawn(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run ``function(rank, world_size, *args)`` in gloo processes of one thread each; return rank
    0's result."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, folder, function, args), nprocs=world_size)
        return pickle.loads(Path(folder, "result").read_bytes())


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    result = function(rank, world_size, *args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # the interpreter's shutdown aborts once in a while when torch's threads are on their way out
    os._exit(0)


class Collective(NamedTuple):
    """A call of this rank, as a ring does it: ``messages`` that wait for each other, ``sent``
    bytes in all."""

    name: str
    messages: int
    sent: float


RING: dict[str, Callable[[tuple[Any, ...], int], tuple[int, float]]] = {
    "all_reduce": lambda given, n: (2 * (n - 1), 2 * (n - 1) / n * given[0].nbytes),
    "all_to_all_single": lambda given, n: (n - 1, (n - 1) / n * given[1].nbytes),
    "all_gather_single": lambda given, n: (n - 1, (n - 1) * given[1].nbytes),
    "all_gather_into_tensor": lambda given, n: (n - 1, (n - 1) * given[1].nbytes),
}


@contextmanager
def counted() -> Iterator[list[Collective]]:
    """Every collective that torch.distributed is asked for inside.

    No way of doing one sends less than a ring.
    """
    calls: list[Collective] = []
    real = {name: getattr(dist, name) for name in RING if hasattr(dist, name)}

    def watch(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(
                Collective(name, *RING[name](given, dist.get_world_size(named.get("group"))))
            )
            return real[name](*given, **named)

        return call

    try:
        for name in real:
            setattr(dist, name, watch(name))
        yield calls
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def alternate(
    candidates: dict[str, Callable[[], object]],
    repeats: int,
    *,
    barrier: bool = False,
    warmup: int = 2,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call, all candidates in turn in each round; with ``barrier`` the time until the
    last rank is done."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(-warmup, repeats):
        for name, call in candidates.items():
            if barrier:
                dist.barrier()
            start = clock()
            for _ in range(calls):
                call()
            if barrier:
                dist.barrier()
            if turn >= 0:
                seconds[name].append((clock() - start) / calls)
    return seconds


def alternate_on_cuda(
    candidates: dict[str, Callable[[], object]],
    repeats: int,
    *,
    at_least: float = 0.02,
    at_most: float = 3.0,
) -> dict[str, list[float]]:
    """Seconds per call between two events on the current stream, all candidates in turn in each
    round.

    A round has so many calls of each that they take `at_least` seconds, and five of what is not as
    slow as that: then neither the way to the first launch nor a synchronisation is part of it.
    There are fewer rounds, down to three, where a slow candidate would need more than `at_most`
    seconds.
    """
    calls, rounds = {}, repeats
    for name, call in candidates.items():
        _between_events(call, 2)  # the first may compile
        once = _between_events(call, 3)
        calls[name] = min(2000, max(5 if once < at_least else 1, math.ceil(at_least / once)))
        rounds = max(3, min(rounds, int(at_most / (once * calls[name]))))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            seconds[name].append(_between_events(call, calls[name]))
    return seconds


def _between_events(call: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def summary(seconds: dict[str, list[float]], floor: str) -> dict[str, dict[str, float]]:
    """Median, best, and the median of the round-by-round ratios to ``floor``."""
    return {
        name: {
            "median_ms": 1e3 * statistics.median(times),
            "best_ms": 1e3 * min(times),
            "ratio": statistics.median(a / b for a, b in zip(times, seconds[floor], strict=True)),
        }
        for name, times in seconds.items()
    }


@cache
def commit() -> str | None:
    """The one that is checked out, whatever has been changed since; None outside a repository."""
    try:
        asked = ["git", "rev-parse", "--short=10", "HEAD"]
        return subprocess.run(
            asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def emit(record: dict[str, Any], path: str | None = None) -> None:
    """Print one JSON line, and append it to ``path``."""
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    line = json.dumps({**record, "on": machine | {"commit": commit()}})
    print(line, flush=True)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
