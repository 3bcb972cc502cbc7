"""Ranks: the utilities, their invariance, an honest t, and losses with heavy tails."""

from __future__ import annotations

import math
import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.core.rules import RankController, SlopeController
from hdet.core.rules.rank import utilities
from hdet.core.spread import multipliers
from tests.core.controller_runs import bowl, decide, end_of, evidence

losses = st.lists(st.floats(-50, 50), min_size=2, max_size=12)


def test_the_utilities_of_four_by_hand() -> None:
    """ln 3 - ln 1, ln 3 - ln 2, 0, 0, by their sum ln 4.5, minus a quarter; the lowest loss has the highest."""
    best, second = math.log(3) / math.log(4.5) - 0.25, math.log(1.5) / math.log(4.5) - 0.25
    assert utilities([4.0, 1.0, 2.0, 3.0]) == pytest.approx([-0.25, best, second, -0.25])


@given(losses)
def test_utilities_add_up_to_nothing_and_fall_with_the_loss(values: list[float]) -> None:
    u = utilities(values)
    assert sum(u) == pytest.approx(0, abs=1e-12)
    for (a, x), (b, y) in permutations(list(zip(values, u, strict=True)), 2):
        assert x == y if a == b else (a < b) <= (x >= y)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    start=st.floats(-4, 4).map(math.exp),
    scale=st.floats(1e-3, 1e3),
    shape=st.sampled_from([math.exp, math.atan]),
)
def test_every_increasing_function_of_the_losses_leads_to_the_same_moves(seed: int, start: float, scale: float, shape) -> None:  # type: ignore[no-untyped-def]
    def spoil(cycle: int, own: list[float | None]) -> list[float | None]:
        """Strictly increasing on the losses of these runs, which lie within (-10, 60)."""
        return [None if x is None else scale * shape(x / 10) for x in own]

    plain, other = (list(bowl(RankController(), [start], cycles=15, seed=seed, **given)) for given in ({}, {"spoil": spoil}))
    assert [values for _, _, values in plain] == [values for _, _, values in other]


def test_a_decision_reports_the_search_gradient_and_its_chance() -> None:
    rho = [0.7, 0.9, 1.1, 1.3]
    decision = decide(RankController(), evidence(multipliers=[rho], losses=[4.0, 3.0, 2.0, 1.0]))[0]
    u = utilities([4.0, 3.0, 2.0, 1.0])
    p = sum(a * math.log(b) for a, b in zip(u, rho, strict=True))
    assert decision.slope == pytest.approx(-p) and p > 0
    chance = sum(sum(a * math.log(b) for a, b in zip(order, rho, strict=True)) ** 2 for order in permutations(u)) / 24
    larger = 0
    for losses_ in permutations([1.0, 2.0, 3.0, 4.0]):
        found = decide(RankController(), evidence(multipliers=[rho], losses=list(losses_)))[0]
        assert found.error is not None and found.slope is not None
        assert found.error**2 == pytest.approx(max(found.slope**2, chance))
        larger += found.slope**2 > chance
    assert 0 < larger < 24


@pytest.mark.parametrize("together", [False, True])
def test_t_is_honest_whether_or_not_replicas_share_their_noise(together: bool) -> None:
    """Noise that is common to the line orders all replicas along it: judged as independent its t would have the variance 4 here."""
    draw, grid, squares = random.Random(1), multipliers(8, 0.3), []
    for _ in range(100):
        controller = RankController(bound=1 + 1e-12)
        for step in range(20):
            wrong = draw.gauss(0, 1)
            own = [wrong * x if together else draw.gauss(0, 1) for x in grid]
            decision = decide(controller, evidence(step=step, multipliers=[grid], losses=own))[0]
        assert decision.t is not None
        squares.append(decision.t**2)
    assert 0.5 < sum(squares) / 100 < 1.4


def test_it_finds_the_way_where_tails_are_heavy_and_means_do_not() -> None:
    """Losses with Pareto noise of index 0.6, which has no mean: spikes of thousands among slopes of one."""

    def errors(controller: type) -> list[float]:
        ends = [
            end_of(bowl(controller(), [0.1], seed=seed, cycles=80, replicas=8, tail=lambda r: 0.05 * r.paretovariate(0.6)))[0]
            for seed in range(5)
        ]
        return sorted(abs(math.log(x)) for x in ends)

    ranked, meant = errors(RankController), errors(SlopeController)
    assert ranked[-1] < 0.5 and meant[2] > 1.5
