"""What a trial says of a run: intervals and moves, by examples that were computed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from hdet.trial.rule import Arm, RateInterval, Trial, arm_factor

BEST = (14 / 15, 16 / 15)
"""Mean 1, standard error 0.1: arms below 1.2 tie."""
WORSE = (1.4, 1.4)
"""Half of the way from here to 1 is above 1.2."""
TIED = (1.15, 1.15)


def trial(*arms: tuple[float, tuple[float, ...], float | None], rate: float = 100.0, first: float = 3.0) -> Trial:
    return Trial(rate, tuple(Arm(*arm) for arm in arms), (first, first))


def by_losses(*losses: tuple[float, ...], rate: float = 100.0, first: float = 3.0) -> Trial:
    """Arms at 1, 100, 10 000 ...; nothing is known of displacements."""
    return trial(*((100.0**n, each, None) for n, each in enumerate(losses)), rate=rate, first=first)


def moved(rate: float, **settings: object) -> Trial:
    """A matrix moves by a tenth of the rate; losses say nothing."""
    return replace(Trial(rate, (Arm(1.0, (), 0.1), Arm(10.0, (), 1.0))), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("losses", "low", "high"),
    [
        ((WORSE, BEST, WORSE), 10.0, 1000.0),
        ((WORSE, BEST, TIED, WORSE), 10.0, None),
        ((TIED, BEST, WORSE), 0.0, 1000.0),
        ((WORSE, BEST, TIED), 10.0, math.inf),
        ((BEST, TIED, TIED), 0.0, math.inf),
        (((), BEST, ()), 100.0, 100.0),
        ((WORSE, (1.3, 1.3), BEST), 100.0 * 100 ** (1 / 3), math.inf),
    ],
)
def test_ends_are_where_the_loss_crosses_two_standard_errors(losses: tuple[tuple[float, ...], ...], low: float, high: float | None) -> None:
    found = by_losses(*losses).interval(28)
    assert found.low == pytest.approx(low)
    # from TIED at 10 000 to WORSE at 1e6 the loss rises by 0.25, of which 0.05 lie below the threshold
    assert found.high == pytest.approx(high if high is not None else 1e6 * 0.01**0.8)


def test_only_the_low_end_falls_with_the_length_of_the_run() -> None:
    found = by_losses(WORSE, BEST, WORSE).interval(28 * 1024)
    assert (found.low, found.high) == pytest.approx((10 / 8, 1000.0))
    assert by_losses(WORSE, BEST, WORSE).interval(7).low == pytest.approx(10.0), "a shorter run does not raise it"


@pytest.mark.parametrize(("first", "learned"), [(1.19, False), (1.21, True)])
def test_no_arm_that_has_learned_leaves_both_ends_open(first: float, learned: bool) -> None:
    found = by_losses(WORSE, BEST, WORSE, first=first).interval(28)
    assert found.trial.has_learned == learned and ((found.low, found.high) == (0.0, math.inf)) != learned


@pytest.mark.parametrize(
    ("rate", "to", "reason"),
    [
        (0.099, 0.5, "hardly moves the weights"), (0.201, 0.201, "inside the interval"), (19.9, 19.9, "inside the interval"),
        (20.1, 2.7, "moves the weights too far"),
    ],
)  # fmt: skip
def test_weights_are_to_move_by_1_percent_at_least_and_by_200_at_most(rate: float, to: float, reason: str) -> None:
    found = moved(rate).interval(1000)
    assert (found.low, found.high) == pytest.approx((0.1, 20.0)), "beyond the arms, in proportion"
    assert found.suggestion == pytest.approx(to) and found.reason == reason and found.moves == (rate != to)


def test_between_arms_displacements_are_interpolated_in_logarithms() -> None:
    found = Trial(1.0, (Arm(1.0, (), 0.002), Arm(100.0, (), 0.2), Arm(1e4, (), 200.0))).interval(1000)
    assert found.low == pytest.approx(5.0) and found.high == pytest.approx(100 * 100 ** (1 / 3))


def test_an_uncertain_displacement_raises_the_high_end_alone() -> None:
    assert moved(30.0, uncertainty=2.0).interval(1000).reason == "inside the interval"
    found = moved(41.0, uncertainty=2.0).interval(1000)
    assert (found.low, found.high, found.suggestion) == pytest.approx((0.1, 40.0, 2.7))


def test_trained_weights_may_hardly_move_and_go_less_far() -> None:
    assert moved(1e-6, pretrained=True).interval(1000).low == 0.0
    assert moved(30.0, pretrained=True).interval(1000).suggestion == pytest.approx(0.5)
    low = replace(by_losses(WORSE, BEST, rate=1.0), pretrained=True).interval(28)
    assert low.suggestion == pytest.approx(low.low)


@pytest.mark.parametrize(("rate", "moves", "to"), [(1.0, 1 / 100, 10.0), (5000.0, 1 / 10_000, 1000.0)])
def test_where_displacement_would_lead_out_of_the_interval_the_near_end_is_taken(rate: float, moves: float, to: float) -> None:
    """To move the weights by 0.05 takes a rate of 5; by 0.27, one of 2 700."""
    arms = trial(*((at, losses, at * moves) for at, losses in ((1.0, WORSE), (100.0, BEST), (1e4, WORSE))), rate=rate)
    assert replace(arms, uncertainty=100.0).interval(28).suggestion == pytest.approx(to)


def test_of_two_ends_that_contradict_the_upper_one_holds() -> None:
    found = trial((1.0, WORSE, 3.0), (100.0, BEST, 300.0), rate=1.0).interval(28)
    assert found.low == 0.0 and found.high == pytest.approx(2 / 3) and found.suggestion == pytest.approx(0.09)


def test_where_all_arms_broke_the_next_trial_is_far_below() -> None:
    trial = Trial(1.0, (Arm(1.0), Arm(8.0)), (3.0, 3.0))
    found = trial.interval(1000)
    assert trial.broke and (found.low, found.high, found.suggestion) == (0.0, math.inf, 1 / 64)
    assert found.reason == "every rate that was tried broke"
    assert not replace(trial, arms=trial.arms[:1]).broke, "the run's own steps, without a matrix"
    given_up = replace(trial, given_up="why")
    assert not given_up.broke and not given_up.interval(1000).moves
    assert given_up.interval(1000).reason == "why"


@pytest.mark.parametrize("ends", [(WORSE, BEST, WORSE), (BEST, TIED, ())])
def test_it_comes_back_from_json(ends: tuple[tuple[float, ...], ...]) -> None:
    found = replace(by_losses(*ends), pretrained=True, uncertainty=2.0, ceiling=3.0).interval(500)
    assert Trial.from_dict(json.loads(json.dumps(asdict(found.trial)))) == found.trial
    assert RateInterval.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_an_arms_rate_rises_in_5_of_28_steps_and_falls_to_nothing() -> None:
    assert [arm_factor(n) for n in (1, 5, 6, 28)] == pytest.approx([0.2, 1.0, 23 / 24, 1 / 24])


def test_it_says_what_to_do() -> None:
    assert str(moved(0.05).interval(1000)) == "learning rate: 0.05 -> 0.5 (hardly moves the weights)\ngood rates for 1000 steps: 0.1 to 20"
    assert str(by_losses(BEST, TIED, first=1.1).interval(28)).splitlines() == [
        "learning rate: 1e+02 stays (inside the interval)", "good rates for 28 steps: any lower rate to any higher rate",
        "losses after 28 steps: 1 at 1, 1.15 at 1e+02", "no rate has learned anything in the trial: only displacement counts",
    ]  # fmt: skip


def test_curve_and_plot_show_the_arms() -> None:
    found = trial((1.0, WORSE, 0.1), (100.0, BEST, None), (1e4, (), None), rate=1.0).interval(28)
    assert found.curve["losses"] == pytest.approx([1.4, 1.0, None]) and found.curve["displacements"] == [0.1, None, None]
    pytest.importorskip("matplotlib").use("Agg")
    axes = found.plot()
    assert axes.get_xscale() == "log" and f"now: {found.suggestion:.2g}" in [text.get_text() for text in axes.get_legend().get_texts()]
