"""The probe's rule on made-up losses: signs, error bars, phases, trust, several knobs, state."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from operator import mul, sub

import pytest

from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.controllers.regression import mean_and_error, slopes
from hdet.core.evidence import Evidence
from hdet.core.spread import multipliers
from tests.core import controller_runs

RHO = multipliers(4, 0.3)


def evidence(
    slope: float = -1.0,
    scatter: float = 0.1,
    phase: float = 1.0,
    seed: int = 0,
    correction: float = 1.0,
) -> Evidence:
    """Losses 2 + slope ln(rho), each of 8 mini-batches with its own level and its own slope
    error."""
    rng = random.Random(seed)
    own = [(rng.gauss(0, 1), rng.gauss(0, scatter)) for _ in range(8)]
    rows = [[2 + level + (slope + wrong) * math.log(rho) for level, wrong in own] for rho in RHO]
    return controller_runs.evidence(
        rows, multipliers=[RHO], scheduled=[phase], corrections=[correction]
    )


def factors(rule: ProbeRule, cycles: Sequence[Evidence]) -> list[float]:
    return [rule.learn(cycle)[0].factor for cycle in cycles]


# -- regression ------------------------------------------------------------------------------------


def test_the_error_covers_the_truth() -> None:
    """t of the true slope, over 400 draws of 8 mini-batches: Student's t with 7 degrees of
    freedom, variance 7/5."""
    ts = []
    for seed in range(400):
        found = slopes([RHO], evidence(-0.3, 0.5, seed=seed).measured[PROBE])
        assert found is not None
        mean, error = mean_and_error(found[0])
        ts.append((mean + 0.3) / error)
    assert abs(sum(ts) / 400) < 0.2
    assert 1.0 < sum(t * t for t in ts) / 400 < 2.0


def test_knobs_that_cannot_be_told_apart_have_no_slopes() -> None:
    rows = [[1 - 0.5 * math.log(rho)] * 2 for rho in RHO]
    assert slopes([RHO], rows) == [pytest.approx([-0.5] * 2)]
    assert slopes([RHO, RHO], rows) is None
    assert slopes([RHO], [rows[0], None, None, None]) is None


def test_with_noise_the_slopes_are_those_of_least_squares() -> None:
    """The normal equations hold, over the replicas that have losses."""
    numbers = random.Random(1)
    table = [[1 + 0.1 * numbers.random() for _ in range(20)] for _ in range(3)]
    rows = [[numbers.random() for _ in range(4)] for r in range(20)]
    found = slopes(table, [None if r == 7 else row for r, row in enumerate(rows)])
    assert found is not None
    logs = [[math.log(rho) for r, rho in enumerate(knob) if r != 7] for knob in table]
    for fits, losses in zip(zip(*found, strict=True), zip(*rows, strict=True), strict=True):
        own = [loss for r, loss in enumerate(losses) if r != 7]
        explained = [sum(map(mul, fits, x)) for x in zip(*logs, strict=True)]
        rest = list(map(sub, own, explained))
        mean = math.fsum(rest) / len(rest)
        for knob in logs:
            products = [(x - mean) * log for x, log in zip(rest, knob, strict=True)]
            assert math.fsum(products) == pytest.approx(0, abs=1e-12)


# -- votes -----------------------------------------------------------------------------------------


def test_a_rise_needs_two_votes_and_a_fall_one() -> None:
    first, second = factors(ProbeRule(), [evidence()] * 2)
    assert first == 1.0 and second > 1.5
    assert factors(ProbeRule(), [evidence(1.0)])[0] < 0.7
    (flat,) = ProbeRule().learn(evidence(0.0, scatter=0.0))
    assert (flat.t, flat.factor) == (0.0, 1.0)


def test_the_weaker_of_two_votes_counts() -> None:
    strong, weak = evidence(scatter=0.01), evidence(scatter=0.6)
    assert factors(ProbeRule(), [strong, weak])[1] == factors(ProbeRule(), [weak, weak])[1] < 2


def test_votes_count_near_the_peak_only() -> None:
    rule = ProbeRule()
    assert not rule.idle
    moved = factors(rule, [evidence(phase=p) for p in (0.1, 0.5, 0.9, 1, 0.97, 0.92, 0.85, 0.5)])
    assert [factor > 1 for factor in moved] == [False] * 3 + [True] * 3 + [False] * 2
    assert rule.idle
    (unmoved,) = ProbeRule().learn(evidence(phase=0.1))
    assert unmoved.slope == pytest.approx(-1.0, abs=0.2) and unmoved.error is not None
    assert unmoved.t == pytest.approx(unmoved.slope / unmoved.error)


def test_a_missing_row_is_left_out_and_too_few_rows_move_nothing() -> None:
    full = evidence(1.0)
    rows = list(full.measured[PROBE])
    three = replace(full, measured={PROBE: [rows[0], None, *rows[2:]]})
    all_four = ProbeRule().learn(full)[0].slope
    assert ProbeRule().learn(three)[0].slope == pytest.approx(all_four, rel=1e-9)
    rule = ProbeRule()
    rule.learn(evidence())
    (alone,) = rule.learn(replace(full, measured={PROBE: [rows[0], None, None, None]}))
    assert (alone.factor, alone.slope) == (1.0, None) and alone.note
    assert factors(rule, [evidence()]) == [1.0], "after a gap a rise needs two votes again"


def test_a_correction_outside_of_the_bound_comes_back_by_its_own_moves_only() -> None:
    """The engine lowers a correction when a cycle is taken back, further than the rule would."""
    cases = {0.0: 0.1, 1.0: 0.01, -1.0: 0.01}
    for slope, scatter in cases.items():
        low = evidence(slope, scatter, seed=1, correction=1e-3)
        _, second = factors(ProbeRule(bound=10.0), [low, low])
        assert 1.0 < second < 2.5 if slope < 0 else second == 1.0


# -- gradients of their own ------------------------------------------------------------------------


def own_noise(slope: float, seed: int, local: bool = True, count: int = 8) -> Evidence:
    """Eight replicas, or the first so many of them, each with noise of its own, which all
    mini-batches see alike."""
    rng, rho = random.Random(seed), multipliers(8, 0.3)
    rng.shuffle(rho)
    own = [rng.gauss(0, 0.05) for _ in rho]
    rows = [
        [2 + slope * math.log(x) + noise + rng.gauss(0, 1e-3) for _ in range(8)]
        for x, noise in zip(rho, own, strict=True)
    ]
    return controller_runs.evidence(
        rows[:count], multipliers=[rho[:count]], losses=[1.0] * count, local=local
    )


def test_with_gradients_of_their_own_replicas_noise_is_part_of_the_error() -> None:
    """Student's t of a knob that does nothing has a variance near 1; mini-batches alone would make
    it hundreds."""
    found = {}
    for local in (True, False):
        rule = ProbeRule()
        ts = [rule.learn(own_noise(0.0, seed, local))[0].t or 0.0 for seed in range(300)]
        found[local] = sum(t * t for t in ts[5:]) / 295
    assert 0.7 < found[True] < 1.5 and found[False] > 100


def test_until_the_replicas_own_noise_is_known_nothing_moves() -> None:
    """Three replicas have one degree of freedom a cycle, eight have six."""
    rule, again, seeds = ProbeRule(), ProbeRule(), range(4)
    assert factors(rule, [own_noise(-2.0, seed, count=3) for seed in seeds[:3]]) == [1.0] * 3
    again.load_state_dict(rule.state_dict())
    assert again.noise == rule.noise and rule.noise[1] == pytest.approx(1 + 0.9 + 0.81)
    moved = [factor > 1 for factor in factors(ProbeRule(), [own_noise(-2.0, s) for s in seeds])]
    assert moved == [False, True, True, True]  # a rise takes two votes


def test_what_was_known_of_the_noise_blocks_nothing_afterwards() -> None:
    """A replica is gone, so that nothing is free any more; or gradients are shared from a load
    on."""
    rule, two = ProbeRule(), own_noise(-2.0, 0, count=2)
    shared_error = ProbeRule().learn(replace(two, local=False))[0].error
    assert rule.learn(two)[0].error == shared_error and rule.noise == [0.0, 0.0]
    assert factors(rule, [own_noise(-2.0, 0, count=3)]) == [1.0] and rule.noise[1] == 1.0
    rows = [[2 - 50 * math.log(rho) + i * 1e-3 for i in range(8)] for rho in two.multipliers[0]]
    steep = replace(two, measured={PROBE: rows})
    rule.learn(steep)
    assert rule.noise[1] == 1.0 and rule.learn(steep)[0].t is not None
    shared = ProbeRule()
    shared.load_state_dict(rule.state_dict())
    assert factors(shared, [replace(steep, local=False)] * 3)[-1] > 1
