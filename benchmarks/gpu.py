"""The command behind `make gpu`: times every operation on CUDA and Triton, trains the main job,
runs every GPU test, prints one table and writes a file.

    python -m benchmarks.gpu [--minutes 6.5] [--results FOLDER] [--no-tests] [--dry-run]

Needs a GPU and fails at once where there is none. Nothing is fetched from anywhere. What the time
does not allow is named and makes the exit status 1, as does a test that fails; the last line and
"good" in the file say the same, for a pipe hides a status unless the shell is told otherwise (set
-o pipefail; make gpu 2>&1 | tee log). --dry-run goes the same way on the CPU with small tensors, to
try the command itself. Records are those of step.py, muon.py, average.py and replicas.py (see
compare.py).

The file is benchmarks/results/<device>.json. What grows while the command runs is in build/gpu:
records.jsonl has each figure from the moment it is measured, job.log is the main job's output and
tests.log pytest's. From a machine that is remote, or does not last, copy them: scp
machine:hdet/benchmarks/results/*.json benchmarks/results/. Where a folder there is brought back by
itself, name it, make gpu RESULTS=FOLDER: these three grow there instead, and the file of results is
copied into it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch

from hdet import kernels

from . import average, compare, muon, replicas, step

ROOT = Path(__file__).resolve().parents[1]
GROWING = ROOT / "build" / "gpu"
GRACE = 15.0
"""seconds until what was killed, or should have ended, is given up: a process that hangs in the
driver cannot be killed"""
WORKERS = max(2, min(12, (os.cpu_count() or 2) - 2))
"""processes that share the GPU: what takes long is compiling for Triton"""
BENCHMARKS = {"step": step, "muon": muon, "average": average, "replicas": replicas}
"""in this order: the last one has most records, and is cut short where time is"""
JOB = ("examples.bytes", "--compare", "--coresident", "4", "--overwrite")
JOB_STEPS = {"cuda": 400, "cpu": 50}
"""in place of 2000: enough to see that it trains"""
JOB_SECONDS = 60.0
COLUMNS = {
    "operation": "{:<58.58}",
    "shapes": "{:<16.16}",
    "backend": "{:<7}",
    "hdet_ms": "{:>9}",
    "torch_ms": "{:>9}",
    "ratio": "{:>6}",
    "bound": "{:>5}",
    "alone_ms": "{:>9}",
    "gb_s": "{:>8}",
    "of_copy": "{:>8}",
    "cache": "{:>5}",
    "launches": "{:>8}",
    "host_us": "{:>8}",
}
TINY: dict[str, Any] = {
    "GPT-2 124M": lambda: [(1 << 19,), (8,)],
    "10 000 x 1 000": lambda: [(1 << 14,)] * 32,
    "one of 2^27": lambda: [(1 << 19,)],
}
TINY_MUON = {"width": 64, "blocks": 2, "tokens": 0}


class Budget:
    """Seconds left of the minutes that the command may take."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu dry run"


class Records(io.TextIOBase):
    """Where benchmarks print to.

    Each record is in the file before the next is measured: it outlives the machine.
    """

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self._file = path.open("w", encoding="utf-8")
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.startswith("{"):
                self.records.append(json.loads(line))
                self._file.write(line + "\n")
                self._file.flush()
                os.fsync(self._file.fileno())
        return len(text)


def run_tests(device: str, budget: Budget, log: Path) -> dict[str, Any]:
    """Every test marked gpu, in processes of their own; those marked alone after the others, one at
    a time."""
    names = ("gpu", "kernels", "optim", "triton", "converge", "ensemble")
    folders = [f"tests/{name}" for name in names if (ROOT / "tests" / name).exists()]
    several = (
        ["-n", str(WORKERS), "--dist", "loadgroup"]
        if device == "cuda" and importlib.util.find_spec("xdist")
        else []
    )
    start, counts, good = time.monotonic(), dict[str, int](), True
    log.write_text("")
    for arguments in (["gpu and not alone", *several], ["gpu and alone"]):
        status, output = run_pytest(
            [*arguments, *folders, *(["--collect-only"] if device == "cpu" else [])], budget, log
        )
        for count, name in re.findall(
            r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)", output
        ):
            counts[name] = counts.get(name, 0) + int(count)
        good = good and status == 0
        if status != 0:
            print(output[-6000:], flush=True)
    good = good and (device == "cpu" or counts.get("passed", 0) > 0)
    print(f"tests: {counts}, output in {log}", flush=True)
    return {"passed": good, "counts": counts, "seconds": round(time.monotonic() - start, 1)}


def run_pytest(arguments: list[str], budget: Budget, log: Path) -> tuple[int, str]:
    """(exit status, output), which goes to a file, so that it is there when the time is over.

    `arguments`: the marks first.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        *arguments,
    ]
    print(f"tests: {' '.join(command[1:])}", flush=True)
    before = log.stat().st_size
    with log.open("ab") as file:
        status = run_bounded(command, file, max(1.0, budget.left))
    return status, log.read_bytes()[before:].decode(errors="replace")


def run_job(device: str, budget: Budget, log: Path) -> dict[str, Any]:
    """examples.bytes with co-resident replicas on the device, beside the fixed schedule."""
    start = time.monotonic()
    command = [
        sys.executable,
        "-m",
        *JOB,
        "--steps",
        str(JOB_STEPS[device]),
        "--device",
        device,
        "--out",
        str(GROWING / "job"),
    ]
    print(f"job: {' '.join(command[1:])}", flush=True)
    with log.open("wb") as file:
        status = run_bounded(command, file, max(1.0, min(JOB_SECONDS, budget.left)))
    output = log.read_text(errors="replace")[-3000:]
    print(output if status else f"job: done, output in {log}", flush=True)
    return {"passed": status == 0, "seconds": round(time.monotonic() - start, 1), "output": output}


def run_bounded(command: list[str], log: IO[bytes], seconds: float) -> int:
    """The command's exit status; 1 where it takes longer.

    It is interrupted then, so that pytest says what has failed so far, and killed with all its
    processes. Does not wait for what cannot be killed."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    log.write(b"\nstopped: no time was left\n")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its workers are in its session
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        log.write(
            f"process {process.pid} hangs, in the driver perhaps, and was left behind\n".encode()
        )
    return 1


def run_benchmarks(
    device: str, budget: Budget, records: Records
) -> tuple[list[dict[str, Any]], list[str]]:
    """(records, what there was no time for or what failed): the native backend first, then Triton
    with fewer shapes and rounds.

    Launches are counted when all else is done: a process that was profiled once is slower from then
    on.
    """
    missing = []
    backends = [("auto", False), ("triton", True)] if device == "cuda" else [("auto", True)]
    for counting in (False, True) if device == "cuda" else (False,):
        for backend, quick in backends:
            state = kernels.available()["triton"] if backend == "triton" else kernels.USABLE
            for name, module in BENCHMARKS.items():
                what = f"{'launches of ' if counting else ''}{name} on {backend}"
                if state != kernels.USABLE:
                    missing.append(f"{what}: {state}")
                elif budget.left < 2:
                    missing.append(f"{what}: no time was left")
                else:
                    reason = run_benchmark(
                        module,
                        compare.Options(device, backend, quick, counting),
                        budget.left,
                        records,
                    )
                    missing += [f"{what}: {reason}"] if reason else []
    return with_launches(records.records), missing


def with_launches(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The timed records, each with the launches that were counted for its operation."""
    counted = {
        (r["operation"], r["backend"]): r["launches"]
        for r in records
        if r["benchmark"] == "launches"
    }
    timed = [record for record in records if record["benchmark"] != "launches"]
    for record in timed:
        key = (record["operation"], record["backend"])
        if key in counted:
            record["launches"] = counted[key]
    return timed


def run_benchmark(module: Any, options: compare.Options, seconds: float, records: Records) -> str:
    """The failure, if there is one.

    It is stopped after `seconds`; the records before that are kept.
    """
    before, reason, start = len(records.records), "", time.monotonic()
    signal.signal(signal.SIGALRM, _out_of_time)
    with contextlib.redirect_stdout(records):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            module.run(options)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and the next benchmark runs
            reason = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    compare.free()
    count = len(records.records) - before
    print(
        f"{module.__name__} on {options.backend}: {count} records in "
        f"{time.monotonic() - start:.1f} s {reason}",
        flush=True,
    )
    return reason


def _out_of_time(*_: object) -> None:
    raise TimeoutError("stopped in the middle, no time was left")


def table(records: list[dict[str, Any]]) -> str:
    head = "  ".join(form.format(name) for name, form in COLUMNS.items())
    lines = [
        "  ".join(form.format(str(record.get(name, ""))) for name, form in COLUMNS.items())
        for record in records
    ]
    return "\n".join([head, "-" * len(head), *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=6.5,
        help="for benchmarks, the main job and tests together, without the build",
    )
    parser.add_argument(
        "--results",
        metavar="FOLDER",
        help=(
            "gets each figure as it is measured, what the main job and pytest print, and a copy of "
            "the results"
        ),
    )
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small tensors")
    arguments = parser.parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                f"make gpu: torch {torch.__version__} finds no GPU here (torch.cuda.is_available() "
                "is False); nothing was run"
            )
        kernels.select("cuda", torch.device("cuda"))  # says why where it is not usable
    else:
        compare.SHAPES.clear()
        compare.SHAPES.update(TINY)
        muon.SIZE.update(TINY_MUON)
    budget = Budget(arguments.minutes)
    # A benchmark that hangs in the driver hears no signal. The main job and both runs of pytest may
    # each take two GRACEs to end.
    faulthandler.dump_traceback_later(60 * arguments.minutes + 6 * GRACE, exit=True)
    growing = Path(arguments.results) if arguments.results else GROWING
    growing.mkdir(parents=True, exist_ok=True)
    print(f"{device_name(device)}, torch {torch.__version__}: {kernels.available()}", flush=True)
    # Benchmarks first, in a part of the time: a test that hangs then costs no figure.
    records, missing = run_benchmarks(
        device, Budget(arguments.minutes * 0.6), Records(growing / "records.jsonl")
    )
    job = run_job(device, budget, growing / "job.log")
    tests = None if arguments.no_tests else run_tests(device, budget, growing / "tests.log")
    print(table(records), flush=True)
    for what in missing:
        print(f"MISSING  {what}")
    good = not missing and bool(records) and job["passed"] and (tests is None or tests["passed"])
    result = {"device": device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    result |= {"job": job, "tests": tests, "missing": missing}
    if device == "cuda":
        keep({"good": good, **result, "records": records}, arguments.results)
    print("make gpu: all done" if good else "make gpu: NOT everything passed", flush=True)
    return 0 if good else 1


def keep(result: dict[str, Any], folder: str | None) -> None:
    """Writes the file of results, and a copy for whoever fetches it."""
    path = (
        ROOT
        / "benchmarks"
        / "results"
        / f"{re.sub(r'[^a-z0-9]+', '-', device_name('cuda').lower())}.json"
    )
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(ROOT)}")
    if folder:
        shutil.copy(path, folder)
        print(f"copied to {folder}")


if __name__ == "__main__":
    sys.exit(main())
