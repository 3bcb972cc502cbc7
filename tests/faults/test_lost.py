"""Ranks that are killed or late: one error on every rank that is left, and nobody hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..limits import HANG_S
from . import scenarios
from .harness import check_left, run_faulty


@pytest.mark.parametrize(("scenario", "ranks", "settings", "when"), [
    (scenarios.killed_in_a_cycle, 3, {}, ("training step", 1, 6)),
    # With local gradients nobody speaks to anybody before the cycle's end.
    (scenarios.killed_in_a_cycle, 2, {"local": True}, ("statistics", 1, 8)),
    (scenarios.killed_in_an_average, 2, {"nth": 1}, ("statistics", 1, 8)),
    (scenarios.killed_in_an_average, 2, {"nth": 2}, ("average", 1, 8)),
    (scenarios.killed_in_a_fragment, 2, {}, ("average", 1, 6)),
    (scenarios.killed_at_the_start, 2, {}, ("agreement", 0, 0)),
])  # fmt: skip
def test_one_is_killed(scenario: Any, ranks: int, settings: Any, when: Any, tmp_path: Path) -> None:
    first, victim, *others = run_faulty(scenario, ranks, tmp_path, **settings)
    assert victim.exitcode == -9
    for one in (first, *others):
        check_left(one, *when)


def test_the_host_of_the_store_is_killed(tmp_path: Path) -> None:
    """Nobody can call a roll without it; but who held it is known."""
    victim, *left = run_faulty(scenarios.killed_in_a_cycle, 3, tmp_path, store="tcp", victim=0)
    assert victim.exitcode == -9
    for one in left:
        assert one.where == ("ReplicaLost", "training step", 1, 6, (0,)), one
        assert "replica 0 (rank 0) is gone: the rendezvous store at 127.0.0.1:" in one.text
        assert one.seconds < HANG_S / 2


def test_a_replica_of_two_ranks_loses_one(tmp_path: Path) -> None:
    """In a ring of four, the rank across from the victim hears of it only when its neighbours have
    left: it is not called gone."""
    pairs = {"nth": 1, "pairs": True, "victim": 3}
    *left, victim = run_faulty(scenarios.killed_in_an_average, 4, tmp_path, **pairs)
    assert victim.exitcode == -9
    for one in left:
        assert one.where == ("ReplicaLost", "statistics", 1, 8, (3,)), one
        assert "replica 1 (rank 3) is gone" in one.text
        assert f"this is replica {one.rank // 2} (rank {one.rank})" in one.text
        assert set(one.late) <= {0, 1, 2} and one.seconds < HANG_S / 2


@pytest.mark.parametrize(("ranks", "local", "phase"), [
    (2, True, "statistics"), (3, False, "training step"),
])  # fmt: skip
def test_a_straggler_beyond_the_timeout(ranks, local, phase, tmp_path) -> None:
    """It still runs, which is said; and when it comes, it is told that it was late. Under DDP the
    others wait for it in their backward pass."""
    outcomes = run_faulty(scenarios.late, ranks, tmp_path, timeout=5.0, local=local)
    first, straggler, *others = outcomes
    for one in outcomes:
        assert one.where == ("ReplicaLost", phase, 1, 8 if local else 6, ()), one.text
    for one in (first, *others):
        assert "replica 1 (rank 1) is late (still running: pid " in one.text
    assert first.late == (1,) or not local
    assert "the other ranks had given up" in straggler.text
