"""A line's readings, on made-up losses: minimum, slope, edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean, stdev
from typing import Any

import pytest

from hdet.core.rules import line_search as reading
from hdet.core.rules.range_test import clear_rise

Difference = Callable[[float, float], tuple[float, float]]


def asked(function: Callable[..., Any], difference: Difference, *more: float, **settings: float) -> Any:
    """What it returns, its questions, pairs of points, being answered by ``difference``."""
    asking, answer = function(lambda a, b: (a, b), *more, **settings), None
    while True:
        try:
            answer = difference(*asking.send(answer))
        except StopIteration as end:
            return end.value


search_line, minimum, divergence_threshold = (
    partial(asked, function) for function in (reading.search_line, reading.minimum, reading.divergence_threshold)
)


def line(loss: Callable[[float], float], error: float = 1e-3) -> Callable[[float, float], tuple[float, float]]:
    """All differences with the same error."""
    return lambda a, b: (loss(a) - loss(b), (loss(a) - loss(b)) / error)


def bowl(best: float) -> Callable[[float], float]:
    """Least at ``best``; at 0 what it is far below."""
    return lambda rho: math.log(max(rho, 1e-3) / best) ** 2


@pytest.mark.parametrize(
    ("best", "found", "higher"),
    [
        (37.0, 37.0, True), (3.0, 3.0, True), (1e5, 256.0, True),  # far below the right value, up to the farthest that is scored
        (1.3, 1.3, False), (1.0, 1.0, False), (0.8, 0.8, False),
        (0.4, 0.4, False), (0.01, 0.5 / math.sqrt(2), False),  # far above: no further than half a doubling beside what was scored
    ],
)  # fmt: skip
def test_the_minimum_along_the_line_is_found(best: float, found: float, higher: bool) -> None:
    read = search_line(line(bowl(best)), 1.5, 256.0)
    assert read.rho == pytest.approx(found, rel=1e-9)
    assert read.higher is higher


def test_the_slope_is_by_the_logarithm_of_rho_and_t_has_the_direction() -> None:
    read = search_line(line(lambda rho: 3 * math.log(rho)), 1.5, 256.0)
    assert read.slope == pytest.approx(3.0) and read.t == pytest.approx(6 * math.log(2) / 1e-3)
    assert search_line(line(lambda rho: -3 * math.log(rho)), 1.5, 256.0).slope == pytest.approx(-3.0)


def test_without_a_significant_difference_nothing_is_found() -> None:
    t = bowl(1.3)(0.5) - bowl(1.3)(1.0)  # the largest, at an error of 1
    assert search_line(line(bowl(1.3), t / 1.49), 1.5, 256.0).rho is None
    assert search_line(line(bowl(1.3), t / 1.51), 1.5, 256.0).rho is not None


def test_a_large_step_shows_what_a_small_one_hides() -> None:
    """Neither of 1/2 and 2 is significant, but 8 is."""
    difference = line(bowl(1000.0), error=8.0)
    assert difference(2.0, 1.0)[1] > -1.5
    read = search_line(difference, 1.5, 256.0)
    assert read.higher and read.rho == 256.0


def test_losses_that_are_not_finite_count_as_very_high() -> None:
    """The controller clamps them to 1e30."""
    nowhere = search_line(line(lambda rho: 1e30 if rho else 2.0), 1.5, 256.0)
    assert (nowhere.rho, nowhere.higher) == (None, False)
    beyond = search_line(line(lambda rho: 1e30 if rho >= 2 else bowl(0.6)(rho)), 1.5, 256.0)
    assert beyond.rho is not None and beyond.rho < 1 and not beyond.higher
    cliff = search_line(line(lambda rho: 1e30 if rho >= 16 else -rho), 1.5, 256.0)
    assert cliff.higher and cliff.rho is not None and 8 / math.sqrt(2) <= cliff.rho <= 8


@pytest.mark.parametrize("best", [0.75, 0.8, 1.0, 1.3, 1.41])
def test_the_parabola_is_by_the_logarithm(best: float) -> None:
    for unit in (1.0, 64.0, 1e-3):
        assert minimum(line(lambda rho, unit=unit: math.log(rho / (best * unit)) ** 2), unit) == pytest.approx(best * unit)


@pytest.mark.parametrize("distance", [4.0**k for k in (-15, -9, -3, -1, 0, 1, 2, 7, 15)])
def test_the_threshold_is_the_first_step_of_2_above_the_beginning(distance: float) -> None:
    """A parabola through its beginning, lowest at 3/4 of ``distance`` and above from 3/2 of that on."""
    assert divergence_threshold(line(lambda rho: rho / distance * (rho / distance - 1.5), error=1e-6)) == 2 * distance


def test_the_threshold_is_no_matter_of_noise() -> None:
    """At 4 it is above the beginning by 8, which is clear at an error of 3, and not at one of 4."""
    assert divergence_threshold(line(lambda rho: rho * (rho - 2), error=3.0)) == 4.0
    assert divergence_threshold(line(lambda rho: rho * (rho - 2), error=4.0)) == 8.0


def test_a_line_without_a_threshold_ends_at_the_farthest_and_one_that_rises_everywhere_at_the_nearest() -> None:
    assert divergence_threshold(line(lambda rho: -rho), farthest=4.0**5) == 4.0**5
    assert divergence_threshold(line(lambda rho: 1e30 if rho else 2.0), farthest=4.0**5) == 0.5 * 4.0**-5
    assert divergence_threshold(line(lambda rho: 0.0), farthest=4.0**5) == 4.0**5


def examples(loss: Callable[[float, int], float], count: int) -> Callable[[float, float], tuple[float, float]]:
    """Mean and paired t of ``loss(rho, example)``, as of real examples."""

    def difference(a: float, b: float) -> tuple[float, float]:
        d = [loss(a, i) - loss(b, i) for i in range(count)]
        return fmean(d), fmean(d) / (stdev(d) / math.sqrt(count))

    return difference


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
def test_where_one_example_explodes_the_threshold_is_where_the_mean_is_far_above_its_beginning(count: int) -> None:
    """The others' losses fall a bit. Its own makes the mean and its error, so t is 1, and no edge was seen in front of the farthest."""

    def loss(rho: float, i: int) -> float:
        return 1.0 + 0.01 * i + (rho**2 if i == 0 else -1e-3 * min(rho, 10.0))

    difference = examples(loss, count)
    assert difference(4.0**10, 0.0)[1] == pytest.approx(1.0, abs=0.01) and divergence_threshold(difference, farthest=4.0**12) == 4.0**12
    level, error = fmean(loss(0.0, i) for i in range(count)), 0.01 * count / math.sqrt(12 * count)
    found = divergence_threshold(difference, rise=clear_rise(level, error))
    assert math.sqrt(count) < found < 4 * math.sqrt(2 * count)


def test_a_rise_that_is_far_and_one_that_is_significant_are_both_a_threshold() -> None:
    assert divergence_threshold(line(lambda rho: rho * (rho - 2), error=4.0), rise=100.0) == 8.0  # t, as without
    assert divergence_threshold(line(lambda rho: rho * (rho - 2), error=1e9), rise=100.0) == 16.0
    far = line(lambda rho: 7e15 * rho, error=7e16)  # at 1, where the search begins: down, to below 2 / 7e15
    assert divergence_threshold(far) == 32.0 and 1e-16 < divergence_threshold(far, rise=2.0, farthest=4.0**30) < 2e-15
