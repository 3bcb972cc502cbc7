"""The hypergradient's rule: cosines in, moves out. (Whole runs: test_controllers_bowl.py.)"""

from __future__ import annotations

import math

import pytest

from hdet.core.plan import Decision
from hdet.core.rules import HypergradientRule
from tests.core.controller_runs import decide, evidence


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
    found = decide(HypergradientRule(), evidence(knobs=["a", "b"], inner=[[0.5, 0.6, 0.7, -0.6, -0.5, -0.4]]))
    assert found[0].slope == pytest.approx(0.6) and found[1].slope == pytest.approx(-0.5)
    assert found[0].factor < 1 < found[1].factor
