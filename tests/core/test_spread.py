"""Multipliers and assignments: symmetry, bounds, permutations, refusals."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.core.spread import assignment, multipliers

spreads = st.floats(0, 0.99)
counts = st.integers(1, 64)


@given(counts, spreads)
def test_multipliers_are_symmetric_around_one_and_bounded(count: int, spread: float) -> None:
    rho = multipliers(count, spread)
    assert math.fsum(rho) == pytest.approx(count, rel=1e-12)
    assert min(rho) >= 1 - spread - 1e-12 and max(rho) <= 1 + spread + 1e-12
    assert all(a + b == pytest.approx(2, rel=1e-12) for a, b in zip(rho, reversed(rho), strict=True))
    if count > 1:
        assert max(rho) == pytest.approx(1 + spread, rel=1e-12)
    assert multipliers(count, 0.0) == [1.0] * count


@pytest.mark.parametrize("spread", [-0.1, 1.0, 1.5, math.nan, math.inf, "0.1", None, True])
def test_a_spread_outside_zero_to_one_is_refused(spread: object) -> None:
    with pytest.raises(ValueError, match=r"spread must be a number in \[0, 1\)"):
        multipliers(4, spread)  # type: ignore[arg-type]


@given(st.integers(0, 2**31), st.integers(0, 10_000), st.sampled_from(["lr", "lr/matrices", "wd"]), counts)
def test_an_assignment_is_a_permutation_and_a_function_of_its_key(seed: int, cycle: int, knob: str, count: int) -> None:
    places = assignment(seed, cycle, knob, count)
    assert sorted(places) == list(range(count))
    random.random()  # whatever the user draws in between
    assert places == assignment(seed, cycle, knob, count)


def test_every_order_comes_up_equally_often() -> None:
    """Chi-square over the 24 orders of 4 replicas, 4800 cycles: 99.9 % quantile of 23 degrees of freedom is 49.7."""
    counts: dict[tuple[int, ...], int] = {}
    for cycle in range(4800):
        order = tuple(assignment(7, cycle, "lr", 4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 49.7
