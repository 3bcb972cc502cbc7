"""A process that is killed in the middle of a write leaves the checkpoint before it, and one error on who is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import hdet
from hdet import checkpoint

from ..faults.harness import run_faulty
from .helpers import alone
from .killed import KILLED_RANK, killed_in_a_save


@pytest.mark.parametrize("where", KILLED_RANK)
def test_killed_in_a_write(tmp_path: Path, where: str) -> None:
    ranks = run_faulty(killed_in_a_save, 2, tmp_path, where=where)
    dead, left = ranks[KILLED_RANK[where]], ranks[1 - KILLED_RANK[where]]
    assert dead.exitcode == -signal.SIGKILL
    assert left.kind == "ReplicaLost", left.traceback
    assert (left.phase, left.lost) == ("checkpoint", (dead.rank,)) and "while saving a checkpoint" in left.text

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
