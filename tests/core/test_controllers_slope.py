"""The pooled slope of training losses: exact without noise, an honest error also where replicas share all of their noise."""

from __future__ import annotations

import math
import random

import pytest

from hdet.core.rules import SlopeController
from hdet.core.spread import assignment, multipliers
from tests.core.controller_runs import bowl, decide, end_of, evidence


def fed(slopes: list[float], cycles: int, *, noise: float = 0.0, shared: float = 0.0, replicas: int = 4, seed: int = 0, **settings: float):  # type: ignore[no-untyped-def]
    """Decisions of a controller that is shown losses sum_k slope_k ln(rho_k), never moving (bound next to 1)."""
    draw, controller = random.Random(seed), SlopeController(bound=1 + 1e-12, **settings)
    grid, names = multipliers(replicas, 0.3), [f"k{k}" for k in range(len(slopes))]
    for cycle in range(cycles):
        rows = [[grid[i] for i in assignment(seed, cycle, name, replicas)] for name in names]
        level, wrong = draw.gauss(0, 10), [draw.gauss(0, shared) for _ in slopes]
        losses = [
            level + sum((b + w) * math.log(row[r]) for b, w, row in zip(slopes, wrong, rows, strict=True)) + draw.gauss(0, noise)
            for r in range(replicas)
        ]
        decisions = decide(controller, evidence(step=cycle, knobs=names, multipliers=rows, losses=losses))
    return decisions


@pytest.mark.parametrize(("slopes", "cycles", "replicas"), [([-0.7, 0.2], 8, 4), ([-0.5, 0.3, 0.1], 30, 3)])
def test_without_noise_the_slopes_are_exact_also_of_more_knobs_than_one_cycle_could_tell_apart(
    slopes: list[float], cycles: int, replicas: int
) -> None:
    assert [d.slope for d in fed(slopes, cycles, replicas=replicas)] == pytest.approx(slopes, abs=1e-9)


def test_knobs_that_always_move_together_are_not_told_apart() -> None:
    controller, rho = SlopeController(), multipliers(4, 0.3)
    for step in range(10):
        same = evidence(step=step, knobs=["a", "b"], multipliers=[rho, rho], losses=[math.log(x) for x in rho])
        assert [(d.factor, d.slope) for d in decide(controller, same)] == [(1.0, None)] * 2


@pytest.mark.parametrize(("noise", "shared"), [(0.05, 0.0), (0.0, 0.3), (0.03, 0.1)])
def test_t_of_the_true_slope_is_a_t(noise: float, shared: float) -> None:
    """Also with noise that all replicas share, where the residual over replicas is 0 and would make every slope significant."""
    ts = [(d.slope + 0.4) / d.error for seed in range(120) for d in fed([-0.4], 25, noise=noise, shared=shared, seed=seed)]
    assert abs(sum(ts) / 120) < 0.3
    assert 0.8 < sum(t * t for t in ts) / 120 < 1.7


def test_pooling_makes_the_error_smaller_as_far_as_the_memory_reaches() -> None:
    short, long = (fed([0.0], 60, noise=0.1, memory=memory)[0].error for memory in (0.0, 0.9))
    assert long < 0.4 * short  # sqrt((1 - 0.9) / (1 + 0.9)) = 0.23


def test_it_is_scale_free() -> None:
    """Losses in other units, and with another level, lead to the same moves."""

    def spoil(cycle: int, losses: list[float | None]) -> list[float | None]:
        return [None if x is None else 1000 * x - 7 for x in losses]

    assert end_of(bowl(SlopeController(), [0.1], spoil=spoil)) == pytest.approx(end_of(bowl(SlopeController(), [0.1])), rel=1e-6)


def test_nothing_moves_before_the_noise_is_known() -> None:
    factors = [outcome.decisions[0].factor for _, outcome, _ in bowl(SlopeController(), [0.01], noise=1e-9)]
    assert factors[:4] == [1.0] * 4 and factors[4] > 1.0


def test_what_was_found_at_another_value_fades() -> None:
    """From far below, a memory of ten cycles without fading would carry it past the best value by as many steps."""
    highest = {reach: max(v[0] for _, _, v in bowl(SlopeController(reach=reach), [0.01], noise=0.02)) for reach in (0.5, 1e9)}
    assert highest[0.5] < 1.3 and highest[1e9] > 2
