"""A resumed run is the same run, bit for bit, in every layout."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hdet import checkpoint
from hdet.checkpoint import saving

from ..distributed import run_ranks
from ..faults.harness import World, check_left, run_faulty
from . import helpers
from .helpers import ddp

Make = Callable[..., Any]


def interrupted(rank: int, world: int, build: Make, make: Make, root: str, at: int) -> Any:
    """What a run comes to that goes on after a save, and one that begins from it."""
    run = build(rank, world, make).steps(at)
    checkpoint.save(root, run.state, at)
    straight = run.steps(6).facts()
    run.ensemble.close()
    return straight, build(rank, world, make).resume(root).steps(6).facts()


H, ADAMW, FUSED = helpers, helpers.torch_adamw, helpers.fused_adamw
CASES = [
    (H.ddp, ADAMW, 2, 0), (H.ddp, FUSED, 2, 5), (H.ddp, H.torch_sgd, 2, 7),
    (H.ddp, H.fused_split, 2, 7), (H.ddp, H.fused_fp32, 2, 7),
    (H.shards, ADAMW, 4, 7), (H.groups, ADAMW, 4, 7), (H.hsdp, ADAMW, 4, 7),
    (H.hsdp, H.FusedEightBit, 4, 5), (H.hsdp_bf16, ADAMW, 4, 5), (H.compressed, ADAMW, 2, 13),
    (H.exact_local, H.fused_base_fp32, 2, 7), (H.local, FUSED, 2, 5),
    *((partial(H.local, moments=of), ADAMW, 2, 7) for of in ("keep", "average", "reset")),
    (H.local_fsdp, ADAMW, 4, 7), (H.outer, ADAMW, 2, 5), (H.outer_fsdp, ADAMW, 4, 5),
    (H.drop_in, ADAMW, 2, 7),
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(tmp_path, build, make, world, at) -> None:
    """Saved at the end of a cycle, in its middle, and before the first step."""
    for straight, resumed in run_ranks(interrupted, world, build, make, str(tmp_path), at):
        assert straight == resumed


# -- killed in a write -------------------------------------------------------------------------


def killed_in_a_save(world: World) -> None:
    """The second save is killed in the middle of a file, half of which is on disk."""
    run, write_files = ddp(world.rank, world.size).steps(5), saving.write_files

    def write_half(folder: Path, *args: Any) -> None:
        write_files(folder, *args)
        file = next(folder.glob(f"rank-{world.rank:05d}-*"))
        os.truncate(file, file.stat().st_size // 2)
        world.die()

    checkpoint.save(Path(world.folder, "run"), run.state)
    Path(world.folder, f"{world.rank}.json").write_text(json.dumps(run.weights().tolist()))
    world.ensemble = run.steps(2).ensemble
    if world.rank == 1:
        saving.write_files = write_half
    checkpoint.save(Path(world.folder, "run"), run.state)


def restarted(rank: int, world: int, folder: str) -> tuple[list[float], list[str]]:
    """What another start of two ranks finds after that, and what its own next save leaves there."""
    run = ddp(rank, world)
    run.index = checkpoint.load(Path(folder, "run"), run.state, missing=0)
    found = run.weights().tolist()
    checkpoint.save(Path(folder, "run"), run.steps(2).state)
    return found, sorted(os.listdir(Path(folder, "run")))


def test_killed_in_a_write(tmp_path: Path) -> None:
    left, dead = run_faulty(killed_in_a_save, 2, tmp_path)
    assert dead.exitcode == -signal.SIGKILL
    check_left(left, "checkpoint", 1, 7)
    left_there = [".hdet-lock", ".hdet-step-00000007.partial", "step-00000005"]
    assert sorted(os.listdir(tmp_path / "run")) == left_there, "killed in the middle"
    for rank, (weights, entries) in enumerate(run_ranks(restarted, 2, str(tmp_path))):
        assert weights == json.loads((tmp_path / f"{rank}.json").read_text())
        assert entries == [".hdet-lock", "step-00000005", "step-00000007"]
