"""The rule of trials without tensors, decision by decision. (Whole runs: tests/controllers/test_auto.py.)"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.core.evidence import Run
from hdet.core.plan import Moment, Plan, Restore, SnapshotOf
from hdet.core.rules.trial.costs import ALONE, CHECK, FEWEST, JUDGED, SCAN, Costs
from hdet.core.rules.trial.judge import FIRST
from hdet.core.rules.trial.overfitting import overfits
from hdet.core.rules.trial.protocol import BROKEN, HELD_OUT, ORIGIN, REPEATS, TRIALS, Told, last
from hdet.core.rules.trial.rises import FEW, MANY, Rises
from hdet.core.rules.trial.rounds import ANEW, CHECKS, SCANS
from hdet.core.rules.trial.rule import TrialRule
from hdet.core.rules.trial.scores import PART, SCAN_RAISES, WITHIN, Arms, begun_anew
from tests.core.controller_runs import evidence

TOTAL = 10_000
CYCLE = {"total_steps": TOTAL, "sync_interval": 50, "knobs": ["lr", "decay"], "multipliers": [[1.0], [1.0]], "losses": [4.0]}
LOOKED: dict[str, None] = {REPEATS: None}
NOISE = [0.001, -0.001, 0.0005, -0.0005]


def started(total: int = TOTAL, says: float | None = 0.0, epochs: float = 0.0, **settings: Any) -> TrialRule:
    """``says``: to what part of its peak the schedule falls. ``epochs``: of the run, as far as the loop knows."""
    rule = TrialRule(**settings)
    knobs = [KnobSpec("lr", 0.0), KnobSpec("decay", 0.0, rate=False)]
    rule.start(Run(Clock(50, 0, total), knobs, 1, [0.0, 0.0], falls_to=[says, None], epochs=epochs))
    return rule


def saved(rule: TrialRule, **settings: Any) -> TrialRule:
    """Another one with its state, which has been written and read. ``settings``: of `started`."""
    other = started(**settings)
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    return other


def scored(arms: Sequence[float], scores: int) -> list[list[float]]:
    """Each arm's losses, which differ by some thousandths from batch to batch, alike for all arms, and a little by themselves."""
    return [[loss + 0.1 * NOISE[i % 4] * (a + 1) + 10 * NOISE[(i // 2) % 4] for i in range(scores)] for a, loss in enumerate(arms)]


def tell(
    rule: TrialRule,
    plan: Plan,
    step: int,
    arms: Sequence[float] | None,
    correction: float = 1.0,
    broke: bool = False,
    far: float = 1.0,
    part: float = 0.0,
    began: float = 4.0,
    trained: Sequence[float] | None = None,
    **more: Any,
) -> Any:
    """What it learns from a cycle whose arms have these losses, in training too unless something else is said: (octaves, note, ending)."""
    scores = rule.judged or (plan.measure[TRIALS]["scores"] if TRIALS in plan.measure else 1)
    rows = {}
    if arms is not None and TRIALS in plan.measure:
        in_training = scored(arms if trained is None else trained, last(plan.measure[TRIALS]["steps"]))
        rows = {TRIALS: [Told(float(broke), scored(arms, scores), in_training, far, part, began).row()]}
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
    assert rule.rounds[rule.round] == CHECK
    return rule


FAR, EIGHT = [3.99, 3.9, 2.0], [3.1, 3.0]
"""Arms of a scan whose rate is far too low, and of the next one, in which eight times as much is not."""


def raises(rule: TrialRule, **more: Any) -> float:
    """By how many octaves it does."""
    assert tell(rule, at(rule, 0), 42, FAR, **more)[0] == 0, "that is tried first"
    return float(tell(rule, at(rule, 42), 84, EIGHT, **more)[0])


# -- what it may take ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "budget", "rounds"), [
    (1500, 0.03, []), (4000, 0.03, [ALONE]), (10_000, 0.03, [SCAN, CHECK]), (30_000, 0.03, [SCAN, CHECK]), (1500, 0.2, [SCAN, CHECK]),
])  # fmt: skip
def test_a_short_run_has_few_rounds_or_none(total: int, budget: float, rounds: list[Any]) -> None:
    rule = started(total, budget=budget)
    assert list(rule.rounds) == rounds and rule.idle == (not rounds)
    assert ("stays" if not rounds else f"trials from step {math.ceil(rounds[0] * total)} at") in rule.report()


@pytest.mark.parametrize(("total", "scanned", "steps"), [(10_000, 28, 56), (30_000, 28, 224), (100_000, 93, 263), (300_000, 280, 860)])
def test_the_check_has_what_the_scan_has_left_over_and_repeats_where_that_is_much(total: int, scanned: int, steps: int) -> None:
    """The scan is as long as the run asks beyond 30 000 steps."""
    rule = started(total)
    plan = at(rule, 0)
    assert plan.measure[TRIALS]["steps"] == scanned
    tell(rule, plan, 42, [3.0, 2.5, 2.8], total_steps=total)
    assert at(rule, math.ceil(CHECK * total)).measure[TRIALS]["steps"] == pytest.approx(steps, abs=1)


@pytest.mark.parametrize("arms", [[3.0, 2.5, 2.8], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0], None])
@pytest.mark.parametrize("total", [3000, 10_000, 30_000, 300_000])
def test_the_budget_holds_whatever_arms_score(total: int, arms: list[float] | None) -> None:
    rule, step, planned = started(total), 0, 0.0
    while step < total:
        plan = at(rule, step)
        length = min(plan.steps or 50, total - step)
        step += length
        if TRIALS not in plan.measure:
            assert not plan.spread and (not plan.snapshots or set(plan.snapshots) == {ORIGIN} or (rule.finished and not rule.idle))
            tell(rule, plan, step, None, total_steps=total)
            continue
        settings = plan.measure[TRIALS]
        assert length == settings["steps"] + settings["scores"] and settings["steps"] >= FEWEST and len(plan.measure) == 1
        number, weights_at_first = len(settings["multiples"]), bool(settings["origins"] and settings["origins"][0])
        planned += number * settings["steps"] + (number + weights_at_first) * settings["scores"] / 3
        tell(rule, plan, step, None if arms is None else arms[:number], total_steps=total)
    assert rule.finished and planned == pytest.approx(rule.spent) and 0.3 * 0.03 * total < planned <= 0.03 * total + 1e-6


def test_a_trial_that_is_lost_is_paid_for() -> None:
    rule = started()
    at(rule, 0)
    rule.restart(Moment(0, 10, 10))
    assert rule.spent == 30 and rule.used == 0, "three arms, ten steps"
    assert rule.report().startswith(
        "the trial that was under way when weights were loaded or taken back is lost, and paid for; trials from step 0"
    )
    assert at(rule, 10) == Plan(steps=1, spread=False)  # the cycle that was under way ends at once
    assert at(rule, 11).measure


def test_it_says_so_where_no_trial_could_be_made() -> None:
    rule = started(3000)
    at(rule, 0)
    assert rule.report().startswith("trials from step 300 at 0.25, 1, 4 times your rate")
    at(rule, 2900)  # it waited for the schedule's peak
    assert rule.idle and rule.report().startswith(
        "no trial was made, the rate stays: one needs a schedule near its peak in the first 35% of the run"
    )


def test_the_budget_counts_the_judges_batches_and_the_optimizers_steps() -> None:
    many, few = started(judged=300), started(judged=6)
    assert not many.rounds and len(few.rounds) == 2
    rule = past_scan()
    half = past_scan(budget=0.06).plan(Moment(0, 300, 600)).measure  # the schedule steps twice for one step
    assert FEWEST < half[TRIALS]["steps"] < at(past_scan(budget=0.06), 600).measure[TRIALS]["steps"]
    assert rule.plan(Moment(0, 50, 400)) == Plan(steps=25, spread=False, measure=LOOKED), "600 in steps of the schedule, eight for one"


# -- the scan --------------------------------------------------------------------------------------------------------------------


def test_the_scan_keeps_a_rate_that_is_not_grossly_wrong() -> None:
    rule = started()
    plan = at(rule, 0)
    assert plan.measure[TRIALS]["multiples"] == [2.0**octave for octave in SCANS] and plan.measure[TRIALS]["of"] == "peak"
    assert tell(rule, plan, 36, [3.0, 2.5, 2.8])[::2] == (0.0, None)
    assert at(rule, 36) == Plan(steps=50, spread=False, measure=LOOKED) and at(rule, 590) == Plan(steps=10, spread=False, measure=LOOKED)
    check = at(rule, 600).measure[TRIALS]
    assert check["of"] == "base" and check["origins"] is None and check["multiples"] == [2.0**octave for octave in CHECKS]


def test_the_scan_keeps_a_rate_whose_harm_is_less_than_what_batches_differ_by() -> None:
    """Pretrained weights at first lose a little under any high rate, in every batch alike."""
    rule = started()
    assert tell(rule, at(rule, 0), 36, [2.498, 2.5, 2.8])[::2] == (0.0, None)
    assert not at(rule, 36).snapshots


def test_how_far_a_rate_is_behind_is_reckoned_from_the_first_weights_loss_of_the_same_batches() -> None:
    """A scan's batches may be harder ones than those of the scan before: then a rate that was fine seemed to have learned nothing."""
    for began, arms, tried in ((5.0, [4.9, 4.3, 3.0], False), (4.4, [4.39, 4.3, 3.0], True)):  # 0.7 of 2.0, 0.1 of 1.4
        rule = started()
        tell(rule, at(rule, 0), 42, arms, began=began, losses=[4.4])
        assert (len(at(rule, 42).measure.get(TRIALS, {}).get("multiples", [])) == 2) == tried


def doubted(**settings: Any) -> TrialRule:
    """An eighth of the rate was clearly better in the scan."""
    rule = started(**settings)
    moved, note, end = tell(rule, at(rule, 0), 36, [3.9, 4.1, 1e30])
    assert moved == 0 and end is None and "kept for now" in note
    return rule


def test_a_rate_that_looks_too_high_in_the_scan_is_kept_until_the_run_has_shown_what_it_does() -> None:
    """Some losses rise at first, at any rate that is good later, as a quantizer's. Meanwhile only the run's beginning is remembered."""
    rule = doubted(place="host")
    for step in (36, 590):
        assert at(rule, step).snapshots == {ORIGIN: SnapshotOf("host")} and at(rule, step).measure == LOOKED
    anew = at(rule, 600)
    settings = anew.measure[TRIALS]
    assert settings["multiples"] == [2.0**octave for octave in ANEW] and settings["origins"] == [ORIGIN, ORIGIN, ""]
    assert settings["of"] == "base" and ORIGIN in anew.snapshots
    assert not at(past_scan(), 300).snapshots, "without a doubt nothing is kept"


@pytest.mark.parametrize(("arms", "octave", "end"), [
    ([3.0, 3.5, 4.1], ANEW[0], Restore("arm 0")),
    ([3.5, 3.0, 4.1], ANEW[1], Restore("arm 1")),
    ([3.5, 3.0, BROKEN], ANEW[1], Restore("arm 1")),
    ([3.5, 3.0, 3.0], 0, None),
    ([3.5, 3.0, 3.19], 0, None),  # the run has learned nearly as much
    ([3.5, 3.0, 3.21], ANEW[1], Restore("arm 1")),
    ([3.5, 3.21, 9.0], 0, None),  # a fifth of the first loss, 4.0: who stays there is better than a plateau with noise, and will be no more
    ([3.9, 3.98, 9.0], 0, None),
    ([4.5, 4.4, 9.0], 0, None),
    ([3.5, 3.0, 2.0], 0, None),
    ([BROKEN, BROKEN, BROKEN], 0, None),
])  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"judged": 2}, {"says": 1.0}])
def test_it_is_lowered_if_a_few_steps_from_the_first_weights_do_better_than_the_run(
    arms: list[float], octave: float, end: Any, settings: dict[str, Any]
) -> None:
    rule = doubted(**settings)
    assert tell(rule, at(rule, 600), 700, arms)[::2] == (octave, end)
    assert not rule.anew and not at(rule, 700).snapshots and rule.finished, "the budget is used up"
    rule = doubted(total=30_000, **settings)
    assert tell(rule, at(rule, 1800), 2000, arms)[::2] == (octave, end)
    check = at(rule, 2000).measure[TRIALS]
    assert check["multiples"] == [2.0**o for o in CHECKS] and check["origins"] is None, "there is some left for a check"


def test_what_is_learned_from_the_first_weights_has_to_be_more_than_batches_differ_by() -> None:
    """The first loss is of one batch."""
    for noise, octave in ((0.05, ANEW[1]), (0.1, 0.0)):
        batches = [noise * (-1) ** i for i in range(8)]
        arms = Arms({o: [loss + more for more in batches] for o, loss in zip(ANEW, (3.5, 2.9, 5.0), strict=True)}, 57, 4.0)
        assert begun_anew(arms).factor == 2.0**octave


def test_the_run_has_to_be_behind_batch_by_batch() -> None:
    for noise, octave in ((0.1, ANEW[1]), (4.0, 0.0)):
        run = [5.0 + noise * (-1) ** i for i in range(8)]
        assert begun_anew(Arms({ANEW[0]: [3.5] * 8, ANEW[1]: [2.9] * 8, 0.0: run}, 57, 4.0)).factor == 2.0**octave


def test_a_trial_anew_that_tells_nothing_is_followed_by_an_ordinary_check() -> None:
    """As where a score has raised an error, and the loop has gone on."""
    rule = doubted(total=30_000)
    tell(rule, at(rule, 1800), 2000, None)
    assert at(rule, 2000).measure[TRIALS]["origins"] is None


def test_it_is_not_lowered_where_it_does_better_in_training() -> None:
    rule = doubted()
    assert tell(rule, at(rule, 600), 700, [3.5, 3.0, 4.1], trained=[3.5, 3.0, 2.0])[::2] == (0, None)


def test_a_run_whose_beginning_is_lost_has_an_ordinary_check() -> None:
    """As after a checkpoint, or a cycle that was taken back."""
    rule = doubted()
    rule.restart(Moment(5, 300, 300))
    other = saved(doubted())
    for one in (rule, other):
        assert not at(one, 300).snapshots and at(one, 600).measure[TRIALS]["multiples"] == [2.0**octave for octave in CHECKS]


def test_a_trial_anew_that_is_lost_is_paid_for_and_not_repeated() -> None:
    rule = doubted(total=30_000)
    at(rule, 1800)
    spent, other = rule.spent, saved(rule, total=30_000)
    for one in (rule, other):
        one.restart(Moment(5, 1810, 1810))
        assert one.spent == spent + 3 * 10 and not one.anew
        assert at(one, 1810).steps == 1 and at(one, 1811).measure[TRIALS]["origins"] is None


def with_gradients_of_their_own(total: int = TOTAL, **settings: Any) -> TrialRule:
    """Two replicas."""
    rule = TrialRule(**settings)
    knobs = [KnobSpec("lr", 0.0), KnobSpec("decay", 0.0, rate=False)]
    rule.start(Run(Clock(50, 0, total), knobs, 2, [0.0, 0.0], local=True, falls_to=[0.0, None]))
    return rule


def test_replicas_with_gradients_of_their_own_are_not_held_against_the_first_weights() -> None:
    """Which would have to be those of each."""
    rule = with_gradients_of_their_own()
    plan = at(rule, 0)
    for step in range(50, 650, 50):
        tell(rule, plan, step, [3.9, 4.1, 1e30] if plan.measure else None)
        plan = at(rule, step)
        assert ORIGIN not in plan.snapshots
    assert plan.measure[TRIALS]["multiples"] == [2.0**octave for octave in CHECKS]


def test_a_rate_is_raised_only_to_one_that_is_not_the_best_for_so_few_steps() -> None:
    """That would be too high for a long run, as where the first steps learn how frequent each class is. Until it is known the run keeps its own."""
    for arms, moved, says in (
        (EIGHT, SCAN_RAISES, "is better"),
        ([2.0, 2.5], 0, "the best for so few, and too high for more"),
        ([2.9, BROKEN], 0, "the best for so few, and too high for more"),
        ([3.1, BROKEN], SCAN_RAISES, "is better"),
        ([2.9, 1.5], SCAN_RAISES, "is better"),  # 1.1 of 2.5
        ([3.95, 2.0], 0, "no better"),
        ([BROKEN, BROKEN], 0, "no better"),
    ):
        rule = started()
        octaves, note, end = tell(rule, at(rule, 0), 42, FAR)
        assert octaves == 0 and end is None and "2^7 times the rate is far ahead" in note and "2^3 times it is tried" in note
        plan = at(rule, 42)
        assert plan.measure[TRIALS]["multiples"] == [2.0**3, 2.0**9] and plan.measure[TRIALS]["origins"] == [ORIGIN] * 2
        octaves, note, end = tell(rule, plan, 84, arms)
        assert (octaves, end, rule.rounds[rule.round]) == (moved, None, CHECK) and says in note


def test_the_second_scan_counts_from_its_own_batches_and_raises_nothing_that_has_come_to_be_unsafe() -> None:
    for more, says in (({"began": 6.0}, "the best for so few"), ({"part": MANY_TIMES}, "not safe here")):  # 2.9 of 3.0
        rule = started()
        tell(rule, at(rule, 0), 42, FAR)
        octaves, note, _ = tell(rule, at(rule, 42), 84, EIGHT, **more)
        assert octaves == 0 and says in note and rule.rounds[rule.round] == CHECK


def test_a_state_of_before_that_does_not_say_what_a_scan_has_learned_is_scanned_anew() -> None:
    rule, other = started(), started()
    tell(rule, at(rule, 0), 42, FAR)
    state = rule.state_dict()
    del state["scan"]
    other.load_state_dict(json.loads(json.dumps(state)))
    assert at(other, 42).measure[TRIALS]["multiples"] == [2.0**octave for octave in SCANS]


def test_it_is_raised_once_more_where_higher_ones_are_still_far_ahead() -> None:
    for arm, moved in ((3.0, SCAN_RAISES), (2.4, 0)):  # 1.0 and 1.6 of 2.0
        rule = started()
        tell(rule, at(rule, 0), 42, FAR)
        octaves, note, _ = tell(rule, at(rule, 42), 84, [3.7, 2.2])
        assert octaves == SCAN_RAISES and "still far ahead: raised" in note
        plan = at(rule, 84)
        assert plan.measure[TRIALS]["multiples"] == [2.0**3]
        assert tell(rule, plan, 120, [arm], correction=2**SCAN_RAISES)[0] == moved and rule.rounds[rule.round] == CHECK


def test_a_run_that_breaks_when_it_was_raised_begins_again_at_its_own_rate() -> None:
    rule = started()
    tell(rule, at(rule, 0), 42, FAR)
    tell(rule, at(rule, 42), 84, [3.7, 2.2])
    assert tell(rule, at(rule, 84), 120, [3.0], correction=2**SCAN_RAISES, broke=True)[::2] == (-SCAN_RAISES, Restore(ORIGIN))


@pytest.mark.parametrize(("arms", "trained", "why"), [
    ([5.0, 6.0, 1e30], [5.0, 3.0, 1e30], "data in blocks: of the one that it was trained on it had learned more"),
    ([5.0, 6.0, 1e30], [5.0, 5.0, 1e30], "as much, as far as anybody can tell"),
])  # fmt: skip
def test_a_rate_that_does_better_in_training_is_not_doubted(arms: list[float], trained: list[float], why: str) -> None:
    rule = started()
    tell(rule, at(rule, 0), 36, arms, trained=trained)
    assert not at(rule, 36).snapshots, why


def test_the_scan_raises_a_rate_that_is_far_too_low() -> None:
    assert raises(started()) == SCAN_RAISES
    for rule, arms in (
        (started(), [3.5, 3.3, 3.0]),
        (started(judged=2), FAR),
    ):  # it learns by itself; of few examples short runs prefer far too high ones
        assert tell(rule, at(rule, 0), 36, arms)[::2] == (0.0, None) and rule.rounds[rule.round] == CHECK


def test_the_scan_takes_back_what_breaks() -> None:
    rule = started()
    plan = at(rule, 0)
    assert not plan.judged
    assert tell(rule, plan, 36, [BROKEN] * 3, broke=True, losses=[None])[::2] == (2 * SCANS[0], Restore("origin"))
    lowered = 2.0 ** (2 * SCANS[0])
    found = tell(rule, at(rule, 36), 70, [2.5, 2.5], correction=lowered, broke=True, losses=[None])
    assert found[::2] == (SCANS[0], Restore("arm 0")), "the run alone has broken"


# -- the check ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arms", "octaves"), [([2.9, 2.5, 2.2], 2 * PART), ([2.2, 2.5, 2.9], -2 * PART), ([2.4, 2.5, BROKEN], -2 * PART)])
def test_a_check_moves_towards_the_better_arm_and_is_repeated(arms: list[float], octaves: float) -> None:
    rule = past_scan(budget=0.1)
    moved, note, end = tell(rule, at(rule, 600), 900, arms)
    assert moved == octaves and end is None and f"now {1e-3 * 2**octaves:.2g}" in note
    assert rule.rounds[rule.round] == CHECK
    if octaves > 0:  # the rate rises in a straight line, for as many steps as the trial had
        assert at(rule, 900).measure == at(rule, 1100).measure == LOOKED
    assert at(rule, 1200).measure
    tell(rule, at(rule, 1200), 1500, [2.5, 2.0, 2.4], correction=2.0**octaves)
    assert rule.finished
    now = 1e-3 * 2.0**octaves
    assert f"best peak {now / 2**WITHIN:.2g} to {now * 2**WITHIN:.2g}; yours" in rule.report()


@pytest.mark.parametrize(("arms", "said"), [
    ([2.9, 2.5, 2.2], "best peak 0.0005 to 0.004 or more (higher was not tried)"),
    ([2.6, 2.5, 2.4999], "best peak 0.00025 to 0.004 or more (higher was not tried)"),  # by less than the noise
    ([2.2, 2.5, 2.9], "best peak 0.00025 to 0.002 or less (lower was not tried)"),
    ([2.9, 2.5, 2.6], "best peak 0.00025 to 0.004"),
])  # fmt: skip
def test_nothing_is_said_of_rates_beyond_the_arms(arms: list[float], said: str) -> None:
    rule = past_scan()
    _, note, _ = tell(rule, at(rule, 600), 700, arms)
    assert note.startswith(f"{said}: in ") and rule.report().startswith(f"{said}; yours 0.001, ")
    again = saved(rule)
    assert again.report() == rule.report()
    again.load_state_dict({key: value for key, value in rule.state_dict().items() if key != "edge"})
    assert again.report().startswith("best peak ") and "tried" not in again.report(), "a state of before does not know"


def test_before_the_run_is_known_it_is_not_said_to_be_too_short() -> None:
    assert TrialRule().report() == "trials, when the length of the run is known"


def test_a_check_comes_also_where_the_peak_was_between_two_ends_of_cycles() -> None:
    rule = started()
    low = {"scheduled": [5e-4, 0.1], "highest": [1e-3, 0.1]}
    tell(rule, at(rule, 0), 36, [3.0, 2.5, 2.8], **low)
    assert at(rule, 600).measure


def test_a_check_is_repeated_twice_at_most_and_not_without_a_budget() -> None:
    rule, step, moved = past_scan(budget=0.5), 600, 0.0
    while not rule.finished:
        plan = at(rule, step)
        step += plan.steps or 50
        moved += tell(rule, plan, step, [2.9, 2.5, 2.0] if plan.measure else None, correction=2.0**moved)[0]
    assert moved == 3 * 2 * PART
    rule = past_scan()
    tell(rule, at(rule, 600), 700, [2.9, 2.5, 2.0])
    assert at(rule, 800).measure == LOOKED and rule.finished


def test_a_lower_rate_has_to_be_better_in_training_too() -> None:
    rule = past_scan()
    moved, note, _ = tell(rule, at(rule, 600), 700, [2.2, 2.5, 2.9], trained=[2.6, 2.5, 2.9])
    assert moved == 0 and "0.00025 was the best (but not in training)" in note
    rule = past_scan()
    assert tell(rule, at(rule, 600), 700, [2.2, 2.5, 2.9], trained=[2.6, BROKEN, 2.9])[0] < 0, "it breaks"
    rule = past_scan()
    assert tell(rule, at(rule, 600), 700, [2.9, 2.5, 2.2], trained=[2.9, 2.5, 2.6])[0] > 0, (
        "a higher one need not: its noise goes when its rate falls"
    )


def test_where_nothing_has_been_learned_a_lower_rate_is_not_better() -> None:
    """In a plateau, or noise, it only stays where the run began."""
    for began, octaves in ((2.0, 0), (2.3, -2 * PART)):
        rule = started()
        tell(rule, at(rule, 0), 36, [3.0, 2.5, 2.8], began=began)
        moved, note, _ = tell(rule, at(rule, 600), 700, [2.2, 2.5, 2.9])
        assert moved == octaves and ("(but it has learned nothing)" in note) == (not octaves)


@pytest.mark.parametrize(("arms", "octaves", "why"), [
    ([2.6, 2.5, 2.7], 0, "it is the best"),
    ([2.6, 2.5, 2.4999], 0, "the difference is noise"),
    ([2.6, 2.5, 2.498], 0, "not worth it: 4.0 - 2.5 was learned"),
    ([2.6, 2.5, 2.495], 2 * PART, "a little is worth it: short trials lean to lower rates"),
    ([2.495, 2.5, 2.6], 0, "of a lower rate they say more than is true"),
    ([2.3, 2.5, 2.2], 0, "a lower one is better, too"),
])  # fmt: skip
def test_a_check_keeps_the_rate_unless_another_is_clearly_better(arms: list[float], octaves: float, why: str) -> None:
    rule = past_scan()
    moved, note, end = tell(rule, at(rule, 600), 700, arms)
    assert moved == octaves and end is None and ("kept" in note) == (not octaves), why
    assert rule.idle == (not octaves)


def test_a_check_waits_for_the_end_of_the_warm_up_but_not_for_ever() -> None:
    """In a warm-up four times the rate is better, also of the right one."""
    low = {"peak": [1e-3, 0.1], "scheduled": [1e-4, 0.1]}
    rule = started()
    tell(rule, at(rule, 0), 42, [3.0, 2.5, 2.8], **low)
    assert at(rule, 600) == at(rule, 3400) == Plan(steps=50, spread=False, measure=LOOKED)
    assert at(rule, 3460).steps == 39, "the last look is one step before it is too late"
    other = saved(rule)
    tell(rule, at(rule, 3400), 3450, None, **{**low, "scheduled": [0.91e-3, 0.1]})
    assert TRIALS in at(rule, 3450).measure
    assert at(other, 3450) == Plan(steps=49, spread=False, measure=LOOKED)
    assert at(other, 3500) == Plan(spread=False) and other.idle


@pytest.mark.parametrize("settings", [{"judged": 2}, {"says": 1.0}, {"says": 0.3}, {"says": None}, {"says": 0.0, "falls_to": 1.0}])
def test_where_harm_shows_late_a_rate_is_lowered_and_raised_only_where_it_has_hardly_learned_anything(settings: dict[str, Any]) -> None:
    """With a judge, and where the schedule does not fall, or nobody knows whether it does."""
    for arms, moved in (([2.9, 2.5, 2.2], 0), ([2.2, 2.5, 3.3], -1), ([3.99, 3.9, 3.0], 1)):
        rule = past_scan(**settings)
        octaves, _, _ = tell(rule, at(rule, 600), 636, arms)
        assert octaves * moved > 0 or octaves == moved == 0


# -- state ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "given", "end"),
    [(0.0, None, 0.0), (0.1, None, 0.0), (1.0, None, 1.0), (0.5, None, 0.5), (None, None, 0.0), (1.0, 0.0, 0.0), (None, 0.7, 0.7)],
)
def test_arms_fall_as_the_schedule_does(says: float | None, given: float | None, end: float) -> None:
    """To zero, where it is not known that the run ends higher; and in a scan so does the highest, which shows how much there is to learn."""
    rule = started(says=says, falls_to=given)
    assert at(rule, 0).measure[TRIALS]["ends"] == [end, end, 0.0]
    tell(rule, at(rule, 0), 42, [3.0, 2.5, 2.8])
    assert at(rule, 600).measure[TRIALS]["ends"] == [end] * 3


@pytest.mark.parametrize("far", [0.1, 13.0])
@pytest.mark.parametrize("first", [True, False])
def test_where_arms_do_not_do_what_the_loop_does_nothing_follows_from_them(far: float, first: bool) -> None:
    """A clip of which nobody has told AutoLR, for instance: both arms look far better than the rate in force."""
    rule = started() if first else past_scan()
    step = 0 if first else 600
    plan = at(rule, step)
    with pytest.warns(UserWarning, match=rf"{far:.2g} times as far as the run.*before_step=.*closure="):
        assert tell(rule, plan, step + 100, [2.0, 2.5, 2.0], far=far) == (0, "", None)
    assert rule.idle and "before_step=" in rule.report()
    other = saved(rule)
    assert other.idle and other.report() == rule.report()


def test_a_step_that_is_a_little_longer_is_noise() -> None:
    rule = past_scan()
    assert tell(rule, at(rule, 600), 700, [2.6, 2.5, 2.0], far=1.7)[0] > 0


MANY_TIMES = 1.5 * MANY / TOTAL
"""Of the data that a step takes, so that a run sees it more often than `MANY` times."""


def test_where_examples_come_again_a_rate_is_not_raised_without_a_judge() -> None:
    rule = started()
    assert tell(rule, at(rule, 0), 42, [3.99, 3.9, 2.0], part=MANY_TIMES)[0] == 0
    assert tell(rule, at(rule, 600), 700, [2.9, 2.5, 2.0])[0] == 0 and "examples come again, 18 times" in rule.report()
    other = saved(rule)
    assert other.epochs == rule.epochs == pytest.approx(1.5 * MANY)
    rule = started()
    tell(rule, at(rule, 0), 42, [3.0, 2.5, 2.8], part=MANY_TIMES)
    assert tell(rule, at(rule, 600), 700, [2.2, 2.5, 3.3])[0] < 0  # lowered it may be


@pytest.mark.parametrize(("times", "told"), [(1.1 * FEW, 4700), (11, 1100), (1.1 * MANY, 900), (0.9 * FEW, None)])
def test_a_raised_rate_is_taken_back_when_the_second_of_many_epochs_begins(times: float, told: int | None) -> None:
    """``told``: the step, where it is known beforehand; else it is when examples come again, here at once. The weights stay."""
    for known in (False, True):
        rule = raised(epochs=times * known) if times < MANY or not known else raised()
        rule.epochs = times * known
        found = cycles(rule, [1.0] * 20, part=times / TOTAL * (not known))
        at_step = next((900 + 200 * n for n, (moved, _, _) in enumerate(found) if moved), None)
        assert at_step == (told if known or told is None else 900)
        if told is not None:
            _, note, end = next(one for one in found if one[0])
            assert f"examples come again, {times:.2g} times" in note and end is None and rule.idle and "judge=" in rule.report()


def test_with_a_judge_examples_that_come_again_are_no_reason() -> None:
    assert not Rises(True, 0.0, 50.0, True).overfit


def judged(
    rule: TrialRule, losses: Sequence[float], step: int = 700, correction: float = 1.0, training: float = -0.01
) -> list[tuple[int, float, str, Any]]:
    """(step, octaves, note, ending) of the cycles at whose end the run's own weights are judged: by two mini-batches, with these losses on average.
    ``training``: what is added to the training loss in each cycle."""
    found, left, loss = [], list(losses), 4.0
    while left:
        plan = at(rule, step)
        assert plan.steps and not plan.measure.keys() - {HELD_OUT, REPEATS} and plan.measure.get(HELD_OUT, 2) == 2
        step += plan.steps
        rows = [[left[0] - 0.01, left.pop(0) + 0.01]] if HELD_OUT in plan.measure else []
        loss += training
        moved, note, end = tell(rule, plan, step, None, correction=correction, losses=[loss], measured={HELD_OUT: rows} if rows else {})
        correction *= 2.0**moved
        if rows:
            found.append((step, moved, note, end))
    return found


def judging(part: float = 50 / TOTAL, less: float = 0.0) -> TrialRule:
    """With a judge, and trials that are over. ``part``: of the data that a step takes. ``less``: than 2.0, the loss of the first weights."""
    rule = started(judged=2)
    tell(rule, at(rule, 0), 36, [1.9 - less, 1.8 - less, 1.85 - less], began=2.0 - less)
    tell(rule, at(rule, 600), 636, [1.6 - less, 1.5 - less, 1.6 - less], part=part)
    assert rule.finished and not rule.idle
    return rule


def test_where_a_judge_finds_the_run_worse_twice_it_goes_back_to_its_best_weights_at_a_quarter_of_the_rate() -> None:
    rule = judging()
    found = judged(rule, [2.0, 1.0, 1.04, 1.06, 1.02, 1.06, 1.06, 0.9, 1.0, 1.0])
    steps = [step for step, *_ in found]
    assert [later - step for step, later in itertools.pairwise(steps)] == [200] * 9
    moves = [(step, moved, end) for step, moved, _, end in found if moved]
    assert moves == [(steps[6], -2, Restore(f"best {steps[1]}")), (steps[9], -2, Restore(f"best {steps[7]}"))], (
        "5 % of the 1.0 that was learned"
    )
    assert "from 1 to 1.06: back to the weights of step" in found[6][2] and "yours 0.001, now 6.3e-05" in rule.report()
    assert rule.report().endswith("; the run itself is judged every 200 steps, it overfitted 2 times")
    assert [*at(rule, steps[9]).snapshots] == [f"best {steps[7]}"]
    rule.frozen = True
    assert rule.report().endswith("; it overfitted 2 times") and "judged" not in rule.report()


def test_a_loss_that_comes_down_again_by_itself_is_no_overfitting() -> None:
    """The noise of a good high rate; and what the run has learned is counted from the first weights, whenever it is judged first."""
    assert not any(moved for _, moved, *_ in judged(judging(), [1.0, 1.3, 1.2, 1.1, 1.08, 1.07]))
    assert not any(moved for _, moved, *_ in judged(judging(), [1.0, 1.04, 1.04, 1.04]))
    assert [moved for _, moved, *_ in judged(judging(), [1.0, 1.3, 1.2, 1.2])] == [0, 0, 0, -2]


def test_where_the_last_cycle_is_judged_the_best_loss_is_told() -> None:
    rule = judging()
    judged(rule, [2.0, 1.0, 1.02], 9450)
    assert rule.report().endswith("and goes back where it overfits; its best held-out loss was 1, at step 9700"), rule.report()


def test_where_examples_are_new_or_the_training_loss_rises_too_it_is_no_overfitting() -> None:
    assert not any(moved for _, moved, *_ in judged(judging(part=0.0), [2.0, 1.0, 1.5, 1.5, 1.5, 1.5]))
    assert not any(moved for _, moved, *_ in judged(judging(), [2.0, 1.0, 1.5, 1.5, 1.5, 1.5], training=0.01))


def test_losses_below_0_and_one_that_is_not_finite() -> None:
    losses = [2.0, 1.0, 1.06, 1.06]
    for found in (judged(judging(less=100.0), [loss - 100 for loss in losses]), judged(judging(), [BROKEN, *losses])):
        assert [moved for _, moved, *_ in found][-4:] == [0, 0, 0, -2]


def test_where_the_schedule_steps_eight_times_for_one_step_judging_takes_a_third_of_the_budget_too() -> None:
    costs = Costs(0.03, 80_000, 16)
    assert costs.judging(0, 1 / 8) <= 0.01 * 10_000 and costs.every(1 / 8) > 4 * JUDGED * 80_000 / 8 > 0


def test_after_a_checkpoint_the_weights_that_were_best_are_gone() -> None:
    rule = judging()
    judged(rule, [2.0, 1.0, 1.2])
    other = saved(rule, judged=2)
    other.restart(Moment(9, 1400, 1400))
    assert not at(other, 1400).snapshots
    found = judged(other, [1.3, 0.9, 1.0, 1.0], 1400, training=-0.1)
    assert [(moved, end) for _, moved, _, end in found] == [(0, None), (0, None), (0, None), (-2, Restore(f"best {found[1][0]}"))]
    assert "rose from 1 to 1.3, and no copy of the better weights has outlived the checkpoint: go back to an earlier one" in found[0][2]
    assert other.report().endswith("it overfitted once")


def test_after_a_checkpoint_the_run_is_judged_when_it_would_have_been() -> None:
    rule = judging()
    judged(rule, [2.0, 1.0, 1.2])
    other = saved(rule, judged=2)
    other.restart(Moment(9, 1250, 1250))
    for losses in ([0.9, 0.8], [1.2]):
        steps = [[step for step, *_ in judged(one, losses, 1250)] for one in (rule, other)]
        assert steps[0] == steps[1]


def test_without_a_way_back_the_weights_that_are_there_are_the_best_from_now_on() -> None:
    rule = judging()
    judged(rule, [2.0, 1.0])
    rule.restart(Moment(9, 1150, 1150))
    assert [moved for _, moved, *_ in judged(rule, [1.3, 1.3, 1.31, 1.32, 1.5, 1.5], 1150, training=-0.1)] == [0, 0, 0, 0, 0, -2]


def test_what_a_judge_cannot_tell_apart_is_no_overfitting() -> None:
    assert (
        overfits([1.1, 1.1], [1.0, 1.0], 2.0) and not overfits([1.04, 1.04], [1.0, 1.0], 2.0) and not overfits([1.4, 0.8], [1.0, 1.0], 2.0)
    )


@pytest.mark.parametrize(("batches", "total", "times", "by"), [
    (2, 10_000, 50, 2), (16, 10_000, 18, 16), (64, 10_000, 5, 60), (300, 10_000, 5, 60), (16, 1000, 5, 6), (4, 1000, 7, 4), (30, 4000, 5, 4),
    (16, 600, 0, 0), (3, 600, 6, 3), (2, 300, 0, 0),
])  # fmt: skip
def test_a_judge_judges_the_run_for_a_third_of_the_budget_at_most_and_by_some_batches_where_all_are_too_many(
    batches: int, total: int, times: int, by: int
) -> None:
    costs = Costs(0.03, total, batches)
    assert costs.judges == by and (total // costs.every() if costs.every() else 0) == times and costs.judging() <= 0.01 * total
    assert bool(costs.rounds()) == (0.03 * total >= 72 + 4 * batches / 3 + 5 * min(batches, 4) / 3), "a check leaves something for it"


@pytest.mark.parametrize("batches", [2, 4, 20, 166, 300])
def test_a_longer_run_is_not_judged_less(batches: int) -> None:
    judges = [(costs.judges > 0, len(costs.rounds())) for total in range(300, 12_000, 3) for costs in [Costs(0.03, total, batches)]]
    assert judges == sorted(judges) and judges[-1][0]


@pytest.mark.parametrize(
    ("budget", "batches", "total"), [(0.1, 11, 1200), (0.05, 11, 2400), (0.05, 14, 2720), (0.1, 14, 1360), (0.03, 0, 2800)]
)
def test_a_budget_that_suffices_to_the_last_digit_does(budget: float, batches: int, total: int) -> None:
    assert Costs(budget, total, batches).rounds() == (ALONE,)


def test_it_does_for_judging_and_for_the_way_out_too() -> None:
    assert Costs(0.01, 7800, 2).rounds() and Costs(0.01, 7800, 2).every() > 0
    assert "480 steps are below 480" in Costs(0.175, 480).too_short(stays=True), "which is not said, as there is a round"


@pytest.mark.parametrize(("settings", "says"), [
    ({}, "compute"),
    ({"judged": 2}, "compute; the run itself is judged every 200 steps, and goes back where it overfits"),
    ({"judged": 64}, "compute; the run itself is judged every 2000 steps by 60 of the 64 mini-batches, and goes back where it overfits"),
    ({"judged": 16, "total": 600}, "rate stays: 600 steps are below 3334. Train longer, or pass budget=0.17; the run itself is not judged: that takes budget=0.034 or more"),
    ({"judged": 16, "total": 1000}, "trials: 1000 steps are below 3334. Train longer, or pass budget=0.1; the run itself is judged every 200 steps by 6 of the 16 mini-batches, and goes back where it overfits"),
])  # fmt: skip
def test_it_says_what_a_judge_will_do(settings: dict[str, Any], says: str) -> None:
    assert started(**settings).report().endswith(says)


def test_what_a_run_is_judged_by_is_planned_and_paid_for() -> None:
    rule = started(judged=64)
    plan = at(rule, 0)
    assert plan.measure[HELD_OUT] == 60 and rule.cost == 0
    tell(rule, plan, 4, None, measured={HELD_OUT: [[1.0] * 60]})
    assert rule.cost == 20


def test_without_a_check_of_the_rate_in_force_it_says_why_there_is_no_interval() -> None:
    rule = judging()
    judged(rule, [2.0, 1.0, 1.06, 1.06])
    assert rule.report().startswith("no interval, as no check was made of this rate; yours 0.001, now 0.00025, after trials")


def test_what_a_scan_has_raised_is_taken_back_where_examples_come_again() -> None:
    rule = started()
    assert raises(rule) == SCAN_RAISES
    moved, note, end = tell(rule, at(rule, 600), 700, [2.9, 2.5, 2.0], correction=2**SCAN_RAISES, part=MANY_TIMES)
    assert moved == -SCAN_RAISES and "back to the rate of before" in note and end is None and rule.idle
    assert rule.peaks[-1] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("arms", "moved"), [([0.01002, 0.01, 0.01005], -SCAN_RAISES), ([0.012, 0.01, 0.01001], 0), ([0.01, 0.01, 0.02], 0)]
)
def test_where_hardly_anything_is_left_to_learn_a_rise_is_taken_back(arms: list[float], moved: float) -> None:
    """It can bring nothing more, and be too high for what comes."""
    rule = started()
    assert raises(rule) == SCAN_RAISES
    octaves, note, _ = tell(rule, at(rule, 600), 700, arms, correction=2**SCAN_RAISES)
    assert octaves == moved and ("hardly anything left to learn" in note) == (moved < 0)


def raised(**settings: Any) -> TrialRule:
    """Trials are over, and the rate is 8 times the user's."""
    rule = started(**settings)
    assert raises(rule) == SCAN_RAISES
    tell(rule, at(rule, 600), 700, [2.6, 2.5, 2.6], correction=2**SCAN_RAISES)
    assert rule.finished and not rule.idle
    return rule


def cycles(rule: TrialRule, losses: Sequence[float], correction: float = 2**SCAN_RAISES, step: int = 700, part: float = 0.0) -> list[Any]:
    """Of 200 steps each, a window, with examples of which a step takes this part of the data."""
    found = []
    for loss in losses:
        plan, step = at(rule, step), step + 200
        looks = not rule.idle and step - 200 < TOTAL / FEW
        assert (plan if rule.idle else replace(plan, snapshots={}, judged=True)) == Plan(
            spread=False, steps=50 if looks else None, measure=LOOKED if looks else {}
        )
        measured = {REPEATS: [[part]]} if REPEATS in plan.measure else {}
        found.append(tell(rule, plan, step, None, correction=correction, losses=[loss], measured=measured))
        correction *= 2.0 ** found[-1][0]
    return found


def test_a_raised_rate_is_taken_back_where_the_loss_rises_after_the_trials() -> None:
    """As where a curriculum goes on to harder examples, on which no trial has tried the rate."""
    rule = raised()
    found = cycles(rule, [9.0, 1.0, 0.5, 0.9, 2.0, 9.0])
    assert [moved for moved, _, _ in found] == [0, 0, 0, 0, -SCAN_RAISES, 0]
    assert "the loss rose from 0.9 to 2: back to the rate of before, 0.001" in found[4][1]
    assert rule.idle and "in force again" in rule.report() and "best peak" not in rule.report()


def test_the_run_goes_back_with_the_rate_to_where_the_window_before_began() -> None:
    """In that window it may have begun to rise. Until losses are told what breaks is the Ensemble's to judge."""
    rule, step, kept = raised(), 700, []
    for loss, names in ((1.0, 1), (0.9, 2), (0.8, 2), (5.0, 2)):
        plan = at(rule, step)
        kept = [*plan.snapshots]
        assert len(kept) == names and plan.judged == (step == 700)
        step += 200
        _, note, end = tell(rule, plan, step, None, correction=2**SCAN_RAISES, losses=[loss])
    assert end == Restore(kept[0]) and kept == ["run 1100", "run 1300"] and "weights of before" in note
    assert at(rule, step) == Plan(spread=False), "nothing is kept of a rate that was not raised"


def test_replicas_with_gradients_of_their_own_go_back_in_their_rate_alone() -> None:
    rule, correction = with_gradients_of_their_own(), 1.0
    for step in range(50, 1000, 50):
        plan = at(rule, step - 50)
        arms = {3: FAR, 2: EIGHT}[len(plan.measure[TRIALS]["multiples"])] if plan.measure and correction == 1 else [2.6, 2.5, 2.6]
        moved, _, _ = tell(rule, plan, step, arms if plan.measure else None, correction=correction)
        correction *= 2.0**moved
    assert correction == 2**SCAN_RAISES and rule.finished and not rule.idle
    plan = at(rule, 1200)
    assert plan == Plan(spread=False, measure=LOOKED)
    two = {"losses": [4.0, 4.0], "measured": {REPEATS: [[5.5 / TOTAL]] * 2}}
    assert tell(rule, plan, 1250, None, correction=correction, **two)[::2] == (-SCAN_RAISES, None)


def test_after_a_checkpoint_it_goes_back_to_what_there_is() -> None:
    rule = raised()
    cycles(rule, [1.0, 0.9])
    rule.restart(Moment(9, 1150, 1150))
    plan = at(rule, 1150)
    assert [*plan.snapshots] == ["run 1100"]
    assert tell(rule, plan, 1300, None, correction=2**SCAN_RAISES, losses=[9.0])[::2] == (-SCAN_RAISES, Restore("run 1100"))


def test_a_loss_that_is_not_finite_is_not_waited_with() -> None:
    rule = raised()
    cycles(rule, [1.0, 0.9])
    assert tell(rule, at(rule, 1100), 1110, None, correction=2**SCAN_RAISES, losses=[None])[::2] == (-SCAN_RAISES, Restore("run 900"))


def test_that_rise_is_of_windows_and_outlives_a_checkpoint() -> None:
    rule, step = raised(), 700
    for loss in [1.0] * 4 + [0.4, 0.6, 0.9, 0.9] + [3.0, 0.5, 0.5, 0.5]:  # four cycles of 50 steps are a window
        step += 50
        assert tell(rule, at(rule, step - 50), step, None, correction=2**SCAN_RAISES, losses=[loss])[0] == 0
    other = saved(rule)
    other.restart(Moment(0, step, step))
    assert [moved for moved, _, _ in cycles(other, [2.5], step=step)] == [-SCAN_RAISES]


def test_a_rate_that_was_not_raised_and_a_loss_below_0_are_left_alone() -> None:
    assert all(moved == 0 for moved, _, _ in cycles(raised(), [1.0, -3.0, -1.0, -0.1]))
    kept = past_scan()
    tell(kept, at(kept, 600), 700, [2.6, 2.5, 2.6])
    assert kept.idle and all(moved == 0 for moved, _, _ in cycles(kept, [1.0, 1.0, 9.0], correction=1.0))
    lowered = past_scan()
    assert tell(lowered, at(lowered, 600), 700, [2.0, 2.5, 2.6])[0] < 0
    assert all(moved == 0 for moved, _, _ in cycles(lowered, [1.0, 1.0, 9.0], correction=0.5)) and lowered.idle


def test_where_the_schedule_stays_high_a_rise_is_taken_back_if_a_lower_rate_is_any_better() -> None:
    for arms, moved in (([2.4999, 2.5, 2.6], -SCAN_RAISES), ([2.5001, 2.5, 2.6], 0)):
        rule = started(says=1.0)
        assert raises(rule) == SCAN_RAISES
        assert tell(rule, at(rule, 600), 700, arms, correction=2**SCAN_RAISES)[0] == moved


def test_what_a_rate_has_learned_is_measured_from_the_first_loss_and_not_from_the_first_cycles() -> None:
    """In the first cycle the run has learned already: a good rate is not better than its mean."""
    for began, tried in ((4.0, False), (3.3, True)):
        rule = started()
        assert ("2^3 times it is tried" in tell(rule, at(rule, 0), 42, [3.9, 3.3, 2.0], losses=[3.3], began=began)[1]) == tried


def test_without_a_scan_the_first_cycle_is_short() -> None:
    rule = started(4000)
    assert at(rule, 0).steps == FIRST and at(rule, FIRST).steps == 50


def test_how_often_examples_are_seen_may_be_known() -> None:
    rule = started(epochs=50)
    assert tell(rule, at(rule, 0), 42, [3.99, 3.9, 2.0])[0] == 0 and "50 times" in rule.report()


def test_a_few_epochs_and_a_judge_are_no_reason() -> None:
    rule = started()
    assert raises(rule, part=0.9 * FEW / TOTAL) == SCAN_RAISES
    judged = past_scan(judged=2)
    assert tell(judged, at(judged, 600), 636, [3.99, 3.9, 3.0], part=MANY_TIMES)[0] > 0


def test_its_state_is_plain_and_goes_on() -> None:
    """Saved at the end of any cycle: a scan, waiting, a check, its repetition, the watch."""
    rule, step, correction, seen = started(budget=0.1), 0, 1.0, set()
    while step < 4000:
        plan = at(rule, step)
        other = saved(rule, budget=0.1)
        other.restart(Moment(0, step, step))
        again = at(other, step)
        number = len(plan.measure[TRIALS]["multiples"]) if TRIALS in plan.measure else 0
        assert again.steps == plan.steps and (TRIALS in again.measure) == bool(number), step
        step += plan.steps or 50
        arms = (FAR if number == 3 else EIGHT) if correction == 1 else [2.6, 2.5, 2.0]
        found = [tell(one, the, step, arms if number else None, correction, losses=[9.0 if step > 3000 else 1.0])
                 for one, the in ((rule, plan), (other, again))]  # fmt: skip
        assert found[0][:2] == found[1][:2] and type(found[0][2]) is type(found[1][2]) and other.report() == rule.report()
        correction *= 2.0 ** found[0][0]
        seen.add((number, rule.finished, correction))
    assert {(3, False, 1.0), (2, False, 8.0), (3, False, 16.0), (0, True, 1.0)} <= seen, (
        "raised by a scan and a check, and taken back by the watch"
    )


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


@pytest.mark.parametrize(("exponent", "total"), [(-7, 30_000), (-2, 30_000), (2, 30_000), (-4, 100_000), (4, 100_000)])
def test_with_an_engine_corrections_follow(exponent: int, total: int) -> None:
    rule = TrialRule()
    engine = Engine([KnobSpec("lr", 0.0)], 1, Clock(50, 0, total), rule)
    rule.start(Run(engine.clock, engine.knobs, 1, [0.0], falls_to=[0.0]))
    best = 2.0**exponent  # of the peak
    began = 4.0 if exponent < 0 else 2.5  # from its first weights a lower rate has to learn much, or the run is not given up for it
    while engine.step < total:
        while not engine.tick():
            pass
        rows = {}
        if TRIALS in engine.plan.measure:
            settings = engine.plan.measure[TRIALS]
            rates = [m * engine.corrections[0] for m in settings["multiples"]]
            scores = scored([2.0 + 0.1 * math.log2(rate / best) ** 2 for rate in rates], settings["scores"])
            rows = {TRIALS: [Told(0.0, scores, [one[:1] * last(settings["steps"]) for one in scores], 1.0, 0.0, began).row()]}
        engine.close([4.0], rows, scheduled=[1.0], peak=[1.0])
    assert 0.5 <= engine.corrections[0] / best <= 2  # an octave off, one arm of the check is as good as the rate in force


# -- what is in force, and when ----------------------------------------------------------------------------------------------------


def test_what_is_taken_back_is_what_is_in_force() -> None:
    """Bounds, or a `Divergence` that has lowered it, may have left less of a rise than was decided."""
    assert [moved for moved, *_ in cycles(raised(), [1.0, 9.0], correction=2.0)] == [0, -1]
    assert [moved for moved, *_ in cycles(raised(), [1.0, 9.0], correction=1.0)] == [0, 0]


def test_a_loss_that_is_not_finite_has_risen() -> None:
    assert [moved for moved, *_ in cycles(raised(), [1.0, None])] == [0, -SCAN_RAISES]  # type: ignore[list-item]
    assert [moved for moved, *_ in cycles(raised(), [None, None])] == [0, 0], "a loop that tells no losses"  # type: ignore[list-item]


def test_trials_that_meant_nothing_leave_no_rise() -> None:
    rule = started()
    assert raises(rule) == SCAN_RAISES
    with pytest.warns(UserWarning, match="10 times as far"):
        assert tell(rule, at(rule, 600), 700, [2.6, 2.5, 2.6], correction=2**SCAN_RAISES, far=10)[0] == -SCAN_RAISES
    assert rule.idle


def test_what_was_not_done_is_not_decided_again() -> None:
    """As in a `Shadow`, where the same scan would raise a second time."""
    rule = started()
    tell(rule, at(rule, 0), 42, FAR)
    assert tell(rule, at(rule, 42), 84, [3.7, 2.2])[0] == SCAN_RAISES
    moved, note, _ = tell(rule, at(rule, 84), 120, [3.0], correction=1.0)
    assert moved == 0 and "not where the last trial has put it" in note and rule.rounds[rule.round] == CHECK


@pytest.mark.parametrize("step", [1000, 5000])
def test_a_run_in_its_middle_is_not_scanned(step: int) -> None:
    rule = started()
    rule.restart(Moment(0, step, step))
    first = at(rule, step)
    assert TRIALS not in first.measure and rule.rounds[1:] == rule.rounds[rule.round :] or rule.finished
    tell(rule, first, step + 50, None)
    assert (TRIALS in at(rule, step + 50).measure) == (step == 1000), "a check in the first third alone"


@pytest.mark.parametrize("step", [0, 600])
def test_a_trial_that_was_planned_and_not_begun_costs_nothing(step: int) -> None:
    """A checkpoint at the end of a cycle has the plan of the next one."""
    rule = past_scan() if step else started()
    planned = at(rule, step)
    assert planned.measure and rule.used
    other = saved(rule)
    other.restart(Moment(0, step, step))
    assert other.spent == rule.spent and "lost" not in other.report()
    assert at(other, step).measure[TRIALS]["steps"] == planned.measure[TRIALS]["steps"]


def test_how_often_examples_are_seen_is_not_forgotten_for_an_older_state() -> None:
    rule = started(epochs=50)
    rule.load_state_dict(json.loads(json.dumps(started().state_dict())))
    assert rule.epochs == 50


def test_a_check_goes_by_its_own_cycles_until_it_is_frozen() -> None:
    """Not by T, which may be longer than all that comes before."""
    rule, long = started(freeze_after=0.1), {"sync_interval": 1000}
    tell(rule, at(rule, 0), 42, [3.0, 2.5, 2.8], **long)
    assert not rule.frozen
    assert tell(rule, at(rule, 600), 700, [2.9, 2.5, 2.2], **long)[0] > 0
    tell(rule, at(rule, 700), 1000, None, correction=2.0, **long)
    assert rule.frozen


def test_arms_that_have_all_broken_say_nothing_of_where_the_best_one_is() -> None:
    rule = past_scan()
    assert tell(rule, at(rule, 600), 700, [BROKEN] * 3)[1].startswith("no arm has a finite score") and "no interval" in rule.report()


def test_with_a_judge_what_is_learned_counts_from_its_first_loss() -> None:
    """Training losses may be of another kind: there is a check, and no scan."""
    rule = started(4000, judged=2)
    plan = at(rule, 0)
    assert plan.steps == FIRST and plan.measure[HELD_OUT] == 2 and list(rule.rounds) == [ALONE]
    tell(rule, plan, FIRST, None, losses=[5.0], measured={HELD_OUT: [[0.9, 0.9]]}, total_steps=4000)
    tell(rule, at(rule, FIRST), 54, None, losses=[5.0], total_steps=4000)
    assert rule.first == [0.9]
    local = with_gradients_of_their_own(4000, judged=2)
    plan = at(local, 0)
    assert plan.measure[HELD_OUT] == 2 and HELD_OUT not in at(local, 50).measure
    tell(local, plan, 50, None, losses=[5.0], measured={HELD_OUT: [[0.9, 0.9]]}, total_steps=4000)
    assert local.first == [0.9] and local.cost == pytest.approx(2 / 3) and not local.judge.overfitting.best


def test_where_the_schedule_steps_eight_times_for_one_step_epochs_are_those_of_its_steps() -> None:
    rule = started(8 * TOTAL)
    rule.plan(Moment(0, 100, 800))
    tell(rule, rule.plan(Moment(1, 100, 800)), 1200, None, measured={REPEATS: [[1 / TOTAL]]})
    assert rule.epochs == pytest.approx(1.0)


def test_where_weights_are_loaded_in_the_middle_of_a_cycle_its_steps_count_too() -> None:
    """32 steps of it are done: the schedule has stepped once for each of 60, and not twice for each of 28."""
    rule = started(judged=8)
    rule.plan(Moment(1, 28, 60, 32))
    assert f"judged every {rule.costs.every(1.0)} steps" in rule.report() and rule.costs.every(1.0) != rule.costs.every(28 / 60)


def test_it_tells_the_rate_in_force_where_that_is_not_the_one_that_it_has_found() -> None:
    rule = past_scan()
    moved, *_ = tell(rule, at(rule, 600), 636, [2.6, 2.5, 2.0])
    assert moved == 1 and "; yours 0.001, now 0.002, after" in rule.report() and rule.found.raised
    tell(rule, at(rule, 636), 686, None, correction=2.0)
    assert "; yours 0.001, now 0.002, after" in rule.report() and rule.found.raised
    tell(rule, at(rule, 686), 736, None, correction=0.5)  # `Divergence`
    assert "; yours 0.001, 0.002 by what was found, and 0.0005 in force, after" in rule.report() and not rule.found.raised


def test_frozen_before_a_trial_it_says_so() -> None:
    rule = started(4000, freeze_after=100)
    tell(rule, at(rule, 0), 50, None, total_steps=4000)
    tell(rule, at(rule, 50), 100, None, total_steps=4000)
    assert rule.report() == "no trial was made before freeze_after, the rate stays"


def test_an_error_needs_two_mini_batches() -> None:
    with pytest.raises(ValueError, match="judged must be a whole number >= 2"):
        TrialRule(judged=1)
