"""A folder of small real-looking text, and the example as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..limits import HANG_S

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
for name in ("RANK", "WORLD_SIZE"):
    ENVIRONMENT.pop(name, None)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ["def ", "return ", "self.", "value", "(", ")", ":\n    ", " = ", "0", "import ", "\n"]
    for number in range(6):
        # A plain recurrence instead of a random generator: the same text everywhere.
        state, parts = number + 1, []
        for _ in range(4000):
            state = (state * 1103515245 + 12345) % 2**31
            parts.append(words[(state >> 16) % len(words)])
        (folder / f"module_{number}.py").write_text("".join(parts))
    return folder


@pytest.fixture(scope="session")
def run_example() -> Callable[..., str]:
    """``run_example(module, processes, *arguments)`` returns what was printed."""

    def run(module: str, processes: int, *arguments: object) -> str:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", module, *map(str, arguments)], capture_output=True,
            text=True, timeout=HANG_S, cwd=ROOT, env=ENVIRONMENT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
