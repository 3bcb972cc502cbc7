"""The rule of trials without tensors, decision by decision. (Whole runs: tests/controllers/test_auto.py.)"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.core.evidence import Run
from hdet.core.plan import Moment, Plan, Restore, SnapshotOf
from hdet.core.rules.trial_rule import ALONE, BROKEN, CHECKS, FEWEST, RAISED, SCAN, TRIALS, WITHIN, TrialRule
from hdet.measure.trials import arm
from tests.core.controller_runs import evidence

TOTAL = 10_000
CYCLE = {"total_steps": TOTAL, "sync_interval": 50, "knobs": ["lr", "decay"], "multipliers": [[1.0], [1.0]], "losses": [4.0]}
NOISE = [0.001, -0.001, 0.0005, -0.0005]


def started(total: int = TOTAL, **settings: Any) -> TrialRule:
    rule = TrialRule(**settings)
    rule.start(Run(Clock(50, 0, total), [KnobSpec("lr", 0.0), KnobSpec("decay", 0.0, rate=False)], 1, [0.0, 0.0]))
    return rule


def scored(arms: Sequence[float], scores: int) -> list[float]:
    """A row in which each arm's losses differ by some thousandths from batch to batch, alike for all arms, and a little by themselves."""
    return [loss + 0.1 * NOISE[i % 4] * (a + 1) + 10 * NOISE[(i // 2) % 4] for a, loss in enumerate(arms) for i in range(scores)]


def tell(
    rule: TrialRule, plan: Plan, step: int, arms: Sequence[float] | None, correction: float = 1.0, broke: bool = False, **more: Any
) -> Any:
    """What it learns from a cycle whose arms have these losses: (octaves, note, ending)."""
    scores = plan.measure[TRIALS]["scores"] if plan.measure else 1
    rows = {TRIALS: [[float(broke), *scored(arms, scores)]]} if arms is not None and plan.measure else {}
    values = {"peak": [1e-3, 0.1], "scheduled": [1e-3, 0.1], "values": [correction * 1e-3, 0.1], "corrections": [correction, 1.0]}
    learned = rule.learn(evidence(**{**CYCLE, **values, "step": step, "measured": rows, **more}))
    lr, decay = learned.decisions  # type: ignore[union-attr]
    assert decay.factor == 1 and decay.value is None
    return math.log2(lr.factor), lr.note, learned.end  # type: ignore[union-attr]


def at(rule: TrialRule, step: int) -> Plan:
    return rule.plan(Moment(0, step, step))


def past_scan(**settings: Any) -> TrialRule:
    rule = started(**settings)
    tell(rule, at(rule, 0), 36, [3.0, 2.5, 2.8])
    assert rule.rounds[rule.round] == CHECKS[0]
    return rule


# -- what it may take ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "budget", "rounds"), [
    (1500, 0.03, []), (4000, 0.03, [ALONE]), (10_000, 0.03, [SCAN, *CHECKS[:2]]), (30_000, 0.03, [SCAN, *CHECKS]), (1500, 0.2, [SCAN, *CHECKS[:2]]),
])  # fmt: skip
def test_a_short_run_has_few_rounds_or_none(total: int, budget: float, rounds: list[Any]) -> None:
    rule = started(total, budget=budget)
    assert list(rule.rounds) == rounds and rule.idle == (not rounds)
    assert ("stays" if not rounds else f"trials from steps {math.ceil(rounds[0].at * total)}") in rule.report()


@pytest.mark.parametrize("arms", [[3.0, 2.5, 2.8], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0], None])
@pytest.mark.parametrize("total", [3000, 10_000, 30_000, 300_000])
def test_the_budget_holds_whatever_arms_score(total: int, arms: list[float] | None) -> None:
    rule, step, planned = started(total), 0, 0.0
    while step < total:
        plan = at(rule, step)
        length = min(plan.steps or 50, total - step)
        step += length
        if not plan.measure:
            assert not plan.snapshots and not plan.spread
            continue
        settings = plan.measure[TRIALS]
        assert length == settings["steps"] + settings["scores"] and settings["steps"] >= FEWEST and len(plan.measure) == 1
        number = len(settings["multiples"])
        planned += number * (settings["steps"] + settings["scores"] / 3)
        tell(rule, plan, step, None if arms is None else arms[:number], total_steps=total)
    assert rule.idle and planned == pytest.approx(rule.spent) and 0.3 * 0.03 * total < planned <= 0.03 * total + 1e-9


def test_a_trial_that_is_lost_is_paid_for() -> None:
    rule = started()
    at(rule, 0)
    rule.restart(Moment(0, 10, 10))
    assert rule.spent > 90 and rule.used == 0
    assert at(rule, 10) == Plan(steps=1, spread=False)  # the cycle that was under way ends at once
    assert at(rule, 11).measure


def test_the_budget_counts_the_judges_batches_and_the_optimizers_steps() -> None:
    many, few = started(judged=300), started(judged=6)
    assert not many.rounds and len(few.rounds) == 3
    rule = past_scan()
    half = rule.plan(Moment(0, 300, 600)).measure  # the schedule steps twice for one step
    assert not half or half[TRIALS]["steps"] < at(past_scan(), 600).measure[TRIALS]["steps"]


# -- the scan --------------------------------------------------------------------------------------------------------------------


def test_the_scan_keeps_a_rate_that_is_not_grossly_wrong() -> None:
    rule = started()
    plan = at(rule, 0)
    assert plan.measure[TRIALS]["multiples"] == [2.0**-SCAN.below, 1.0, 2.0**SCAN.above] and plan.measure[TRIALS]["of"] == "peak"
    assert tell(rule, plan, 36, [3.0, 2.5, 2.8])[::2] == (0.0, None)
    assert at(rule, 36) == Plan(steps=50, spread=False) and at(rule, 590) == Plan(steps=10, spread=False)
    assert at(rule, 600).measure[TRIALS]["of"] == "base"


def test_the_scan_keeps_a_rate_whose_harm_is_less_than_what_batches_differ_by() -> None:
    """Pretrained weights at first lose a little under any high rate, in every batch alike."""
    rule = started()
    assert tell(rule, at(rule, 0), 36, [2.498, 2.5, 2.8])[::2] == (0.0, None)


def test_the_scan_lowers_a_rate_that_is_too_high_from_the_start_and_goes_on_as_the_arm() -> None:
    rule = started()
    assert tell(rule, at(rule, 0), 36, [2.5, 3.0, 1e30])[::2] == (-SCAN.below, Restore("arm 0"))
    again = at(rule, 36)
    assert again.measure[TRIALS]["multiples"] == [2.0**-SCAN.below, 1.0] and "origin" == again.measure[TRIALS]["origin"]
    assert tell(rule, again, 70, [2.6, 2.5])[::2] == (0.0, None)


def test_the_scan_raises_a_rate_that_is_far_too_low() -> None:
    rule = started()
    assert tell(rule, at(rule, 0), 36, [3.95, 3.9, 3.0])[::2] == (RAISED, None)
    assert len(at(rule, 36).measure[TRIALS]["multiples"]) == 3
    rule = started()
    assert tell(rule, at(rule, 0), 36, [3.5, 3.3, 3.0])[::2] == (0.0, None)  # it learns by itself
    rule = started(judged=2)  # of few examples: short runs prefer a rate that is a hundred times too high
    assert tell(rule, at(rule, 0), 36, [3.95, 3.9, 3.0])[::2] == (0.0, None)


def test_the_scan_takes_back_what_breaks() -> None:
    rule = started()
    plan = at(rule, 0)
    assert not plan.judged
    assert tell(rule, plan, 36, [BROKEN] * 3, broke=True, losses=[None])[::2] == (-2 * SCAN.below, Restore("origin"))
    assert tell(rule, at(rule, 36), 70, [2.5, 2.5], broke=True, losses=[None])[::2] == (
        -SCAN.below,
        Restore("arm 0"),
    )  # the run alone has broken


# -- the checks --------------------------------------------------------------------------------------------------------------------


def test_a_check_moves_to_the_vertex_less_a_margin() -> None:
    rule = past_scan()
    octaves, note, end = tell(rule, at(rule, 600), 636, [2.9, 2.5, 2.2])
    assert octaves == 2.0 - CHECKS[0].margin and end is None and "now" in note  # the vertex lies beyond the arm
    rule = past_scan()
    octaves, _, _ = tell(rule, at(rule, 600), 636, [3.3, 2.5, 2.4])
    assert octaves == pytest.approx(2 * (0.8 + 0.1) / (2 * (0.8 - 0.1)) - CHECKS[0].margin, abs=1e-3)
    rule = past_scan()
    octaves, _, _ = tell(rule, at(rule, 600), 636, [2.4, 2.5, 3.3])
    assert octaves == pytest.approx(-(2 * (0.8 + 0.1) / (2 * (0.8 - 0.1)) - CHECKS[0].margin), abs=1e-3)


def test_a_check_that_went_as_far_as_it_could_is_repeated() -> None:
    rule = past_scan()
    tell(rule, at(rule, 600), 636, [2.9, 2.5, 2.0])
    assert rule.rounds[rule.round] == CHECKS[0] and at(rule, 636).measure
    tell(rule, at(rule, 636), 660, [2.5, 2.0, 2.4], correction=2.8)
    assert rule.rounds[rule.round] == CHECKS[1] and len(rule.found) == 2
    low, high = rule.found[-1]
    assert high == pytest.approx(4**WITHIN * low) and low < 2.8e-3 < high and f"best peak {low:.2g} to {high:.2g}" in rule.report()


@pytest.mark.parametrize(("arms", "why"), [
    ([2.6, 2.5, 2.7], "it is the best"),
    ([2.6, 2.5, 2.4999], "the difference is noise"),
    ([2.6, 2.5, 2.496], "not worth it: 4.0 - 2.5 was learned"),
])  # fmt: skip
def test_a_check_keeps_the_rate_unless_another_is_clearly_better(arms: list[float], why: str) -> None:
    rule = past_scan()
    octaves, note, end = tell(rule, at(rule, 600), 636, arms)
    assert octaves == 0 and end is None and "kept" in note, why
    assert rule.rounds[rule.round] == CHECKS[1]


def test_a_judge_lowers_a_rate_and_raises_it_only_where_it_has_hardly_learned_anything() -> None:
    for arms, moved in (([2.9, 2.5, 2.2], 0), ([2.2, 2.5, 3.3], -1), ([3.99, 3.9, 3.0], 1)):
        rule = past_scan(judged=2)
        octaves, _, _ = tell(rule, at(rule, 600), 636, arms)
        assert octaves * moved > 0 or octaves == moved == 0


# -- state ---------------------------------------------------------------------------------------------------------------------------


def test_its_state_is_plain_and_goes_on() -> None:
    rule = past_scan()
    tell(rule, at(rule, 600), 636, [2.9, 2.5, 2.0])
    other = started()
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert at(other, 636) == at(rule, 636) and other.state_dict() == rule.state_dict()


def test_frozen_it_moves_nothing_more() -> None:
    rule = started(freeze_after=100)
    tell(rule, at(rule, 0), 36, [3.0, 2.5, 2.8])
    rule.learn(evidence(step=100, **CYCLE))
    assert rule.idle and at(rule, 600) == Plan(spread=False)


def test_a_run_in_which_it_could_not_work_is_refused() -> None:
    for budget in (0, 1, -0.1, math.nan, "3%"):
        with pytest.raises(ValueError, match="budget"):
            TrialRule(budget)  # type: ignore[arg-type]
    for clock, name, message in [
        (Clock(50), "lr", "known length"),
        (Clock(50, 10, 1000), "lr", "warmup_steps must be 0"),
        (Clock(50, 0, 1000), "d", "no such knob"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrialRule().start(Run(clock, [KnobSpec("k", 0.0, rate=name == "lr")], 1, [0.0]))


def test_with_an_engine_corrections_follow() -> None:
    rule = TrialRule(keep=lambda arms, origin: dict.fromkeys(map(arm, range(arms)), SnapshotOf()))
    engine = Engine([KnobSpec("lr", 0.0)], 1, Clock(50, 0, 3 * TOTAL), rule)
    rule.start(Run(engine.clock, engine.knobs, 1, [0.0]))
    best = 2.0**-7  # of the peak
    while engine.step < 3 * TOTAL:
        while not engine.tick():
            pass
        rows = {}
        if engine.plan.measure:
            settings = engine.plan.measure[TRIALS]
            rates = [m * engine.corrections[0] for m in settings["multiples"]]
            rows = {TRIALS: [[0.0, *scored([2.0 + 0.1 * math.log2(rate / best) ** 2 for rate in rates], settings["scores"])]]}
        engine.close([4.0], rows, scheduled=[1.0], peak=[1.0])
    assert 0.7 < engine.corrections[0] / best < 1.4
