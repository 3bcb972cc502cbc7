"""Runs the command line as a process of its own; `faulty_worker` makes something happen at a chosen step of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hdet.cli.main import main

from ..limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
CLI_WITH_FAULTS = "import sys; from hdet.cli.job import processes; processes.WORKER = (sys.executable, '-m', 'tests.cli.faulty_worker'); "
CLI_WITH_FAULTS += "from hdet.cli.main import main; raise SystemExit(main())"
TOO_LOW = 1e-5


@dataclass
class Finished:
    code: int
    out: str
    err: str


def tiny(data: Path, replicas: int = 2, steps: int = 24) -> list[str]:
    """Settings under which a step takes about a millisecond and a cycle four steps; the second ends near the schedule's peak, with a move."""
    model = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch-size": 2, "probe-batches": 3, "validation-batches": 3}
    intervals = {"sync-interval": 4, "checkpoint-interval": 8, "validation-interval": 8, "log-interval": 3}
    settings = {**model, **intervals, "pct-start": 0.3, "replicas": replicas, "steps": steps, "device": "cpu", "data": data}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def auto(data: Path, replicas: int = 2) -> list[str]:
    """For controller auto, with a budget for a trial in steps 1 to 56, at whose end the rate is
    raised."""
    settings = {"max-lr": TOO_LOW, "pct-start": 0.1, "controller": "auto", "budget": 0.99}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*tiny(data, replicas, steps=200), *words]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "processes": lambda data: tiny(data, replicas=3),  # a sum of two has no order
    "coresident": lambda data: [*tiny(data), "--coresident"],
    "auto": auto,
    "softmax": lambda data: [*tiny(data), "--controller", "softmax"],
}


def run_cli(*arguments: str, fault: str | None = None, pids: Path | None = None, scratch: Path | None = None) -> Finished:
    """``fault``: see `faulty_worker`. ``pids``: a folder in which each worker leaves a file named by its process id.
    ``scratch``: where temporary files go."""
    command = [sys.executable, "-c", CLI_WITH_FAULTS] if fault else [sys.executable, "-m", "hdet"]
    # One thread, also where one process would take all cores: a matrix product may depend on their number.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"HDET_TEST_FAULT": fault or "", "HDET_TEST_PIDS": str(pids or "")}
    if scratch is not None:
        environment["TMPDIR"] = str(scratch)
    for name in ("RANK", "WORLD_SIZE", "FORCE_COLOR"):
        environment.pop(name, None)
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=HANG_S, env=environment, start_new_session=True, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must be refused."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("hdet")
    assert "Traceback" not in err and out == ""
    return err


def alive(pid: int) -> bool:
    """A process that has ended but that nobody has waited for is not alive."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc").is_dir()


def wait_until_gone(pids: Path, expected: int, seconds: float = HANG_S) -> None:
    numbers = [int(file.name) for file in pids.iterdir()]
    assert len(numbers) == expected
    deadline = time.monotonic() + seconds
    while any(map(alive, numbers)):
        assert time.monotonic() < deadline, f"still running: {[n for n in numbers if alive(n)]}"
        time.sleep(0.05)
