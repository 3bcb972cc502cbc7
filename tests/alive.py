"""Whether processes that a test has started are gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .limits import HANG_S


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
    """``pids``: a folder with a file for each process, named by its id."""
    numbers = [int(file.name) for file in pids.iterdir()]
    assert len(numbers) == expected
    deadline = time.monotonic() + seconds
    while any(map(alive, numbers)):
        assert time.monotonic() < deadline, f"running: {[n for n in numbers if alive(n)]}"
        time.sleep(0.05)
