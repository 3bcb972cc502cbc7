"""The hypergradient's rule: cosines in, moves out; right far from the best rate, and too low at short horizons, as it says."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from hdet.core.plan import Decision
from hdet.core.rules import HypergradientRule
from tests.core.controller_runs import decide, quadratic
from tests.core.test_controllers_base import evidence


def decided(*rows: list[float] | None, **given: object) -> Decision:
    return decide(HypergradientRule(), evidence(inner=list(rows), **given))[0]


def test_a_gradient_along_the_displacement_lowers_and_one_against_it_raises() -> None:
    wave = [0.1 * (-1) ** i for i in range(8)]
    down, up = decided([0.5 + x for x in wave]), decided([-0.5 + x for x in wave])
    assert down.factor < 0.8 and up.factor > 1.2 and down.factor * up.factor == pytest.approx(1)
    assert (
        down.slope == pytest.approx(0.5) and down.error == pytest.approx(0.1 / math.sqrt(7)) and down.t == pytest.approx(5 * math.sqrt(7))
    )


def test_evidence_within_its_noise_moves_nothing() -> None:
    assert decided([0.1, -0.1, 0.2, -0.15, 0.1, -0.05]).factor == 1.0


def test_replicas_are_averaged_and_those_without_a_cosine_left_out() -> None:
    one, other = [0.5, 0.6, 0.7, 0.6], [0.3, 0.4, 0.1, 0.2]
    mean = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    assert decided(one, None, other, None) == decided(mean)


def test_without_evidence_nothing_moves() -> None:
    assert decided(None, None).note and decided(None, None).factor == 1.0
    assert decided([], []).factor == 1.0 and decided([0.5]).factor == 1.0
    assert decide(HypergradientRule(), evidence(inner=None)) == [Decision()]


def test_each_knob_has_its_own_samples() -> None:
    two = {key: [1.0, 1.0] for key in ("scheduled", "peak", "values", "corrections")}
    found = decide(HypergradientRule(), evidence(knobs=["a", "b"], inner=[[0.5, 0.6, 0.7, -0.6, -0.5, -0.4]], **two))
    assert found[0].slope == pytest.approx(0.6) and found[1].slope == pytest.approx(-0.5)
    assert found[0].factor < 1 < found[1].factor


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("start", [1e-3, 1e-2])
def test_from_far_below_it_raises_also_with_one_replica(start: float, replicas: int) -> None:
    run = quadratic(HypergradientRule(), start, cycles=20, interval=20, replicas=replicas)
    history = [engine.corrections[0] for engine, _, _ in run]
    assert history[-1] > 5 and all(b >= a for a, b in pairwise(history[:10]))


@pytest.mark.parametrize("start", [2.5, 4.0])
def test_from_far_above_it_lowers_and_saves_the_run(start: float) -> None:
    """Above 2 a step is longer than the valley is wide, and the descent diverges."""
    fixed = max(loss for _, _, loss in quadratic(None, start, cycles=20, interval=5, replicas=1))
    *_, (engine, _, controlled) = quadratic(HypergradientRule(), start, cycles=20, interval=5, replicas=1)
    assert fixed > 1e6 and start * engine.corrections[0] < 2 and controlled < 1


def test_at_short_horizons_it_votes_for_a_rate_that_is_too_low() -> None:
    """The documented bias. In 800 steps a peak of 1.6 is better than 0.8 by a factor of 3. At 0.8 a cycle of 1 % of the run says "lower"
    all the same, makes the run worse than no controller would, and one of 10 % says "higher"."""

    def loss(peak: float, interval: int, controller: HypergradientRule | None, seed: int) -> float:
        *_, (_, _, end) = quadratic(controller, peak, cycles=800 // interval, interval=interval, replicas=1, seed=seed)
        return end

    def slope(interval: int) -> float:
        """Mean while the rate is at its peak, the first eighth of the run left out, and held there."""
        found = []
        for seed in range(4):
            held = HypergradientRule(bound=1 + 1e-12)
            run = quadratic(held, 0.8, cycles=(cycles := 800 // interval), interval=interval, replicas=1, seed=seed)
            found += [o.decisions[0].slope or 0.0 for i, (_, o, _) in enumerate(run) if cycles // 8 <= i < cycles // 2]
        return sum(found) / len(found)

    best, fixed, greedy = (
        sum(loss(*case, seed) for seed in range(4)) for case in ((1.6, 20, None), (0.8, 20, None), (0.8, 8, HypergradientRule()))
    )
    assert best < 0.5 * fixed and greedy > 1.1 * fixed
    assert slope(8) > 0.1 and slope(80) < -0.03
