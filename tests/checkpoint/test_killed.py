"""A process that is killed in the middle of a write leaves the checkpoint before it, and one error on who is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import hdet
from hdet import checkpoint

from ..distributed import run_ranks
from ..faults.harness import run_faulty
from ..limits import HANG_S
from .helpers import alone
from .killed import KILLED_RANK, killed_in_a_save, restarted


@pytest.mark.parametrize("where", KILLED_RANK)
def test_killed_in_a_write(tmp_path: Path, where: str) -> None:
    ranks = run_faulty(killed_in_a_save, 2, tmp_path, where=where)
    dead, left = ranks[KILLED_RANK[where]], ranks[1 - KILLED_RANK[where]]
    assert dead.exitcode == -signal.SIGKILL
    assert (left.exitcode, left.kind) == (0, "ReplicaLost"), left.traceback
    assert (left.phase, left.cycle, left.step, left.lost) == ("checkpoint", 1, 7, (dead.rank,)), left.text
    assert "cycle 1 (step 7), while saving a checkpoint: " in left.text
    assert f"replica {dead.rank} (rank {dead.rank}) is gone (ended: pid " in left.text
    assert f"this is replica {left.rank} (rank {left.rank})" in left.text
    assert left.seconds < HANG_S / 2, "long before the collectives' timeout"
    for said in left.afterwards.split(" | "):
        assert "has lost a replica" in said and "from the last checkpoint" in said

    root = tmp_path / "run"
    assert sorted(os.listdir(root)) == [".step-00000007.partial", "step-00000005"], "killed in the middle"
    assert checkpoint.latest(root) == root / "step-00000005"
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        assert checkpoint.load(root, alone(controller=hdet.SoftmaxController(decay=None)).state) == 5
    for rank, (weights, entries) in enumerate(run_ranks(restarted, 2, str(tmp_path), 5)):
        assert weights == json.loads((tmp_path / f"weights-{rank}.json").read_text())
        assert entries == ["step-00000005", "step-00000007"]
    for weights, _ in run_ranks(restarted, 2, str(tmp_path), 7):
        assert weights != json.loads((tmp_path / "weights-0.json").read_text())
