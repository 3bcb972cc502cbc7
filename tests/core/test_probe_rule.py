"""The probe's rule on made-up losses: signs, error bars, phases, trust, several knobs, state."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.controllers.regression import mean_and_error, slopes
from hdet.core.evidence import Evidence
from hdet.core.spread import multipliers
from tests.core import controller_runs
from tests.core.controller_runs import decide

RHO = multipliers(4, 0.3)


def evidence(
    slope: float = -1.0,
    scatter: float = 0.0,
    phase: float = 1.0,
    seed: int = 0,
    chunks: int = 8,
    correction: float = 1.0,
) -> Evidence:
    """Losses 2 + slope ln(rho), each mini-batch with its own level and its own slope error."""
    rng = random.Random(seed)
    own = [(rng.gauss(0, 1), rng.gauss(0, scatter)) for _ in range(chunks)]
    rows = [[2 + level + (slope + wrong) * math.log(rho) for level, wrong in own] for rho in RHO]
    return controller_runs.evidence(
        multipliers=[RHO],
        probes=rows,
        scheduled=[phase],
        values=[phase * correction],
        corrections=[correction],
    )


def test_the_error_covers_the_truth() -> None:
    """t of the true slope, over 400 draws of 8 mini-batches: Student's t with 7 degrees of
    freedom, variance 7/5."""
    ts = []
    for seed in range(400):
        mean, error = mean_and_error(
            slopes([RHO], evidence(-0.3, 0.5, seed=seed).measured[PROBE])[0]
        )  # type: ignore[arg-type, index]
        ts.append((mean + 0.3) / error)
    assert abs(sum(ts) / 400) < 0.2
    assert 1.0 < sum(t * t for t in ts) / 400 < 2.0


def test_several_knobs_are_fitted_jointly() -> None:
    a, b = [0.7, 0.9, 1.1, 1.3], [1.3, 0.7, 1.1, 0.9]
    rows = [[1 - 0.5 * math.log(x) + 0.25 * math.log(y)] * 2 for x, y in zip(a, b, strict=True)]
    found = slopes([a, b], rows)
    assert found is not None
    assert found[0] == pytest.approx([-0.5] * 2) and found[1] == pytest.approx([0.25] * 2)
    assert slopes([a, a], rows) is None, "two knobs with the same multipliers cannot be told apart"
    assert slopes([a], [rows[0], None, None, None]) is None


def test_with_noise_the_slopes_are_those_of_least_squares() -> None:
    """The normal equations hold, over the replicas that have losses."""
    numbers = random.Random(1)
    table = [[1 + 0.1 * numbers.random() for _ in range(20)] for _ in range(3)]
    rows = [None if r == 7 else [numbers.random() for _ in range(4)] for r in range(20)]
    found, used = slopes(table, rows), [r for r in range(20) if r != 7]
    assert found is not None
    for c in range(4):
        rest = [
            rows[r][c] - sum(found[k][c] * math.log(table[k][r]) for k in range(3)) for r in used
        ]  # type: ignore[index]
        mean = math.fsum(rest) / len(rest)
        for knob in table:
            assert math.fsum(
                (x - mean) * math.log(knob[r]) for x, r in zip(rest, used, strict=True)
            ) == pytest.approx(0, abs=1e-12)


def test_a_rise_needs_two_votes_and_a_fall_one() -> None:
    rule = ProbeRule()
    assert decide(rule, evidence(-1.0, 0.1))[0].factor == 1.0
    assert decide(rule, evidence(-1.0, 0.1))[0].factor > 1.5
    assert decide(ProbeRule(), evidence(1.0, 0.1))[0].factor < 0.7


def test_the_weaker_of_two_votes_counts() -> None:
    strong_then_weak, weak_twice = ProbeRule(), ProbeRule()
    decide(strong_then_weak, evidence(-1.0, 0.01))
    decide(weak_twice, evidence(-1.0, 0.6))
    assert (
        decide(strong_then_weak, evidence(-1.0, 0.6))[0].factor
        == decide(weak_twice, evidence(-1.0, 0.6))[0].factor
        < 2
    )


def own_noise(slope: float, seed: int, local: bool = True) -> Evidence:
    """Eight replicas, each with noise of its own, which all mini-batches see alike."""
    rng, rho = random.Random(seed), multipliers(8, 0.3)
    rng.shuffle(rho)
    own = [rng.gauss(0, 0.05) for _ in rho]
    rows = [
        [2 + slope * math.log(x) + noise + rng.gauss(0, 1e-3) for _ in range(8)]
        for x, noise in zip(rho, own, strict=True)
    ]
    return replace(
        evidence(), multipliers=[rho], losses=[1.0] * 8, measured={PROBE: rows}, local=local
    )


def test_with_gradients_of_their_own_replicas_noise_is_part_of_the_error() -> None:
    """Student's t of a knob that does nothing has a variance near 1; mini-batches alone would make
    it hundreds."""
    found = {}
    for local in (True, False):
        rule, ts = ProbeRule(), []
        for seed in range(300):
            ts.append(decide(rule, own_noise(0.0, seed, local))[0].t or 0.0)
        found[local] = sum(t * t for t in ts[5:]) / 295
    assert 0.7 < found[True] < 1.5 and found[False] > 100


def first(count: int, seen: Evidence) -> Evidence:
    """Of so many replicas alone."""
    return replace(
        seen,
        multipliers=[seen.multipliers[0][:count]],
        losses=[1.0] * count,
        measured={PROBE: seen.measured[PROBE][:count]},
    )


def test_until_the_replicas_own_noise_is_known_nothing_moves_and_afterwards_what_is_clear_does() -> (  # noqa: E501
    None
):
    rule, cycles = ProbeRule(), [own_noise(-2.0, seed) for seed in range(4)]
    assert [decide(rule, first(3, seen))[0].factor for seen in cycles[:3]] == [
        1.0
    ] * 3  # one degree of freedom a cycle
    again = ProbeRule()
    again.load_state_dict(rule.state_dict())
    assert again.noise == rule.noise and rule.noise[1] == pytest.approx(1 + 0.9 + 0.81)
    eight = ProbeRule()
    assert [decide(eight, seen)[0].factor > 1 for seen in cycles] == [
        False,
        True,
        True,
        True,
    ]  # six; a rise takes two votes


def test_with_as_many_knobs_as_can_be_told_apart_mini_batches_are_all_there_is() -> None:
    rule, two = ProbeRule(), first(2, own_noise(-2.0, 0))
    assert decide(rule, two)[0].error == decide(ProbeRule(), replace(two, local=False))[
        0
    ].error and rule.noise == [0.0, 0.0]


def test_what_was_known_of_the_noise_blocks_nothing_afterwards() -> None:
    """A replica is gone, so that nothing is free any more; or gradients are shared from a load
    on."""
    rule, two = ProbeRule(), first(2, own_noise(-2.0, 0))
    assert decide(rule, first(3, own_noise(-2.0, 0)))[0].factor == 1.0 and rule.noise[1] == 1.0
    steep = replace(
        two,
        measured={
            PROBE: [
                [2 - 50 * math.log(rho) + i * 1e-3 for i in range(8)] for rho in two.multipliers[0]
            ]
        },
    )
    decide(rule, steep)
    assert rule.noise[1] == 1.0 and decide(rule, steep)[0].t is not None
    shared = ProbeRule()
    shared.load_state_dict(rule.state_dict())
    for _ in range(3):
        (decision,) = decide(shared, replace(steep, local=False))
    assert decision.factor > 1


def test_votes_count_near_the_peak_only() -> None:
    rule = ProbeRule()
    phases = [0.1, 0.5, 0.9, 1.0, 0.97, 0.92, 0.85, 0.5]
    moved = [decide(rule, evidence(-1.0, 0.1, phase))[0].factor > 1 for phase in phases]
    assert moved == [False, False, False, True, True, True, False, False]
    assert rule.idle
    assert not ProbeRule().idle


def test_slope_and_error_are_reported_even_where_nothing_moves() -> None:
    decision = decide(ProbeRule(), evidence(-1.0, 0.1, phase=0.1))[0]
    assert decision.factor == 1.0 and decision.slope == pytest.approx(-1.0, abs=0.2)
    assert decision.error is not None and decision.t == pytest.approx(
        decision.slope / decision.error
    )


def test_a_missing_row_is_left_out_and_too_few_rows_move_nothing() -> None:
    full = evidence(1.0, 0.1)
    rows = list(full.measured[PROBE])
    three = decide(ProbeRule(), replace(full, measured={PROBE: [rows[0], None, *rows[2:]]}))[0]
    assert three.slope == pytest.approx(decide(ProbeRule(), full)[0].slope, rel=1e-9)
    rule = ProbeRule()
    decide(rule, evidence(-1.0, 0.1))
    alone = decide(rule, replace(full, measured={PROBE: [rows[0], None, None, None]}))[0]
    assert (alone.factor, alone.slope) == (1.0, None) and alone.note
    assert decide(rule, evidence(-1.0, 0.1))[0].factor == 1.0, (
        "after a gap a rise needs two votes again"
    )


def test_a_correction_outside_of_the_bound_comes_back_by_its_own_moves_only() -> None:
    """The engine lowers a correction when a cycle is taken back, further than the rule would."""
    low = 1e-3
    neutral, rise = ProbeRule(bound=10.0), ProbeRule(bound=10.0)
    assert decide(neutral, evidence(0.0, 0.1, seed=1, correction=low))[0].factor == 1.0
    assert decide(ProbeRule(bound=10.0), evidence(1.0, 0.01, correction=low))[0].factor == 1.0
    decide(rise, evidence(-1.0, 0.01, correction=low))
    assert 1.0 < decide(rise, evidence(-1.0, 0.01, correction=low))[0].factor < 2.5
