"""The verdict on a cycle, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hdet.core.divergence import Divergence, judge

ALL = [True] * 4


def verdict(losses: list[float | None], before: float | None = 1.0, finite: list[bool] = ALL, **settings: Any) -> Any:
    return judge(Divergence(**settings), finite, losses, before)


def test_everybody_healthy() -> None:
    found = verdict([1.0, 1.1, 0.9, 1.3])
    assert (found.healthy, found.roll_back, found.notes) == ([0, 1, 2, 3], False, [])
    assert found.level == pytest.approx(1.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 4.2])
def test_a_replica_that_diverges_is_left_out(bad: float) -> None:
    """4.2 is above 4 times the peers' median, 1, and the last cycle's level, 1."""
    found = verdict([1.0, bad, 1.0, 1.0])
    assert found.healthy == [0, 2, 3] and not found.roll_back and found.level == 1.0
    assert len(found.notes) == 1 and "replica 1" in found.notes[0]


def test_a_loss_is_only_high_if_it_is_above_where_the_cycle_began() -> None:
    assert verdict([0.1, 4.2, 0.1, 0.1], before=2.0).healthy == [0, 1, 2, 3], "all are falling fast"
    assert verdict([0.1, 4.2, 0.1, 0.1], before=None).healthy == [0, 1, 2, 3], "nothing is known yet"
    assert verdict([0.1, 4.2, 0.1, 0.1], before=1.0).healthy == [0, 2, 3]
    assert verdict([0.1, 4.2, 0.1, 0.1], before=1.0, peer_bound=None).healthy == [0, 1, 2, 3]
    assert verdict([-4.0, -1.0, -4.0, -4.0], before=-4.0).healthy == [0, 1, 2, 3], "a ratio says nothing of losses below 0"


def test_two_replicas_are_judged_by_each_other() -> None:
    found = judge(Divergence(), [True, True], [1.0, 9.0], 1.0)
    assert found.healthy == [0]


def test_missing_losses_judge_nobody() -> None:
    found = verdict([None, None, None, None])
    assert found.healthy == [0, 1, 2, 3] and found.level is None and not found.roll_back


def test_parameters_that_are_not_finite_are_out_whatever_the_loss() -> None:
    found = verdict([1.0, 1.0, 1.0, 1.0], finite=[True, False, True, True])
    assert found.healthy == [0, 2, 3] and "parameters" in found.notes[0]


def test_broken_losses_everywhere_with_whole_parameters_can_be_averaged() -> None:
    """A scaler may have skipped the steps; without a snapshot that is all there is to do."""
    found = verdict([math.nan] * 4)
    assert found.healthy == [0, 1, 2, 3] and not found.roll_back
    assert verdict([math.nan] * 4, rollback="device").roll_back


def test_nobody_left() -> None:
    assert verdict([1.0] * 4, finite=[False] * 4).healthy == []
    assert verdict([1.0] * 4, finite=[False] * 4, rollback="host").roll_back


def test_a_cycle_that_rose_as_a_whole_is_taken_back_only_with_a_snapshot() -> None:
    assert verdict([2.1, 2.2, 2.3, 2.4], rollback="device").roll_back
    assert not verdict([2.1, 2.2, 2.3, 2.4]).roll_back
    assert not verdict([1.9, 1.9, 1.9, 1.9], rollback="device").roll_back
    assert not verdict([2.1, 2.2, 2.3, 2.4], rollback="device", rise_bound=None).roll_back
    assert not verdict([2.1, 2.2, 2.3, 2.4], before=None, rollback="device").roll_back


@pytest.mark.parametrize(
    "settings",
    [{"peer_bound": 1.0}, {"peer_bound": math.nan}, {"rise_bound": 0.5}, {"rollback": "disk"}, {"lower": 1.0}, {"attempts": 0}],
)
def test_settings_are_validated(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Divergence(**settings)
