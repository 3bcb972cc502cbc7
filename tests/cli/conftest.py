"""A folder of small real-looking text, so that runs start at once, and one comparison that several tests look at."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
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
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ["def ", "return ", "self.", "value", "(", ")", ":\n    ", " = ", "0", "x", "import ", "\n"]
    for number in range(6):
        # A plain recurrence instead of a random generator: the same text everywhere.
        state, parts = number + 1, []
        for _ in range(4000):
            state = (state * 1103515245 + 12345) % 2**31
            parts.append(words[(state >> 16) % len(words)])
        (folder / f"module_{number}.py").write_text("".join(parts))
    return folder


@pytest.fixture(scope="session")
def compared(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    out = tmp_path_factory.mktemp("runs") / "both"
    finished = run_cli("train", "--compare", *tiny(text_folder), "--out", str(out))
    return out, finished


@pytest.fixture(scope="session")
def straight(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Finished]]:
    """Of a kind of run (see `KINDS`): the folder of one that nothing has interrupted. Of co-resident replicas, beside the fixed schedule."""
    home = tmp_path_factory.mktemp("straight")

    @functools.cache
    def run_of(kind: str) -> tuple[Path, Finished]:
        compare = ["--compare"] * (kind == "coresident")
        finished = run_cli("train", *compare, *KINDS[kind](text_folder), "--out", str(home / kind))
        assert finished.code == 0 and finished.err == "", finished.err
        return home / kind / ("hdet" if compare else ""), finished

    return run_of


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is said before a process is started."""

    def refuse(self: Workers) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(Workers, "__enter__", refuse)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
