"""The verdict on a cycle, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.core.divergence import Divergence, judge

ALL = [True] * 4


def verdict(
    losses: list[float | None],
    before: float | None = 1.0,
    finite: list[bool] = ALL,
    **settings: Any,
) -> Any:
    return judge(Divergence(**settings), finite, losses, before)


ODD = [0.1, 4.2, 0.1, 0.1]


@pytest.mark.parametrize(
    ("losses", "settings", "healthy"),
    [
        # 4.2 is above 4 times the peers' median and the last cycle's level, 1
        (ODD, {}, [0, 2, 3]),
        (ODD, {"before": None}, [0, 1, 2, 3]),  # nothing is known yet
        (ODD, {"peer_bound": None}, [0, 1, 2, 3]),
        # a scaler may have skipped the steps: parameters are whole
        ([math.nan] * 4, {}, [0, 1, 2, 3]),
    ],
)
def test_who_is_averaged(losses: Any, settings: dict[str, Any], healthy: list[int]) -> None:
    assert verdict(losses, **settings).healthy == healthy


GOOD, BAD = st.floats(0.1, 1.5), st.sampled_from([math.nan, math.inf, -math.inf, 99.0])
CYCLES = st.lists(st.tuples(st.booleans(), st.one_of(GOOD, BAD, st.none())), min_size=2, max_size=8)


@given(CYCLES, st.randoms(), st.sampled_from([0.125, 1.0, 16.0]))
def test_a_verdict_is_of_replicas_and_neither_of_their_numbers_nor_of_a_unit(
    cycle: Any, random: Any, unit: float
) -> None:
    order, settings = random.sample(range(len(cycle)), len(cycle)), Divergence(rollback="host")
    found = judge(settings, *zip(*cycle, strict=True), 1.0)
    rows = [(good, loss and unit * loss) for good, loss in (cycle[r] for r in order)]
    turned = judge(settings, *zip(*rows, strict=True), unit)
    assert sorted(order[r] for r in turned.healthy) == found.healthy
    assert (turned.roll_back, turned.level) == (found.roll_back, found.level and unit * found.level)
    finite = {r for r, (good, _) in enumerate(cycle) if good}
    assert set(found.healthy) <= finite and bool(found.healthy) == bool(finite)
    noted = {int(note.split()[1]) for note in found.notes if note.startswith("replica")}
    assert noted == set(range(len(cycle))) - set(found.healthy)


@given(st.lists(GOOD, min_size=2, max_size=8), st.integers(0, 7), st.floats(6.1, 1e6))
def test_one_far_above_its_peers_and_the_last_cycle_is_left_out(
    losses: list[float], place: int, far: float
) -> None:
    losses[place % len(losses)] = 1.5 * far
    found = judge(Divergence(), [True] * len(losses), losses, 1.5)
    assert {*range(len(losses))} - {*found.healthy} == {place % len(losses)}


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
        ([-4.0, -1.0, -4.0, -4.0], {"before": -4.0}, False),  # a ratio says nothing below 0
    ],
)
def test_a_cycle_that_rose_or_broke_as_a_whole_is_taken_back_with_a_snapshot(
    losses: list[float | None], settings: dict[str, Any], taken_back: bool
) -> None:
    assert verdict(losses, **{"rollback": "device", **settings}).roll_back is taken_back
