"""A folder of small real-looking text, so that runs start at once, and one comparison that several tests look at."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from hdet.cli.job.processes import Workers

from .harness import KINDS, Finished, run_cli, tiny


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """A suite that was started in the background may inherit an ignored SIGINT, and its child processes from it; users do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of the suite have."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cli"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def text_folder(shared: Path) -> Path:
    folder = shared / "text"
    words = ["def ", "return ", "self.", "value", "(", ")", ":\n    ", " = ", "0", "x", "import ", "\n"]
    with alone(shared, "text"):
        for number in range(0 if folder.exists() else 6):
            folder.mkdir(exist_ok=True)
            # A plain recurrence instead of a random generator: the same text everywhere.
            state, parts = number + 1, []
            for _ in range(4000):
                state = (state * 1103515245 + 12345) % 2**31
                parts.append(words[(state >> 16) % len(words)])
            (folder / f"module_{number}.py").write_text("".join(parts))
    return folder


@pytest.fixture(scope="session")
def run_once(shared: Path) -> Callable[[str, list[str]], tuple[Path, Finished]]:
    """``hdet train`` with these arguments, in a folder of this name: once, for all processes of the suite. To be looked at only."""

    def run(name: str, arguments: list[str]) -> tuple[Path, Finished]:
        out, told = shared / name, shared / f"{name}.json"
        with alone(shared, name):
            if not told.exists():
                told.write_text(json.dumps(asdict(run_cli("train", *arguments, "--out", str(out)))))
        return out, Finished(**json.loads(told.read_text()))

    return run


@pytest.fixture(scope="session")
def compared(text_folder: Path, run_once: Callable[[str, list[str]], tuple[Path, Finished]]) -> tuple[Path, Finished]:
    return run_once("both", ["--compare", *tiny(text_folder)])


@pytest.fixture(scope="session")
def straight(text_folder: Path, run_once: Callable[[str, list[str]], tuple[Path, Finished]]) -> Callable[[str], tuple[Path, Finished]]:
    """Of a kind of run (see `KINDS`): the folder of one that nothing has interrupted. Of co-resident replicas, beside the fixed schedule."""

    def run_of(kind: str) -> tuple[Path, Finished]:
        compare = ["--compare"] * (kind == "coresident")
        out, finished = run_once(f"straight-{kind}", [*compare, *KINDS[kind](text_folder)])
        assert finished.code == 0 and finished.err == "", finished.err
        return out / ("hdet" if compare else ""), finished

    return run_of


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is said before a process is started."""

    def refuse(self: Workers) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(Workers, "__enter__", refuse)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
