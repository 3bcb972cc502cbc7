"""What a trial says of a run: intervals and moves, by examples that were computed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from hdet.trial.rule import NO_EFFECT, NOTHING, Arm, RateInterval, Trial, arm_factor

BEST = (14 / 15, 16 / 15)
"""Mean 1, standard error 1/15: arms below 1.2 tie."""
WORSE = (1.4, 1.4)
"""Half of the way from here to 1 is at that threshold."""
TIED = (1.15, 1.15)


def by_losses(
    *losses: tuple[float, ...],
    rate: float = 100.0,
    first: float = 3.0,
    moves: float = 0.0,
    **settings: Any,
) -> Trial:
    """Arms at 1, 100, 10 000 ...; a matrix moves by ``moves`` times the rate (0: no matrix)."""
    arms = tuple(Arm(100.0**n, each, 100.0**n * moves or None) for n, each in enumerate(losses))
    return Trial(rate, arms, (first, first), **settings)


def moved(rate: float, **settings: Any) -> Trial:
    """A matrix moves by a tenth of the rate; losses say nothing."""
    return Trial(rate, (Arm(1.0, (), 0.1), Arm(10.0, (), 1.0)), **settings)


ACROSS = (Arm(1.0, (), 0.002), Arm(100.0, (), 0.2), Arm(1e4, (), 200.0))
FAR = (Arm(1.0, WORSE, 3.0), Arm(100.0, BEST, 300.0))

CASES: dict[str, tuple[Trial, float, float]] = {
    "ends lie where the loss crosses three errors": (by_losses(WORSE, BEST, WORSE), 10.0, 1000.0),
    "of several that tie, at the outermost": (
        by_losses(WORSE, BEST, TIED, WORSE), 10.0, 1e6 * 0.01**0.8),
    "open where the lowest ties": (by_losses(TIED, BEST, WORSE), 0.0, 1000.0),
    "open where the highest ties": (by_losses(WORSE, BEST, TIED), 10.0, math.inf),
    "both open": (by_losses(BEST, TIED, TIED), 0.0, math.inf),
    "beside arms that broke": (by_losses((), BEST, ()), 100.0, 100.0),
    "best at the end": (by_losses(WORSE, (1.3, 1.3), BEST), 100.0 * 100 ** (1 / 3), math.inf),
    "no arm has learned anything": (by_losses(WORSE, BEST, WORSE, first=1.19), 0.0, math.inf),
    "one has": (by_losses(WORSE, BEST, WORSE, first=1.21), 10.0, 1000.0),
    "arms on parts of a batch": (by_losses(WORSE, BEST, WORSE, smaller_batch=4.0), 20.0, 2000.0),
    "displacement beyond the arms, in proportion": (moved(1.0), 0.1, 20.0),
    "between them, in logarithms": (Trial(1.0, ACROSS), 5.0, 100 * 100 ** (1 / 3)),
    "an uncertain one raises the high end alone": (moved(1.0, uncertainty=2.0), 0.1, 40.0),
    "trained weights may hardly move": (moved(1e-6, pretrained=True), 0.0, 20.0),
    "of two that contradict the upper one holds": (Trial(1.0, FAR, (3.0, 3.0)), 0.0, 2 / 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_interval_is_of_losses_and_of_displacements(name: str) -> None:
    trial, low, high = CASES[name]
    found = trial.interval(28)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.trial.has_learned == ("no arm" not in name) or not trial.first_losses


def test_both_ends_fall_with_the_length_of_the_run() -> None:
    """The upper one not below the lower one, which is one of displacement in the last case."""
    for steps, moves, *ends in (
        (7, 0.0, 10.0, 1000.0), (28 * 1024, 0.0, 1.25, 353.55), (28 * 1024, 1.25e-5, 800.0, 800.0),
    ):  # fmt: skip
        found = by_losses(WORSE, BEST, WORSE, rate=900.0, moves=moves).interval(steps)
        assert [found.low, found.high] == pytest.approx(ends, rel=1e-4)
        assert found.reason == (INSIDE if steps < 28 else "too high for a run of this length")


@pytest.mark.parametrize(
    ("trial", "best"),
    [
        # At the best arm's 100, times 1024 ** -0.15; the weights move by 0.1 at 250.
        (by_losses(WORSE, BEST, WORSE, moves=4e-4), (100 / 8**0.5 * 250) ** 0.5),
        (by_losses(WORSE, BEST, WORSE, moves=10.0), 0.2),  # the upper end
        (by_losses(WORSE, BEST, WORSE, moves=4e-4, pretrained=True), 100 / 8**0.5),
        (by_losses(WORSE, BEST, WORSE, moves=4e-4, first=1.19), 250),
        (by_losses(WORSE, BEST, WORSE, moves=4e-4, first=1.19, pretrained=True), None),
        (by_losses(WORSE, BEST, WORSE, moves=4e-4, given_up="why"), None),
        (by_losses(BEST, BEST, moves=4e-4), None),  # nothing follows from it
        (by_losses((), ()), None),
        (moved(1.0), None),
    ],
)
def test_a_best_guess_is_between_the_best_arm_and_what_moves_the_weights(
    trial: Trial, best: float | None
) -> None:
    """It does not depend on the rate that was given."""
    for rate in (1e-3, 1e3):
        found = replace(trial, rate=rate).interval(28 * 1024)
        assert found.best == (best and pytest.approx(best))
        assert (f"without a rate of your own: {best or 0:.2g}" in str(found)) == (best is not None)
        assert not (found.trial.unmeasured and "next" in str(found))


INSIDE, NO_MOVE = "inside the interval", "hardly moves the weights"
FAR_UP = "moves the weights too far"
ABOVE, BELOW = "learned less than higher rates", "learned less than lower rates"


@pytest.mark.parametrize(
    ("trial", "to", "reason"),
    [
        (moved(0.099), 0.5, NO_MOVE),
        (moved(0.101), 0.101, INSIDE),
        (moved(19.9), 19.9, INSIDE),
        (moved(20.1), 2.7, FAR_UP),
        (moved(41.0, uncertainty=2.0), 2.7, FAR_UP),
        (moved(30.0, pretrained=True), 0.5, FAR_UP),
        (by_losses(WORSE, BEST, rate=1.0, moves=0.001, pretrained=True), 10.0, ABOVE),
        # To move the weights by 0.05 takes a rate of 5, below the interval; by 0.27, one of 2 700,
        # above it.
        (by_losses(WORSE, BEST, WORSE, rate=1.0, moves=0.01), 10.0, ABOVE),
        (by_losses(WORSE, BEST, WORSE, rate=5e3, moves=1e-4, uncertainty=100.0), 1000.0, BELOW),
        (by_losses((), (), rate=1.0), 1 / 64, "every rate that was tried broke"),
        (by_losses((), (), rate=1.0, given_up="why"), 1.0, "why"),
        (by_losses((), rate=1.0), 1.0, NOTHING),
        (by_losses(BEST, TIED, rate=1.0), 1.0, NOTHING),
        (by_losses(BEST, BEST, (), rate=1.0, moves=1e-4), 1.0, NO_EFFECT),
        (by_losses((3.0, 3.0), (), rate=1.0, moves=1e-4), 500.0, NO_MOVE),
        # They converge: no rate moves the weights by 0.01, and the upper bound holds.
        (Trial(1.0, (Arm(1.0, BEST, 0.002), Arm(100.0, TIED, 0.003)), (3.0, 3.0)), 1.0, INSIDE),
    ],
)
def test_a_rate_inside_stays_and_one_outside_goes_where_it_moves_the_weights_well(
    trial: Trial, to: float, reason: str
) -> None:
    """But not out of the interval again."""
    found = trial.interval(28)
    assert found.suggestion == pytest.approx(to) and found.reason == reason
    assert found.moves == (trial.rate != to)
    assert trial.broke == trial.needs_repeat == (reason == "every rate that was tried broke")


def test_a_displacement_off_the_scale_is_measured_again_at_a_lower_rate() -> None:
    far = [Trial(1.0, (Arm(1.0, (), distance),)).needs_repeat for distance in (64.0, 63.0)]
    assert far == [True, False]


@pytest.mark.parametrize("ends", [(WORSE, BEST, WORSE), (BEST, TIED, ())])
def test_it_comes_back_from_json(ends: tuple[tuple[float, ...], ...]) -> None:
    found = by_losses(*ends, pretrained=True, uncertainty=2.0, smaller_batch=3.0).interval(500)
    assert Trial.from_dict(json.loads(json.dumps(asdict(found.trial)))) == found.trial
    assert RateInterval.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_an_arms_rate_rises_in_5_of_28_steps_and_falls_to_nothing() -> None:
    assert [arm_factor(n) for n in (1, 5, 6, 28)] == pytest.approx([0.2, 1.0, 23 / 24, 1 / 24])


def test_it_says_what_to_do() -> None:
    assert str(moved(0.05).interval(1000)).splitlines() == [
        "learning rate: 0.05 -> 0.5 (hardly moves the weights)",
        "good rates for 1000 steps: 0.1 to 20",
    ]
    assert str(by_losses(BEST, TIED, (), first=1.1, error="what").interval(28)).splitlines() == [
        "learning rate: 1e+02 stays (nothing that was measured depends on the rate)",
        "good rates for 28 steps: none was ruled out",
        "losses after 28 steps: 1 at 1, 1.15 at 1e+02; 1 higher rates broke or fell far behind",
        "no rate has learned anything in the trial: only displacement counts",
        "what",
    ]
    assert "-> 0.5, all 3 groups x 10 (" in str(replace(moved(0.05).interval(28), groups=3))


def test_it_says_what_to_try_next_and_that_there_was_no_trial() -> None:
    more = "the best loss is at the highest rate: try 1e+02 next"
    assert more in str(by_losses(WORSE, BEST).interval(28)).splitlines()
    for other in (
        by_losses(WORSE, BEST, WORSE),
        by_losses(BEST, WORSE),
        by_losses(WORSE, BEST, ()),
    ):
        assert "next" not in str(other.interval(28))
    far = replace(by_losses(WORSE, BEST), arms=(Arm(1.0, WORSE, 0.1), Arm(100.0, BEST, 64.0)))
    assert "next" not in str(far.interval(28)), "it moves the weights too far"
    assert str(Trial(1.0, (Arm(1.0, (), 0.1),)).interval(28)).endswith(
        "no trial: only how far 28 steps move the weights counts"
    )


def test_a_plot_shows_the_arms() -> None:
    arms = (Arm(1.0, WORSE, 0.1), Arm(100.0, BEST), Arm(1e4))
    found = replace(by_losses(WORSE, BEST, (), rate=1.0), arms=arms).interval(28)
    pytest.importorskip("matplotlib").use("Agg")
    axes = found.plot()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.get_xscale() == "log" and f"now: {found.suggestion:.2g}" in labels
