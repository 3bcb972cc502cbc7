"""What doublings of a sweep say, on made-up ones: where training broke, what is sufficient, and what is only noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.core.rules import range_test as sweep
from hdet.core.rules.range_test import AMPLE, BREAK_OVER_MEAN, SUFFICIENT_OVER_MEAN, Doubling, Outcome, clear_rise


def doublings(losses: Sequence[float], error: float = 0.01, rate: float = 1.0) -> list[Doubling]:
    return [Doubling(rate * 2.0**i, loss, error) for i, loss in enumerate(losses)]


def outcome(swept: Sequence[Doubling], untrained: float | None = None) -> Outcome:
    """The untrained model's loss is that of the first doubling, if nothing else is said."""
    first = swept[0].loss if untrained is None else untrained
    return sweep.outcome(Doubling(0.0, first if math.isfinite(first) else 3.0, swept[0].error), swept)


def course(losses: Sequence[float], error: float = 0.01) -> tuple[int, Outcome]:
    """As the rule asks, doubling by doubling: how many until it is over (all, if it is not), and what it says then."""
    for count in range(1, len(losses) + 1):
        found = outcome(doublings(losses[:count], error))
        if found.over:
            return count, found
    return len(losses), found


FALLS = [3.0, 2.9, 2.7, 2.3, 1.9, 1.8]
"""85 % of the gain are reached at 1.98, between the rates 8 and 16."""
SUFFICIENT = 8 * 2 ** ((2.3 - 1.98) / (2.3 - 1.9))


def broken_at(lost: float) -> float:
    """Half of the gain is lost at 2.4, between the rates 32 (1.8) and 64 (``lost``, at most 3)."""
    return 32 * 2 ** ((2.4 - 1.8) / (lost - 1.8))


@pytest.mark.parametrize("gone", [math.inf, math.nan, 3.5, 1e30])
def test_what_is_not_finite_or_more_than_there_was_breaks_at_once(gone: float) -> None:
    count, found = course([*FALLS, gone, 1.0])
    assert (count, found.over, found.broke) == (7, True, True)
    assert found.best == pytest.approx(broken_at(3.0) / BREAK_OVER_MEAN) and found.best < AMPLE * SUFFICIENT


@pytest.mark.parametrize("gone", [math.inf, math.nan])
def test_the_first_doubling_can_break_too(gone: float) -> None:
    assert outcome(doublings([gone])) == Outcome(True, pytest.approx(1 / BREAK_OVER_MEAN), True, False)


@pytest.mark.parametrize("lost", [2.5, 2.9])
def test_more_than_half_of_the_gain_lost_in_two_doublings_is_a_break_and_in_one_is_noise(lost: float) -> None:
    """The break is where the first of them was, between the doubling before it and it."""
    count, found = course([*FALLS, lost, lost])
    assert (count, found.broke) == (8, True)
    assert found.best == pytest.approx(broken_at(lost) / BREAK_OVER_MEAN)
    assert not outcome(doublings([*FALLS, lost])).over
    alone = [*FALLS, lost, 1.7, lost, 1.6]
    assert course(alone) == (len(alone), outcome(doublings(alone))) and not outcome(doublings(alone)).over


@pytest.mark.parametrize(("error", "ends"), [(0.01, 8), (0.05, 9)])
def test_two_losses_within_their_errors_are_no_break_three_are_and_the_first_tells_the_rate(error: float, ends: int) -> None:
    """2.4 is half of the gain; 2.45 and 2.5 are clear of it at errors of 0.01, not of 0.05 (twice 0.07)."""
    count, found = course([*FALLS, 2.45, 2.5, 2.5, 2.9, 2.9], error)
    assert (count, found.broke) == (ends, True)
    assert found.best == pytest.approx(broken_at(2.45) / BREAK_OVER_MEAN)
    assert not outcome(doublings([*FALLS, 2.45, 2.5, 2.0, 2.9], error=0.05)).broke  # it was won back


def test_less_than_half_of_the_gain_is_no_break() -> None:
    count, found = course([*FALLS, 2.3, 2.3, 2.3])
    assert found.over and not found.broke and count < 9


def test_a_break_long_after_all_was_learned_says_no_more_than_is_sufficient() -> None:
    """All is learned at the second doubling's rate, 2; the break is at 64."""
    falls = [2.0, 0.2, 0.2, 0.2, 0.2, 0.2]
    _, found = course([*falls, math.inf], 0.1)
    sufficient = 2 ** (0.85)
    assert outcome(doublings(falls, 0.1)).best == pytest.approx(sufficient / SUFFICIENT_OVER_MEAN)
    assert found.broke and found.best == pytest.approx(AMPLE * sufficient) and found.best < 32 * math.sqrt(2) / BREAK_OVER_MEAN


def test_a_break_before_anything_was_learned_counts_by_itself() -> None:
    count, found = course([2.0, 2.0, 2.0, 2.001, 9.0, 9.0])
    assert (count, found.broke, found.learned) == (6, True, False) and found.best == pytest.approx(16 / BREAK_OVER_MEAN)


@pytest.mark.parametrize(("error", "patience"), [(0.001, 2), (0.1, 5)])
def test_a_plateau_is_seen_sooner_where_errors_are_small(error: float, patience: int) -> None:
    """0.05 of the gain, which is 1.2, is progress. An error that could hide it makes for more patience."""
    count, found = course([*FALLS, *[1.8] * 9], error)
    assert (count, found.broke) == (len(FALLS) + patience, False)
    assert found.best == pytest.approx(SUFFICIENT / SUFFICIENT_OVER_MEAN)


def test_slow_progress_is_progress() -> None:
    slow = [*FALLS, *(1.8 - 0.1 * i for i in range(1, 9))]
    assert not outcome(doublings(slow, 0.001)).over


@pytest.mark.parametrize("losses", [[2.0] * 15, [2.0, 2.01, 1.99, 2.02, 2.0, 1.98] * 3])
def test_where_nothing_is_learned_and_nothing_breaks_there_is_no_estimate(losses: list[float]) -> None:
    assert outcome(doublings(losses)) == Outcome(False, None, False, False)


def test_what_is_sufficient_lies_between_doublings_by_the_logarithm() -> None:
    over = SUFFICIENT_OVER_MEAN
    assert outcome(doublings(FALLS)).best == pytest.approx(SUFFICIENT / over)
    # 85 % of a gain of 2 are reached exactly at 2, and half way there from 1.
    assert outcome(doublings([2.0, 0.3, 0.0])).best == pytest.approx(2.0 / over)
    assert outcome(doublings([2.0, -1.4, -0.0, -0.0])).best == pytest.approx(2**0.85 / over)


def test_what_the_first_doubling_learned_counts_too() -> None:
    """The untrained model's loss is that of its own batch; the first doubling's stands for it where that is higher."""
    known = outcome(doublings(FALLS[2:]), 3.0)
    assert known.best == pytest.approx(SUFFICIENT / 4 / SUFFICIENT_OVER_MEAN)
    assert outcome(doublings(FALLS), 2.0) == outcome(doublings(FALLS), 3.0)


EXPLODED = 7e15


def exploding(count: int, before: Sequence[float] = FALLS, untrained: float = 3.0) -> Outcome:
    """The losses of a few examples explode: a doubling's mean, and its error with it."""
    swept = [*doublings(before), *(Doubling(2.0 ** (len(before) + i), EXPLODED, EXPLODED) for i in range(count))]
    return sweep.outcome(Doubling(0.0, untrained, 0.01), swept, clear_rise(untrained, 0.01))


def test_a_loss_that_explodes_is_a_break_although_its_error_explodes_with_it() -> None:
    """Two such doublings: one may be a mini-batch's. By standard errors alone it took a third, or nothing at all where nothing had been learned."""
    assert not exploding(1).over
    found = exploding(2)
    assert (found.over, found.broke, found.learned) == (True, True, True) and found.best == pytest.approx(broken_at(3.0) / BREAK_OVER_MEAN)
    plain = sweep.outcome(
        Doubling(0.0, 3.0, 0.01), [*doublings([3.0] * 4), *(Doubling(2.0 ** (4 + i), EXPLODED, EXPLODED) for i in range(9))]
    )
    unlearned = exploding(2, [3.0] * 4)
    assert not plain.over and (unlearned.over, unlearned.broke, unlearned.learned) == (True, True, False)
    assert unlearned.best == pytest.approx(16 / BREAK_OVER_MEAN)


def test_a_first_doubling_that_explodes_is_nothing_to_gain_from() -> None:
    """What comes after it had then learned nearly all that there was."""
    first = [Doubling(1.0, EXPLODED, EXPLODED), Doubling(2.0, EXPLODED / 100, EXPLODED / 100)]
    found = sweep.outcome(Doubling(0.0, 3.0, 0.01), first, clear_rise(3.0, 0.01))
    assert (found.over, found.broke, found.learned) == (True, True, False) and found.best == pytest.approx(1 / BREAK_OVER_MEAN)


def test_a_rise_is_clear_where_the_loss_has_doubled_and_is_beyond_its_error() -> None:
    assert clear_rise(2.0, 0.0) == 2.0 and clear_rise(0.0, 0.1) == pytest.approx(0.8) and clear_rise(-3.0, 0.1) == pytest.approx(3.8)


losses = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15)


@given(losses, st.floats(1e-4, 1.0), st.integers(-30, 30), st.integers(-10, 10), st.floats(-100, 100))
def test_units_do_not_matter(given_losses: list[float], error: float, rate: int, scale: int, offset: float) -> None:
    """Rates and losses times powers of two, which is exact, leave the outcome; an offset of the losses does to rounding."""
    plain = outcome(doublings(given_losses, error))
    other = outcome(doublings([x * 2.0**scale for x in given_losses], error * 2.0**scale, 2.0**rate))
    assert (other.over, other.broke) == (plain.over, plain.broke)
    assert other.best == (None if plain.best is None else pytest.approx(plain.best * 2.0**rate))
    rounded = [round(x * 64) / 64 for x in given_losses]
    shifted = outcome(doublings([x + round(offset) for x in rounded], error))
    straight = outcome(doublings(rounded, error))
    assert (shifted.over, shifted.broke) == (straight.over, straight.broke)
    assert shifted.best == (None if straight.best is None else pytest.approx(straight.best, rel=1e-6))


@given(losses, st.floats(1e-4, 1.0), st.integers(0, 14))
def test_an_estimate_is_among_the_rates_that_were_swept_and_later_doublings_do_not_change_what_is_over(
    given_losses: list[float], error: float, place: int
) -> None:
    given_losses = [*given_losses[:place], math.inf, *given_losses[place:]] if place % 2 else given_losses
    count, found = course(given_losses, error)
    if found.best is not None:
        assert 1 / BREAK_OVER_MEAN / (1 + 1e-9) <= found.best <= 2.0 ** (count - 1) * (1 + 1e-9)
    assert found.over or not found.broke
    if found.over:
        assert outcome(doublings(given_losses, error)) == found
