"""Ranks that are killed or late: one error on every rank that is left, and nobody hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ..alive import wait_until_gone
from ..distributed import run_ranks, torchrun
from ..limits import HANG_S
from . import elastic_worker, scenarios
from .elastic_worker import KILL_AT, SAVE_EVERY, STEPS
from .harness import check_left, run_faulty


@pytest.mark.parametrize(("scenario", "ranks", "settings", "when"), [
    (scenarios.killed_in_a_cycle, 3, {}, ("training step", 1, 6)),
    # With local gradients nobody speaks to anybody before the cycle's end.
    (scenarios.killed_in_a_cycle, 2, {"local": True}, ("statistics", 1, 8)),
    # The first collective of a cycle's end gathers the losses, the second averages.
    (scenarios.killed_in_a_collective, 2, {"local": True, "after": 7}, ("statistics", 1, 8)),
    (scenarios.killed_in_a_collective, 2, {"local": True, "after": 7, "nth": 2}, ("average", 1, 8)),
    (scenarios.killed_in_a_collective, 2, {"after": 0}, ("agreement", 0, 0)),
])  # fmt: skip
def test_one_is_killed(scenario: Any, ranks: int, settings: Any, when: Any, tmp_path: Path) -> None:
    first, victim, *others = run_faulty(scenario, ranks, tmp_path, **settings)
    assert victim.exitcode == -9
    for one in (first, *others):
        check_left(one, *when)


def test_one_is_killed_in_a_save_and_the_next_start_goes_on_from_the_one_before(tmp_path) -> None:
    left, dead = run_faulty(scenarios.killed_in_a_save, 2, tmp_path)
    assert dead.exitcode == -9
    check_left(left, "checkpoint", 1, 6)
    partial = [".hdet-lock", ".hdet-step-00000006.partial", "step-00000005"]
    assert sorted(os.listdir(tmp_path / "run")) == partial, "killed in the middle"
    for rank, found in enumerate(run_ranks(scenarios.go_on_from, 2, tmp_path / "run")):
        after = [".hdet-lock", "step-00000005", "step-00000006"]
        assert found == (torch.load(tmp_path / f"{rank}.pt"), after)


def test_the_host_of_the_store_is_killed(tmp_path: Path) -> None:
    """Nobody can call a roll without it; but who held it is known."""
    victim, *left = run_faulty(scenarios.killed_in_a_cycle, 3, tmp_path, tcp=True, victim=0)
    assert victim.exitcode == -9
    for one in left:
        assert one.where == ("ReplicaLost", "training step", 1, 6, (0,)), one
        assert "lost rank 0 (replica 0), which usually holds it" in str(one.error)
        assert one.seconds < HANG_S / 2


def test_a_replica_of_two_ranks_loses_one(tmp_path: Path) -> None:
    """In a ring of four, the rank across from the victim hears of it only when its neighbours have
    left, and may be named with it."""
    pairs = {"local": True, "after": 7, "pairs": True, "victim": 3}
    *left, victim = run_faulty(scenarios.killed_in_a_collective, 4, tmp_path, **pairs)
    assert victim.exitcode == -9
    for one in left:
        assert one.where[:4] == ("ReplicaLost", "statistics", 1, 8), one
        assert 3 in one.error.lost and "lost or late: rank" in str(one.error)
        assert f"this is rank {one.rank} (replica {one.rank // 2})" in str(one.error)
        assert one.seconds < HANG_S / 2


@pytest.mark.parametrize(("ranks", "local", "phase"), [
    (2, True, "statistics"), (3, False, "training step"),
])  # fmt: skip
def test_a_straggler_beyond_the_timeout(ranks, local, phase, tmp_path) -> None:
    """When it comes, it ends too. Under DDP the others wait for it in their backward pass."""
    outcomes = run_faulty(scenarios.late, ranks, tmp_path, timeout=5.0, local=local)
    first, straggler, *others = outcomes
    for one in outcomes:
        assert one.where[:4] == ("ReplicaLost", phase, 1, 8 if local else 6), one
    for one in (first, *others):
        assert 1 in one.error.lost and "lost or late: rank" in str(one.error)
    assert straggler.error.lost == () and (first.error.lost == (1,) or not local)
    assert "every rank answers: one, maybe this one, was late" in str(straggler.error)


# -- restarts by torchrun ----------------------------------------------------------------------


def uninterrupted(rank: int, world: int, folder: str) -> list[float]:
    return elastic_worker.train(Path(folder), kill=False)


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    (interrupted / "pids").mkdir(parents=True)
    whole.mkdir()
    torchrun(elastic_worker.main, 2, interrupted, restarts=5)
    assert (interrupted / "killed").exists()
    started = len(list((interrupted / "pids").iterdir()))
    # two workers, started twice; again where gloo aborts as they connect, as on a crowded machine
    assert started in range(4, 13, 2)
    wait_until_gone(interrupted / "pids", started)
    reference = run_ranks(uninterrupted, 2, str(whole))
    last = KILL_AT // SAVE_EVERY * SAVE_EVERY
    # neither is the end of a cycle
    assert KILL_AT % elastic_worker.INTERVAL and last % elastic_worker.INTERVAL
    for rank in range(2):
        assert torch.load(interrupted / f"weights-{rank}.pt") == reference[rank]
        steps = [int(line) for line in (interrupted / f"steps-{rank}").read_text().split()]
        assert sorted(set(steps)) == list(range(1, STEPS + 1))
        # something was repeated, so it was interrupted
        assert sorted(steps)[last:] != list(range(last + 1, STEPS + 1))
        repeated = [step for step in set(steps) if steps.count(step) > 1]
        assert len(steps) - STEPS == len(repeated) <= KILL_AT - last and min(repeated) == last + 1
