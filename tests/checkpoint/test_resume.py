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
import torch

import hdet
from hdet import checkpoint
from hdet.checkpoint import saving

from ..distributed import run_ranks
from ..faults.harness import World, check_left, run_faulty
from . import helpers
from .helpers import Run, alone, ddp

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
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(tmp_path, build, make, world, at) -> None:
    """Saved at the end of a cycle, in its middle, and before the first step."""
    for straight, resumed in run_ranks(interrupted, world, build, make, str(tmp_path), at):
        assert straight == resumed


def one_cycle_facts(continues: Path | None, steps: int, root: Path | None = None) -> list[Any]:
    """A run of the drop-in scheduler: rates and parameters after each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = hdet.OneCycleAutoLR(
        optimizer, max_lr=1e-2, total_steps=12, auto_lr_warmup_steps=0, model_sync_interval=3,
        enable_auto_lr=False,
    )  # fmt: skip
    state = checkpoint.RunState(model, scheduler.ensemble)
    at = 0 if continues is None else checkpoint.load(continues, state, missing=0)
    found = []
    for step in range(at, at + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        weights = [p.detach().tolist() for p in model.parameters()]
        found.append([scheduler.get_last_lr(), scheduler.last_epoch, *weights])
    if root is not None:
        checkpoint.save(root, state)
    return found


@pytest.mark.filterwarnings("ignore:.*one replica")
def test_the_drop_in_scheduler_goes_on(tmp_path: Path) -> None:
    whole = one_cycle_facts(None, 10)
    assert one_cycle_facts(None, 6, tmp_path) + one_cycle_facts(tmp_path, 4) == whole


# -- killed in a write -------------------------------------------------------------------------


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
