"""A process that is killed in the middle of a write leaves the checkpoint before it, and one error on who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hdet
from hdet import checkpoint

from .helpers import alone
from .killed import KILLED_RANK


@pytest.mark.parametrize("where", KILLED_RANK)
def test_killed_in_a_write(tmp_path: Path, where: str) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killed", str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(rank), where], stdout=subprocess.PIPE, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
        for rank in (0, 1)
    ]
    try:
        texts = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    dead = KILLED_RANK[where]
    assert processes[dead].returncode == -signal.SIGKILL and processes[1 - dead].returncode == 3
    assert f"rank {dead}" in texts[1 - dead] and "while saving a checkpoint" in texts[1 - dead]

    root = tmp_path / "run"
    assert (root / ".step-00000007.partial").is_dir(), "killed in the middle"
    assert checkpoint.latest(root) == root / "step-00000005"
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        run = alone(controller=hdet.SoftmaxController(decay=None))
    assert checkpoint.load(root, run.state) == 5
    run.index = 5
    checkpoint.save(root, run.steps(2).state, 7)
    assert sorted(entry.name for entry in root.iterdir()) == ["step-00000005", "step-00000007"]
    assert checkpoint.load(root, run.state) == 7
