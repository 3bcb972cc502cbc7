"""The command behind `make gpu`: one run on a GPU that is lent for minutes, the most telling first.

    python -m benchmarks.gpu [--minutes 9] [--results FOLDER] [--only STEP ...] [--dry-run]

Builds for the GPU here, times every operation on CUDA and Triton, runs the GPU's tests, counts with
ncu, looks for accesses outside of tensors and for races (compute-sanitizer), and trains the main
job. Nothing is fetched from a network. Each step has a limit in seconds; what a step has printed by
then is kept, and the next one begins. All of it, the build included, takes at most ``--minutes``.

In the folder, by default benchmarks/results/gpu, each figure is as soon as it is there:
figures.jsonl, to which lines are appended, each with what the last run there had ("before") and, of
what has changed since, what is predicted ("predicted"); ema.jsonl and eight_bit.jsonl, beside other
libraries; ncu.csv; and a log of each step.
`python -m benchmarks.gpu_report` reads them. The exit status is 1 if something failed or was left
out. --dry-run goes the same way on a CPU with small tensors, and collects tests only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

import torch

from .harness import parser_of

ROOT = Path(__file__).resolve().parents[1]
GRACE = 15.0
"""Seconds until what was interrupted should have ended, and until what was killed is given up: a
process that hangs in the driver cannot be killed."""
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "launch__registers_per_thread",
)
TESTS = ("gpu", "kernels", "optim", "triton", "converge", "ensemble")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
SANITIZER = ("compute-sanitizer", "--error-exitcode", "1", "--tool")


class Step(NamedTuple):
    """``command``: of Python, unless it begins with another program."""

    name: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = MappingProxyType({})


def plan(folder: Path, dry: bool) -> Iterator[Step]:
    """All steps, first those of which nothing was ever measured. On one H100 those up to the
    training take about 8 minutes together."""
    kernels = ["-m", "benchmarks.kernels", "--json", str(folder / "figures.jsonl")]
    muon = ["-m", "benchmarks.muon", "--json", str(folder / "figures.jsonl")]
    where = ["--quick", "--threads", "1", "--device", "cpu"] if dry else ["--device", "cuda"]
    backends = ("cpu",) if dry else ("cuda", "triton")
    if not dry:
        yield Step("build", 150, ["-m", "benchmarks.build"], {"HDET_CUDA": "1"})
    for backend in backends:
        of = ["formats", "small", *where, "--backend", backend]
        yield Step(f"formats-{backend}", 60, [*kernels, *of])
    yield Step("ways", 45, [*muon, "ways", *where])
    others = lambda name: ["-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.jsonl")]
    yield Step("ema", 30, [*others("ema"), *where])
    size = ["--width", "32", "--blocks", "1"] if dry else ["--width", "768", "--tokens", "50257"]
    yield Step("muon", 45, [*muon, "step", *where, *size])
    yield Step("host", 30, [*kernels, "host", "buckets", *where])
    workers = str(max(2, min(12, (os.cpu_count() or 2) - 2)))
    folders = [f"tests/{name}" for name in TESTS if (ROOT / "tests" / name).exists()]
    spread = ["--collect-only"] if dry else ["-n", workers, "--dist", "loadgroup"]
    yield Step("tests", 90, [*PYTEST, "-m", "gpu and not alone", *spread, *folders])
    if not dry:
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page",
               "raw", "--metrics", ",".join(COUNTERS), "--log-file", str(folder / "ncu.csv"),
               sys.executable, "-m", "benchmarks.profiled", "step", "--formats", "all",
               "--calls", "1"]  # fmt: skip
        yield Step("ncu", 60, ncu)
        for tool, of in (("memcheck", "step"), ("racecheck", "eight_bit")):
            tests = [sys.executable, *PYTEST, "-m", "gpu", f"tests/kernels/test_{of}.py"]
            which = ["-k", "the_table and cuda" if of == "step" else "cuda"]
            yield Step(tool, 45, [*SANITIZER, tool, *tests, *which], alone)
        yield Step("operations", 90, [*kernels, "clip", "replicas", "average", *where])
        yield Step("products", 20, [*muon, "products", *where])
        yield Step("tests-alone", 60, [*PYTEST, "-m", "gpu and alone", *folders])
    yield Step("training", 60, [*kernels, "training", *where])
    yield Step("peers", 60, [*others("eight_bit"), *where])
    job = ["-m", "examples.bytes", "--compare", "--coresident", "4", "--overwrite", "--out",
           str(ROOT / "build" / "gpu-job"), *where[-2:]]  # fmt: skip
    yield Step("job", 60, [*job, "--steps", "20" if dry else "400"])


def run_bounded(command: Sequence[str], log: IO[bytes], seconds: float, **environment: str) -> int:
    """The command's exit status; 1 where it takes longer.

    It is interrupted then, so that pytest says what has failed so far, and killed with all its
    processes. Does not wait for what cannot be killed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # a run that was started in the background ignores interrupts, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
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
        hangs = f"process {process.pid} hangs, in the driver perhaps"
        log.write(f"{hangs}, and was left behind\n".encode())
    return 1


def run(steps: Sequence[Step], folder: Path, minutes: float) -> list[str]:
    """Names of the steps that failed or were left out. Says how each ended, as it ends."""
    end, bad = time.monotonic() + 60 * minutes, []
    for step in steps:
        left = min(step.seconds, end - time.monotonic() - 2 * GRACE)
        program = step.command[0]
        own = program.startswith("-")
        if left < 2 or not (own or shutil.which(program)):
            why = "no time was left" if left < 2 else f"there is no {program} here"
            print(f"{step.name}: {why}", flush=True)
            bad.append(step.name)
            continue
        command = [sys.executable, *step.command] if own else step.command
        path, began = folder / f"{step.name}.log", time.monotonic()
        with path.open("wb") as log:
            status = run_bounded(command, log, left, **step.environment)
        told = path.read_text(errors="replace").splitlines()[-1:]
        took = time.monotonic() - began
        how = "done" if status == 0 else "FAILED"
        print(f"{step.name}: {how} in {took:.0f} s; {told}", flush=True)
        bad += [step.name] if status else []
        if status and step.name == "build":
            return [*bad, "everything that needs the build"]
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps together")
    usual = ROOT / "benchmarks/results/gpu"
    parser.add_argument("--results", type=Path, default=usual, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names of steps")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small tensors")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit(
            f"make gpu: torch {torch.__version__} finds no GPU here (torch.cuda.is_available() is "
            "False); nothing was run"
        )
    folder = options.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    steps = list(plan(folder, options.dry_run))
    chosen = [step for step in steps if step.name in (options.only or [step.name])]
    bad = run(chosen, folder, options.minutes)
    print(f"make gpu: NOT done: {', '.join(bad)}" if bad else "make gpu: all done", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
