"""The command behind `make gpu`: runs every GPU test, times every operation on CUDA and Triton, prints one table and writes a file.

    python benchmarks/gpu.py [--minutes 6.5] [--no-tests] [--dry-run]

Needs a GPU and fails at once where there is none. Nothing is fetched from anywhere. What the time does not allow is named and makes
the exit status 1, as does a test that fails. --dry-run goes the same way on the CPU with small tensors, to try the command itself.
Records are those of step.py, replicas.py and average.py (see compare.py), in benchmarks/results/<device>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import average
import compare
import replicas
import step

from hdet import kernels

BENCHMARKS = {"step": step, "replicas": replicas, "average": average}
COLUMNS = {
    "operation": "{:<58.58}",
    "shapes": "{:<16.16}",
    "backend": "{:<7}",
    "hdet_ms": "{:>9}",
    "torch_ms": "{:>9}",
    "ratio": "{:>6}",
    "gb_s": "{:>8}",
    "of_copy": "{:>8}",
    "launches": "{:>8}",
    "host_us": "{:>8}",
}
TINY: dict[str, Any] = {
    "GPT-2 124M": lambda: [(1 << 19,), (8,)],
    "10 000 x 1 000": lambda: [(1 << 14,)] * 32,
    "one of 2^27": lambda: [(1 << 19,)],
}


class Budget:
    """Seconds left of the minutes that the command may take."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu dry run"


def run_tests(device: str, budget: Budget) -> dict[str, Any]:
    """Every test marked gpu, in a process of its own."""
    folders = [
        str(path) for path in (ROOT / "tests").iterdir() if path.name in ("gpu", "kernels", "optim", "triton", "converge", "ensemble")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *folders]
    if device == "cpu":
        command += ["--collect-only"]
    start = time.monotonic()
    print(f"tests: {' '.join(command[1:])}", flush=True)
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=max(1.0, budget.left))
        output, status = result.stdout + result.stderr, result.returncode
    except subprocess.TimeoutExpired as expired:
        output, status = f"{expired.stdout!r}\nstopped: no time was left", 1
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)", output)}
    good = status == 0 and (device == "cpu" or counts.get("passed", 0) > 0)
    print(output[-6000:] if not good else f"tests: {counts}", flush=True)
    return {"passed": good, "counts": counts, "seconds": round(time.monotonic() - start, 1)}


def run_benchmarks(device: str, budget: Budget) -> tuple[list[dict[str, Any]], list[str]]:
    """(records, what there was no time for or what failed): the native backend first, then Triton with fewer shapes and rounds."""
    records, missing = [], []
    backends = [("auto", False), ("triton", True)] if device == "cuda" else [("auto", True)]
    for backend, quick in backends:
        state = kernels.available()["triton"] if backend == "triton" else kernels.USABLE
        for name, module in BENCHMARKS.items():
            if state != kernels.USABLE:
                missing.append(f"{name} on {backend}: {state}")
            elif budget.left < 2:
                missing.append(f"{name} on {backend}: no time was left")
            else:
                done, reason = _run(module, device, backend, quick, budget.left)
                records += done
                missing += [f"{name} on {backend}: {reason}"] if reason else []
    return records, missing


def _run(module: Any, device: str, backend: str, quick: bool, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Records as they were printed, so that those before a failure are kept; and the failure. It is stopped after `seconds`."""
    lines, reason, start = io.StringIO(), "", time.monotonic()
    signal.signal(signal.SIGALRM, _out_of_time)
    with contextlib.redirect_stdout(lines):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            module.run(device, backend, quick)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and the next benchmark runs
            reason = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    compare.free()
    records = [json.loads(line) for line in lines.getvalue().splitlines() if line.startswith("{")]
    print(f"{module.__name__} on {backend}: {len(records)} records in {time.monotonic() - start:.1f} s {reason}", flush=True)
    return records, reason


def _out_of_time(*_: object) -> None:
    raise TimeoutError("stopped in the middle, no time was left")


def table(records: list[dict[str, Any]]) -> str:
    head = "  ".join(form.format(name) for name, form in COLUMNS.items())
    lines = ["  ".join(form.format(str(record.get(name, ""))) for name, form in COLUMNS.items()) for record in records]
    return "\n".join([head, "-" * len(head), *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.5, help="for tests and benchmarks together, without the build")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small tensors")
    arguments = parser.parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"make gpu: torch {torch.__version__} finds no GPU here (torch.cuda.is_available() is False); nothing was run")
        kernels.select("cuda", torch.device("cuda"))  # says why where it is not usable
    else:
        compare.SHAPES.clear()
        compare.SHAPES.update(TINY)
    budget = Budget(arguments.minutes)
    print(f"{device_name(device)}, torch {torch.__version__}: {kernels.available()}", flush=True)
    # Benchmarks first: a test that hangs then costs no figure.
    records, missing = run_benchmarks(device, Budget(arguments.minutes * 0.6))
    tests = None if arguments.no_tests else run_tests(device, budget)
    print(table(records), flush=True)
    for what in missing:
        print(f"MISSING  {what}")
    result = {"device": device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda, "tests": tests, "missing": missing}
    path = ROOT / "benchmarks" / "results" / f"{re.sub(r'[^a-z0-9]+', '-', device_name(device).lower())}.json"
    if device == "cuda":
        path.write_text(json.dumps({**result, "records": records}, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")
    good = not missing and records and (tests is None or tests["passed"])
    print("make gpu: all done" if good else "make gpu: NOT everything passed", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
