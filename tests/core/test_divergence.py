"""The verdict on a cycle, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hdet.core.divergence import Divergence, judge

ALL = [True] * 4


def verdict(
    losses: list[float | None],
    before: float | None = 1.0,
    finite: list[bool] = ALL,
    **settings: Any,
) -> Any:
    return judge(Divergence(**settings), finite, losses, before)


def test_everybody_healthy() -> None:
    found = verdict([1.0, 1.1, 0.9, 1.3])
    assert (found.healthy, found.roll_back, found.notes) == ([0, 1, 2, 3], False, [])
    assert found.level == pytest.approx(1.05)


ODD, FALLING, OUT = [0.1, 4.2, 0.1, 0.1], [-4.0, -1.0, -4.0, -4.0], [True, False, True, True]


@pytest.mark.parametrize(
    ("losses", "settings", "healthy"),
    [
        # 4.2 is above 4 times the peers' median and the last cycle's level, 1
        *(([1.0, bad, 1.0, 1.0], {}, OUT) for bad in (math.nan, math.inf, 4.2)),
        (ODD, {}, OUT),
        # all are falling fast; nothing is known yet
        (ODD, {"before": 2.0}, ALL),
        (ODD, {"before": None}, ALL),
        (ODD, {"peer_bound": None}, ALL),
        (FALLING, {"before": -4.0}, ALL),  # a ratio says nothing of losses below 0
        # a scaler may have skipped the steps: parameters are whole
        ([None] * 4, {}, ALL),
        ([math.nan] * 4, {}, ALL),
        ([1.0] * 4, {"finite": OUT}, OUT),
        ([1.0] * 4, {"finite": [False] * 4}, [False] * 4),
        ([1.0, 9.0], {"finite": [True] * 2}, [True, False]),  # two are judged by each other
    ],
)
def test_who_is_averaged(
    losses: list[float | None], settings: dict[str, Any], healthy: list[bool]
) -> None:
    found = verdict(losses, **settings)
    assert found.healthy == [r for r, good in enumerate(healthy) if good]
    noted = [note.split(":")[0] for note in found.notes]
    left_out = [r for r, good in enumerate(healthy) if not good]
    assert noted == [f"replica {r} left out of the average" for r in left_out]


RISEN = [2.1, 2.2, 2.3, 2.4]


@pytest.mark.parametrize(
    ("losses", "settings", "taken_back"),
    [
        (RISEN, {}, True),
        (RISEN, {"rollback": None}, False),
        ([1.9] * 4, {}, False),
        (RISEN, {"rise_bound": None}, False),
        (RISEN, {"before": None}, False),
        ([math.nan] * 4, {}, True),
        ([1.0] * 4, {"finite": [False] * 4}, True),
        ([None] * 4, {}, False),
    ],
)
def test_a_cycle_that_rose_or_broke_as_a_whole_is_taken_back_with_a_snapshot(
    losses: list[float | None], settings: dict[str, Any], taken_back: bool
) -> None:
    assert verdict(losses, **{"rollback": "device", **settings}).roll_back is taken_back


@pytest.mark.parametrize(
    "settings",
    [
        {"peer_bound": 1.0}, {"peer_bound": math.nan}, {"rise_bound": 0.5}, {"rollback": "disk"},
        {"lower": 1.0}, {"attempts": 0},
    ],
)  # fmt: skip
def test_settings_are_validated(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Divergence(**settings)
