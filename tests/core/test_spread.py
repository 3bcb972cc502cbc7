"""Multipliers and assignments: refusals, and that every order is as likely. (Their values: tests/reference/test_core.py.)"""

import math

import pytest

from hdet.core.spread import assignment, multipliers


@pytest.mark.parametrize("spread", [-0.1, 1.0, 1.5, math.nan, math.inf, "0.1", None, True])
def test_a_spread_outside_zero_to_one_is_refused(spread: object) -> None:
    with pytest.raises(ValueError, match=r"spread must be a number in \[0, 1\)"):
        multipliers(4, spread)  # type: ignore[arg-type]


def test_every_order_comes_up_equally_often() -> None:
    """Chi-square over the 24 orders of 4 replicas, 4800 cycles: 99.9 % quantile of 23 degrees of freedom is 49.7."""
    counts: dict[tuple[int, ...], int] = {}
    for cycle in range(4800):
        order = tuple(assignment(7, cycle, "lr", 4))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 49.7
