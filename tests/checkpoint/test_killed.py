"""A process that is killed in a write leaves the checkpoint before it, and one error."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet import checkpoint
from hdet.checkpoint import saving

from ..distributed import run_ranks
from ..faults.harness import World, check_left, run_faulty
from .helpers import Run, alone, ddp

KILLED_RANK = {"data": 1, "before the rename": 0}


def killed_in_a_save(world: World, where: str) -> None:
    """The second save is killed in the middle of a file, half of which is on disk."""
    run = ddp(world.rank, world.size).steps(5)
    checkpoint.save(Path(world.folder, "run"), run.state)
    Path(world.folder, f"weights-{world.rank}.json").write_text(json.dumps(weights(run)))
    run.steps(2)
    if KILLED_RANK[where] == world.rank:
        die_in(world, where)
    world.ensemble = run.ensemble
    checkpoint.save(Path(world.folder, "run"), run.state)


def restarted(rank: int, world: int, folder: str, step: int) -> tuple[list[float], list[str]]:
    """What another start of two ranks finds after that, and what its own next save leaves there."""
    run = ddp(rank, world)
    assert checkpoint.load(Path(folder, "run"), run.state, missing=0) == step
    run.index, found = step, weights(run)
    checkpoint.save(Path(folder, "run"), run.steps(7 - step).state)
    return found, sorted(os.listdir(Path(folder, "run")))


def weights(run: Run) -> list[float]:
    return run.weights().tolist()


def die_in(world: World, where: str) -> None:
    write_files, rename = saving.write_files, os.rename

    def half(folder: Path, *args: Any) -> None:
        write_files(folder, *args)
        file = next(folder.glob(f"rank-{world.rank:05d}-*"))
        os.truncate(file, file.stat().st_size // 2)
        world.die()

    def last(source: Any, target: Any) -> None:
        world.die() if Path(target).name.startswith("step-") else rename(source, target)

    if where == "data":
        saving.write_files = half
    else:
        os.rename = last


@pytest.mark.parametrize("where", KILLED_RANK)
def test_killed_in_a_write(tmp_path: Path, where: str) -> None:
    ranks = run_faulty(killed_in_a_save, 2, tmp_path, where=where)
    dead, left = ranks[KILLED_RANK[where]], ranks[1 - KILLED_RANK[where]]
    assert dead.exitcode == -signal.SIGKILL
    check_left(left, "checkpoint", 1, 7)

    root = tmp_path / "run"
    left_there = [".hdet-lock", ".hdet-step-00000007.partial", "step-00000005"]
    assert sorted(os.listdir(root)) == left_there, "killed in the middle"
    assert checkpoint.latest(root) == root / "step-00000005"
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        run = alone(controller=hdet.SoftmaxController(decay=None))
    assert checkpoint.load(root, run.state) == 5
    for rank, (weights, entries) in enumerate(run_ranks(restarted, 2, str(tmp_path), 5)):
        assert weights == json.loads((tmp_path / f"weights-{rank}.json").read_text())
        assert entries == [".hdet-lock", "step-00000005", "step-00000007"]
    for weights, _ in run_ranks(restarted, 2, str(tmp_path), 7):
        assert weights != json.loads((tmp_path / "weights-0.json").read_text())
