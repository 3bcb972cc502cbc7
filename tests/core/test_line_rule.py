"""The line's rule without tensors: single decisions, and whole runs on a noisy quadratic, where the best rate is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import pytest

from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import Engine, KnobSpec, ask_and_tell
from hdet.core.evidence import Evidence, Run
from hdet.core.plan import Decision, Learned, Level, Moment, Question, Restore
from hdet.core.rules import LineRule
from hdet.core.rules.range_test import BREAK_OVER_MEAN

# -- single decisions ----------------------------------------------------------------------------------------------------

TOTAL, CYCLE = 1000, 10


class Made:
    """A line with these losses at rho, one function for all knobs together and each knob, or one for each knob."""

    def __init__(self, *losses: Callable[[float], float], error: float = 1e-3, level: float = 2.0, examples: float = 32.0) -> None:
        self.losses, self.given, self.level, self.examples = losses, error, level, examples

    def difference(self, a: float, b: float, knob: int | None = None) -> tuple[float, float]:
        loss = self.losses[(knob or 0) % len(self.losses)]
        mean = loss(a) - loss(b)
        return mean, mean / self.given

    def mean(self, rho: float) -> tuple[float, float]:
        return self.level if rho or self is BAD else min(self.level, 2.0), self.given


def bowl(best: float) -> Callable[[float], float]:
    """Least at ``best``; at 0 what it is far below."""
    return lambda rho: math.log(max(rho, 1e-3) / best) ** 2


def answers(line: Any) -> Callable[[Question], tuple[float, float]]:
    return lambda asked: (
        (*line.mean(asked.rho), line.examples) if isinstance(asked, Level) else line.difference(asked.a, asked.b, asked.knob)
    )  # type: ignore[attr-defined]


class Said:
    """A decision, and whether the weights are to be taken back."""

    def __init__(self, decision: Decision, restart: bool) -> None:
        self.decision, self.restart = decision, restart

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decision, name)

    def __eq__(self, other: object) -> bool:
        theirs = (other.decision, other.restart) if isinstance(other, Said) else (other, False)
        return (self.decision, self.restart) == theirs


def decide(rule: LineRule, told: tuple[Evidence, Made | None]) -> list[Said]:
    seen, line = told
    learned, _ = ask_and_tell(rule, seen, None if line is None else answers(line))
    return [Said(decision, isinstance(learned.end, Restore)) for decision in learned.decisions]


def run_of(total: int | None, interval: int, knobs: int = 1) -> Run:
    return Run(Clock(interval, total_steps=total), [KnobSpec(f"k{k}", 0.0) for k in range(knobs)], 1, [0.0] * knobs)


def evidence(step: int, line: Made | None = None, loss: float | None = 1.0, **more: Any) -> tuple[Evidence, Made | None]:
    """One knob with a schedule of 1 and the value 1, if nothing else is said."""
    n = len(more.get("corrections", (1.0,)))
    given: dict[str, Any] = {
        "cycle": step // CYCLE, "total_steps": TOTAL, "warmup_steps": 0, "sync_interval": CYCLE, "knobs": [f"k{i}" for i in range(n)],
        "multipliers": [[1.0]] * n, "losses": [loss], "scheduled": [1.0] * n, "peak": [1.0] * n, "floor": [0.0] * n,
        "corrections": [1.0] * n,
    } | more  # fmt: skip
    given.setdefault("mean", given["peak"])
    given.setdefault("values", [c * s for c, s in zip(given["corrections"], given["scheduled"], strict=True)])
    return Evidence(step=step, **given), line


SHOWN = Made(lambda rho: (rho - 5) ** 2)
"""Above its beginning from rho = 10 on, that is at 16 in steps of 2."""
LOST = Made(SHOWN.losses[0], level=1e30)
"""Of weights that are not finite."""
BAD = Made(SHOWN.losses[0], level=1e28)
"""Of a mini-batch with an example that has no finite loss, whatever the weights are."""


def coarse_scan(rule: LineRule, loss: float = 2.0, **more: Any) -> list[Said]:
    return decide(rule, evidence(CYCLE, SHOWN, loss, **more))


def swept(rule: LineRule, losses: Sequence[float | None], **more: Any) -> list[Said]:
    """One doubling, of one cycle, for each loss, None being that of broken weights; the decision after the last."""
    decisions: list[Said] = []
    for loss in losses:
        step = int(rule.next_end(TOTAL, CYCLE))
        decisions = decide(rule, evidence(step, LOST if loss is None else SHOWN, loss, **more))
    return decisions


def test_a_run_begins_at_a_16th_and_nothing_moves_before_a_doubling_ends() -> None:
    rule = LineRule()
    engine = Engine([KnobSpec("k", 0.0)], 1, Clock(CYCLE, total_steps=TOTAL), rule)
    assert engine.corrections == [1 / 16] and engine.value(0, 3.0) == 3 / 16
    (decision,) = decide(rule, evidence(CYCLE - 1))
    assert decision == Decision()
    assert rule.sweeping and rule.next_end(TOTAL, CYCLE) == CYCLE


@pytest.mark.parametrize(
    ("total", "interval", "steps"),
    [
        (1000, 10, 10),
        (1000, 1, 8),
        (600, 1, 4),
        (800, 2, 6),
        (2000, 10, 10),
        (10_000, 3, 9),
        (10_000, 30, 8),
        (10**6, 1000, 8),
        (100, 1, 1),
        (20, 2, 1),
    ],
)
def test_a_doubling_is_a_part_of_the_run_eight_steps_at_most_in_whole_cycles_or_less_than_one(
    total: int, interval: int, steps: int
) -> None:
    rule = LineRule()
    assert steps == rule.next_end(total, interval)
    if interval > max(1, total // 10):
        return
    rule.start(run_of(total, interval))
    assert rule.plan(Moment(0, 5, 5)).steps == min(interval, steps)
    rule.load_state_dict(after_sweep().state_dict())
    assert rule.plan(Moment(0, 0, 0)).steps == interval
    assert interval == 1 or rule.plan(Moment(3, 3 * interval + 1, 0)).steps == interval - 1


def test_a_sweep_has_twenty_doublings_however_long_the_run_is() -> None:
    rule = LineRule()
    coarse_scan(rule, total_steps=10**6)
    count = 0
    while rule.sweeping:
        decide(rule, evidence(int(rule.next_end(10**6, CYCLE)), SHOWN, 2.0, total_steps=10**6))
        count += 1
    assert count == 160 / CYCLE - 1  # the coarse scan is one


def test_the_first_doubling_ends_far_below_the_divergence_threshold_whatever_the_schedule_is() -> None:
    """The threshold is at 16 times the value in force."""
    for value, peak in ((1.0, 1.0), (0.01, 1.0), (3e-5, 2e-3)):
        rule = LineRule()
        (decision,) = coarse_scan(rule, corrections=(value / peak,), scheduled=[peak], peak=[peak])
        assert 1 / 16 <= decision.factor < 16 / 4 and decision.ramp == CYCLE
        assert rule.threshold == pytest.approx(16 * value / peak) and rule.sweeping


def test_doublings_double_the_rate_whatever_the_schedule_does_meanwhile() -> None:
    """It grows evenly by the logarithm here, by 3/2 a doubling: then the correction has to grow by 4/3."""
    rule = LineRule()
    coarse_scan(rule, corrections=(0.1,), scheduled=[0.01])
    factors = []
    for doubling in range(4):
        step, scheduled = (doubling + 2) * CYCLE, 0.01 * 1.5 ** (doubling + 1)
        (decision,) = decide(rule, evidence(step, SHOWN, 2.0 - 0.3 * doubling, corrections=(0.1,), scheduled=[scheduled]))
        assert decision.ramp == CYCLE and not decision.restart
        factors.append(decision.factor)
    assert factors == pytest.approx([4 / 3] * 4)


LEARNS = [2.0, 1.2, 0.9]


def test_what_breaks_is_taken_back_and_the_estimate_comes_gently() -> None:
    rule = LineRule()
    coarse_scan(rule, corrections=(60.0,))
    (decision,) = swept(rule, [*LEARNS, None], corrections=(60.0,))
    # The doublings of these made-up evidences are all at 60 / sqrt(2), so the break says less than what is sufficient.
    assert decision.restart and 0 < decision.ramp_from < 1 / 4 and 0.02 * TOTAL < decision.ramp < 0.2 * TOTAL
    assert 60 * decision.factor == pytest.approx(60 / math.sqrt(2) / BREAK_OVER_MEAN)
    assert "training broke" in decision.note and "begun again" in decision.note
    assert not rule.sweeping and not rule.idle and 0.2 * TOTAL < rule.next_end(TOTAL, CYCLE) < 0.4 * TOTAL


@pytest.mark.parametrize(("best", "stays"), [(0.65, False), (0.75, True), (1.0, True), (2.4, True), (2.6, False)])
def test_the_user_s_value_stays_within_the_band(best: float, stays: bool) -> None:
    rule, broken = LineRule(), best * BREAK_OVER_MEAN * math.sqrt(2)
    coarse_scan(rule, corrections=(broken,))
    (decision,) = swept(rule, [*LEARNS, None], corrections=(broken,))
    assert broken * decision.factor == pytest.approx(1.0 if stays else best) and decision.restart
    assert ("which stays" in decision.note) is stays


@pytest.mark.parametrize(("best", "stays"), [(0.06, False), (0.08, True), (9.0, True), (24.0, True), (26.0, False)])
def test_with_few_losses_to_a_doubling_only_a_rate_that_is_far_off_is_changed(best: float, stays: bool) -> None:
    """Six examples in ten steps; of seven the rest are as many as are needed."""
    for examples in (6.0, 7.0):
        rule, broken = LineRule(), best * BREAK_OVER_MEAN * math.sqrt(2)
        coarse_scan(rule, corrections=(broken,))
        swept(rule, LEARNS, corrections=(broken,))
        step = int(rule.next_end(TOTAL, CYCLE))
        (decision,) = decide(rule, evidence(step, Made(SHOWN.losses[0], level=1e30, examples=examples), None, corrections=(broken,)))
        few = examples < 7
        assert broken * decision.factor == pytest.approx(1.0 if stays and few else best) and decision.restart
        assert ("which stays" in decision.note) is (stays and few)
        assert ("from 60 losses to a doubling of the rate" in decision.note) is few


@pytest.mark.parametrize("mean", [1.0, 0.85, 0.5])
def test_what_is_found_is_a_mean_over_the_run_and_the_schedule_tells_its_peak(mean: float) -> None:
    rule = LineRule()
    coarse_scan(rule, corrections=(60.0,), mean=[mean])
    (decision,) = swept(rule, [*LEARNS, None], corrections=(60.0,), mean=[mean])
    assert 60 * decision.factor == pytest.approx(60 / math.sqrt(2) / BREAK_OVER_MEAN / mean)


@pytest.mark.parametrize("losses", [[None], [2.0, None], [2.0, 9.0, 9.0], [2.0, 1e30, None]])
def test_what_breaks_at_once_begins_again_lower(losses: list[float | None]) -> None:
    rule = LineRule()
    coarse_scan(rule)
    (decision,) = swept(rule, losses)
    assert decision.restart and 1 / 256 < decision.factor < 1 / 4 and decision.ramp_from == 1.0
    assert rule.sweeping and rule.doublings == []
    # The line is scanned again there.
    swept(rule, [1.5], corrections=(decision.factor,))
    assert rule.sweeping and rule.threshold == pytest.approx(16 * decision.factor) and rule.doublings == []


def test_not_finite_at_the_first_steps_begins_again_lower() -> None:
    rule = LineRule()
    (decision,) = decide(rule, evidence(CYCLE, Made(lambda rho: 1e30 if rho > 0.3 else 2.0 - rho, level=1e30), None))
    assert decision.restart and 1 / 256 < decision.factor < 1 / 4 and rule.sweeping and rule.threshold == 0.0


def test_what_is_never_finite_gives_the_user_s_value_back_after_15_percent() -> None:
    rule, steps = LineRule(), []
    while rule.sweeping:
        steps.append(int(rule.next_end(TOTAL, CYCLE)))
        (decision,) = decide(rule, evidence(steps[-1], LOST, None, corrections=(0.01,)))
    assert steps[-1] == 0.15 * TOTAL and 0.01 * decision.factor == pytest.approx(1.0) and "nothing finite" in decision.note


def test_weights_that_do_not_move_are_given_a_higher_rate_and_scanned_again() -> None:
    """A scaler has skipped the first steps, or a rate is below the parameters' last bit."""
    rule = LineRule()
    (decision,) = decide(rule, evidence(CYCLE, Made(lambda rho: 0.0)))
    assert decision.factor == 16 and not decision.restart and rule.threshold == 0.0
    decide(rule, evidence(2 * CYCLE, SHOWN))
    assert rule.threshold == 16
    still = LineRule()
    while still.sweeping:
        (decision,) = decide(still, evidence(int(still.next_end(TOTAL, CYCLE)), Made(lambda rho: 0.0), corrections=(3.0,)))
    assert 3 * decision.factor == pytest.approx(1.0) and "do not move" in decision.note and still.ended == 0.15 * TOTAL


def test_a_bad_mini_batch_at_a_doublings_end_is_not_read() -> None:
    """The next cycle is, and its training losses count like the others'; not for ever."""
    rule, plain = LineRule(), LineRule()
    assert decide(rule, evidence(CYCLE, BAD, None)) == [Decision()] and rule.threshold == 0.0
    decide(rule, evidence(2 * CYCLE, SHOWN))
    decide(plain, evidence(CYCLE, SHOWN))
    assert rule.threshold == plain.threshold and rule.untrained[1] == plain.untrained[1]
    assert decide(rule, evidence(3 * CYCLE, BAD, 1.0)) == [Decision()]
    decide(rule, evidence(4 * CYCLE, SHOWN, 2.0))
    assert [row[1] for row in rule.doublings] == [1.5]
    said = {step: decide(rule, evidence(step, BAD, None, corrections=(3.0,)))[0] for step in range(50, 160, CYCLE)}
    assert [step for step, decision in said.items() if decision != Decision()] == [0.15 * TOTAL]
    assert said[150].restart and 3 * said[150].factor == pytest.approx(1.0) and not rule.sweeping


@pytest.mark.parametrize("losses", [[2.0, None, 1.0], [2.0, 1.0, None], [None, 2.0, 1.0]])
def test_a_mini_batch_without_a_loss_breaks_nothing(losses: list[float | None]) -> None:
    """Its cycle is left out; and where a doubling has no other, the current batch stands for it."""
    found = []
    for told in (losses, [x for x in losses if x is not None]):
        rule = LineRule()
        long = {"total_steps": 3 * TOTAL, "sync_interval": 1}
        coarse_scan(rule, **long)
        for step, loss in enumerate(told, 19 - len(told)):  # the doubling ends at 18
            (decision,) = decide(rule, evidence(step, SHOWN if step == 18 else None, loss, **long))
        found.append((decision, [row[1] for row in rule.doublings]))
    assert found[0] == found[1] and not found[0][0].restart
    rule = LineRule()
    coarse_scan(rule)
    (decision,) = decide(rule, evidence(2 * CYCLE, Made(SHOWN.losses[0], level=1.75), None))
    assert not decision.restart and rule.doublings[0][1] == 1.75


@pytest.mark.parametrize(
    ("now", "goal", "note"), [(100.0, 1.0, "no reason to go higher"), (1.0, 1 / math.sqrt(2) / 15, "training broke, the best")]
)
def test_a_break_before_anything_was_learned_lowers_a_rate_but_raises_none(now: float, goal: float, note: str) -> None:
    rule = LineRule()
    coarse_scan(rule, corrections=(now,))
    (decision,) = swept(rule, [2.0, 2.0, 2.0, 2.0, 9.0, 9.0], corrections=(now,))
    assert not rule.sweeping and decision.restart
    assert now * decision.factor == pytest.approx(goal) and note in decision.note


def test_more_that_does_not_help_is_enough() -> None:
    """Two doublings without progress, of losses with small errors."""
    rule = LineRule()
    coarse_scan(rule, corrections=(0.1,))
    swept(rule, [2.0, 1.0, 1.0], corrections=(0.1,))
    assert rule.sweeping
    decisions = swept(rule, [1.0], corrections=(0.1,))
    assert "more does not help" in decisions[0].note and not rule.sweeping


def test_several_cycles_a_doubling_count_alike_and_one_that_is_not_finite_breaks() -> None:
    said = []
    for first, second, line in ((1.0, 2.0, SHOWN), (1.5, 1.5, SHOWN), (1.0, None, LOST)):
        rule = LineRule()
        short = {"total_steps": 2600, "sync_interval": 4}
        for step in (4, 8, 12, 16):
            decide(rule, evidence(step, SHOWN if step % 8 == 0 else None, 2.0, **short))
        assert rule.next_end(2600, 4) == 24
        decide(rule, evidence(20, None, first, **short))
        said.append((decide(rule, evidence(24, line, second, **short)), rule.state_dict()))
    assert said[0] == said[1] and not said[0][0][0].restart
    assert said[2][0][0].restart and "broken at once" in said[2][0][0].note


@pytest.mark.parametrize(("best", "moves"), [(8.0, True), (1.5, False), (1.0, False), (0.5, False), (0.02, False)])
def test_a_late_line_search_counts_where_the_rate_is_far_too_low(best: float, moves: bool) -> None:
    rule = after_sweep()
    (decision,) = decide(rule, evidence(260, Made(bowl(best))))
    assert decision.factor == (pytest.approx(best / 2, rel=0.05) if moves else 1.0)
    assert decision.t is not None and (decision.t < 0) is (best > 1) and not decision.restart


def after_sweep(**settings: Any) -> LineRule:
    rule = LineRule(**settings)
    coarse_scan(rule)
    swept(rule, [*LEARNS, None])
    assert not rule.sweeping
    return rule


def test_it_rests_after_40_percent_and_long_cycles_skip_a_late_line_search() -> None:
    rule = after_sweep()
    ends = [rule.next_end(TOTAL, CYCLE)]
    for step in (260, 400):
        assert not rule.idle
        decide(rule, evidence(step, Made(bowl(1.0))))
        ends.append(rule.next_end(TOTAL, CYCLE))
    assert ends == [260, 400, math.inf] and rule.idle
    once = after_sweep()
    decide(once, evidence(410, Made(bowl(1.0))))
    assert once.idle


def test_freeze_after_the_sweep_keeps_what_was_found() -> None:
    rule = after_sweep(freeze_after=100)
    decide(rule, evidence(100))
    assert rule.idle
    (held,) = decide(rule, evidence(260, Made(bowl(60.0))))
    assert held.factor == 1.0 and not held.restart


def test_what_is_under_way_begins_anew_and_what_was_found_stays() -> None:
    rule = LineRule()
    coarse_scan(rule)
    swept(rule, [1.8, 1.2])
    rule.restart(Moment(3, 33, 33))
    assert rule.sweeping and rule.doublings == [] and rule.next_end(TOTAL, CYCLE) == 43
    (decision,) = decide(rule, evidence(43, SHOWN, 1.1))
    assert 1 / 16 <= decision.factor < 16 / 4 and rule.sweeping
    found = after_sweep()
    before = found.state_dict()
    found.restart(Moment(33, 333, 333))
    assert found.state_dict() == before


def test_a_state_that_is_loaded_goes_on_alike_at_any_time() -> None:
    straight, moved = LineRule(), 0
    course: list[tuple[Made | None, float | None]] = [
        (SHOWN, 2.0),
        (SHOWN, 2.1),
        (SHOWN, 1.9),
        (SHOWN, 1.2),
        (SHOWN, 1.1),
        (SHOWN, 0.9),
        (LOST, None),
    ]
    later = [(260, Made(bowl(60.0))), (400, Made(bowl(0.5)))]
    for step, line, loss in [*((CYCLE * (i + 1), *row) for i, row in enumerate(course)), *((step, line, 0.5) for step, line in later)]:
        other = LineRule()
        other.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        ours, theirs = (decide(rule, evidence(step, line, loss)) for rule in (straight, other))
        assert ours == theirs
        assert straight.state_dict() == other.state_dict()
        assert (straight.idle, straight.sweeping, straight.next_end(TOTAL, CYCLE)) == (
            other.idle,
            other.sweeping,
            other.next_end(TOTAL, CYCLE),
        )
        moved += ours[0].factor != 1
    assert straight.idle and moved >= 6


def test_a_run_of_unknown_length_is_refused_and_settings_are_validated() -> None:
    with pytest.raises(ValueError, match="pass total_steps"):
        LineRule().start(run_of(None, 1))
    LineRule().start(run_of(1000, 1))
    for name in ("significant", "farthest"):
        for bad in (0, math.nan, math.inf, "2"):
            with pytest.raises(ValueError, match=name):
                LineRule(**{name: bad})


# -- whole runs ----------------------------------------------------------------------------------------------------------

EXAMPLES, NOISE, STEPS = 16, 0.3, 800
Vector = list[float]


class Descent:
    """Examples with losses sum_i h_i (x_i - s_i)^2 / 2, each with its own s; the least of them all is at 0. A tenth of the run up, then a cosine.

    Knob k moves its own curvatures from its own start. Without a rule it is the fixed schedule. ``flat``: the loss does not depend on x.
    """

    def __init__(self, starts: Sequence[float], rule: LineRule | None, *, interval: int = 2, seed: int = 0, flat: bool = False) -> None:
        self.starts, self.rule, self.interval, self.flat, self.random = starts, rule, interval, flat, random.Random(seed)
        self.curvatures = [1 / (i + 1) for i in range(12)]
        self.owner = [i % len(starts) for i in range(12)]
        specs = [KnobSpec(f"k{k}", 0.0) for k in range(len(starts))]
        self.engine = Engine(specs, 1, Clock(interval, total_steps=STEPS), rule)
        if rule is not None:
            rule.start(run_of(STEPS, interval, len(starts)))
        self.x: Vector = [1.0] * 12
        self.origin, self.begun, self.samples, self.mean = list(self.x), 0, 0, list(self.x)
        self.losses, self.rates, self.notes = list[float](), list[Vector](), list[tuple[int, str]]()

    def phase(self) -> float:
        part = (self.engine.step + 1) / STEPS
        return 10 * part if part < 0.1 else 0.5 * (1 + math.cos(math.pi * (part - 0.1) / 0.9))

    def run(self, steps: int = STEPS) -> Descent:
        for _ in range(steps):
            phase = self.phase()
            rates = [self.engine.value(k, start * phase) for k, start in enumerate(self.starts)]
            batch = [[self.random.gauss(0, NOISE * EXAMPLES**0.5) for _ in self.x] for _ in range(EXAMPLES)]
            if self.rule is not None and not self.rule.idle:  # else nobody looks at it
                loss = fmean(self.example(self.x, s) for s in batch)
                self.losses.append(loss if loss < 1e29 else math.inf)
            center = [fmean(column) for column in zip(*batch, strict=True)]
            self.x = [
                max(-1e30, min(1e30, v - rates[k] * h * (v - c)))
                for v, k, h, c in zip(self.x, self.owner, self.curvatures, center, strict=True)
            ]
            self.rates.append(rates)
            ends = self.engine.tick()
            self.sample()
            if ends:
                self.close(batch)
        return self

    def sample(self) -> None:
        """A sweep is read where it stands, a later interval at the mean of its second half."""
        if self.rule is None or self.rule.idle:
            return
        end = self.rule.next_end(STEPS, self.interval)
        if self.rule.sweeping:
            if self.engine.step >= end:
                self.samples, self.mean = 1, list(self.x)
        elif self.engine.step > (self.begun + end) / 2:
            self.samples += 1
            self.mean = [m + (v - m) / self.samples for m, v in zip(self.mean, self.x, strict=True)]

    def close(self, batch: list[Vector]) -> None:
        due = self.rule is not None and self.engine.step >= self.rule.next_end(STEPS, self.interval) and self.samples > 0
        outcome = self.engine.close(
            [fmean(self.losses) if self.losses else 1.0], answer=answers(_Way(self, batch)) if due else None,
            scheduled=[s * self.phase() for s in self.starts], peak=list(self.starts),
        )  # fmt: skip
        self.losses = []
        self.notes += [(self.engine.step, note) for note in outcome.notes]
        if not due or self.rule is None:
            return
        if isinstance(outcome.end, Restore):
            self.x = list(self.origin)
        if not self.rule.sweeping:
            self.origin, self.begun = list(self.x), self.engine.step
        self.samples = 0

    def example(self, x: Sequence[float], s: Sequence[float]) -> float:
        if self.flat:
            return 2.0 + s[0]
        loss = 0.5 * sum(h * (v - c) ** 2 for h, v, c in zip(self.curvatures, x, s, strict=True))
        return min(loss, 1e30) if math.isfinite(loss) else 1e30

    def loss(self) -> float:
        return 0.5 * sum(h * v * v for h, v in zip(self.curvatures, self.x, strict=True))

    def values(self) -> Vector:
        """The peaks that were found."""
        return [start * correction for start, correction in zip(self.starts, self.engine.corrections, strict=True)]

    def taken_back(self) -> list[int]:
        return [step for step, note in self.notes if "begun again" in note]


class _Way:
    examples = float(EXAMPLES)

    def __init__(self, run: Descent, batch: list[Vector]) -> None:
        self.run, self.batch = run, batch

    def losses(self, rho: float, knob: int | None) -> Vector:
        run = self.run
        point = [
            a + (rho if knob in (None, owner) else 1.0) * (m - a) for a, m, owner in zip(run.origin, run.mean, run.owner, strict=True)
        ]  # fmt: skip
        return [run.example(point, s) for s in self.batch]

    def differences(self, a: float, b: float, knob: int | None) -> Vector:
        return [x - y for x, y in zip(self.losses(a, knob), self.losses(b, knob), strict=True)]

    def difference(self, a: float, b: float, knob: int | None = None) -> tuple[float, float]:
        d = self.differences(a, b, knob)
        mean, error = fmean(d), stdev(d) / math.sqrt(len(d))
        return mean, max(-1e6, min(1e6, mean / error)) if error else math.copysign(1e6, mean) if mean else 0.0

    def mean(self, rho: float) -> tuple[float, float]:
        losses = self.losses(rho, None)
        return fmean(losses), stdev(losses) / math.sqrt(EXAMPLES)


SEEDS = range(3)


@cache
def fixed(start: float) -> float:
    """Mean loss over seeds at the end of the fixed schedule."""
    return fmean(Descent([start], None, seed=seed).run().loss() for seed in SEEDS)


@cache
def best() -> float:
    return min((2.0**k for k in range(-5, 1)), key=fixed)


@cache
def ends(exponent: int) -> list[Descent]:
    return [Descent([best() * 2.0**exponent], LineRule(), seed=seed).run() for seed in SEEDS]


EXPONENTS = (-8, -5, -2, 0, 6, 12)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_from_256_times_too_low_to_4096_times_too_high_the_end_is_that_of_the_best_rate(exponent: int) -> None:
    """The loss of the best fixed rate, up to a fifth (the start alone ends at 1 000 times as much at 2^-8), at nearly its rate, and without harm
    where the start is the best rate already."""
    runs = ends(exponent)
    assert fmean(run.loss() for run in runs) < 1.2 * fixed(best())
    for run in runs:
        (step,) = run.taken_back()
        assert step <= 0.08 * STEPS and run.rule is not None and run.rule.idle
        assert 0.75 < run.values()[0] / best() < 2.6 and (exponent != 0 or run.engine.corrections == [1.0])


def test_doublings_double_the_rate_under_a_real_schedule_and_nothing_else_moves_before_the_end() -> None:
    run = ends(-8)[0]
    assert run.rule is not None
    rates = [row[0] for row in run.rule.doublings]
    # The schedule itself grows from nothing here; how much is told from its last doubling.
    assert len(rates) >= 5 and all(1.4 < high / low < 2.2 for low, high in pairwise(rates)), rates
    (back,) = run.taken_back()
    assert max(rate for (rate,) in run.rates[:back]) > 1.4 * run.values()[0]
    after = [rate for (rate,) in run.rates[back:]]
    assert after[0] < run.values()[0] / 4 and max(after) < 1.01 * run.values()[0]
    assert all(high < 1.2 * low for low, high in pairwise(after))  # no jump


def test_a_start_that_explodes_in_the_first_steps_is_found_again() -> None:
    """2^100 times too high: no loss but the first is finite."""
    run = Descent([2.0**100], LineRule()).run(6)
    assert run.x == [1.0] * 12 and run.rule is not None and run.rule.sweeping
    assert any("nothing finite" in note for _, note in run.notes)


def test_where_nothing_can_be_learned_the_user_s_rate_is_back_after_15_percent() -> None:
    run = Descent([0.1], LineRule(), flat=True).run(130)
    assert run.taken_back() == [120] and run.engine.corrections == [1.0]
    run.run(STEPS - 130)
    assert run.engine.corrections == [1.0] and run.rates[-100] == [pytest.approx(0.1 * run_phase(STEPS - 100))]


def run_phase(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * ((step + 1) / STEPS - 0.1) / 0.9))


@pytest.mark.parametrize("freeze_after", [20, 0.025])
def test_frozen_in_the_middle_of_the_sweep_it_is_the_user_s_run_from_there_on(freeze_after: float) -> None:
    run = Descent([0.25], LineRule(freeze_after=freeze_after)).run(40)
    (step,) = run.taken_back()
    assert step == 24 and run.engine.corrections == [1.0] and run.rule is not None and run.rule.idle
    run.run(STEPS - 40)
    assert run.rates[200] == [pytest.approx(0.25 * run_phase(200))] and run.loss() < 2 * fixed(best())


def test_knobs_keep_their_ratio_in_the_sweep_and_one_that_is_far_too_low_is_found_later() -> None:
    """The second knob's rate is a 512th of the first's: the first breaks training for both."""
    run = Descent([best(), best() / 512], LineRule())
    run.run(200)
    high, low = run.engine.corrections
    assert high == low and all(b == pytest.approx(a / 512) for a, b in run.rates)
    run.run(STEPS - 200)
    found, far = run.engine.corrections
    assert found == high and far > 4 * low


# -- ramps in the engine -----------------------------------------------------------------------------------


class Says(Controller):
    """Answers with these decisions, one after the other."""

    name = "says"

    def __init__(self, *decisions: Decision) -> None:
        super().__init__()
        self.decisions = list(decisions)

    def learn(self, evidence: Evidence) -> Learned:
        return Learned([self.decisions.pop(0) if self.decisions else Decision()])


def course(engine: Engine, steps: int) -> list[float]:
    """The correction of each step."""
    values = []
    for _ in range(steps):
        values.append(engine.value(0, 1.0))
        if engine.tick():
            engine.close([1.0], scheduled=[1.0])
    return values


def engine_of(*decisions: Decision) -> Engine:
    return Engine([KnobSpec("lr", 0.0)], 1, Clock(2), Says(*decisions))


def test_a_rise_comes_in_steps_that_are_even_by_the_logarithm_and_a_fall_at_once() -> None:
    engine = engine_of(Decision(factor=16.0, ramp=4), Decision(), Decision(factor=0.5, ramp=4))
    assert course(engine, 9) == pytest.approx([1, 1, 2, 4, 8, 16, 8, 8, 8])


def test_a_rise_that_is_under_way_goes_on_from_what_is_in_force() -> None:
    engine = engine_of(Decision(factor=16.0, ramp=4), Decision(factor=8.0, ramp=2))
    assert course(engine, 7) == pytest.approx([1, 1, 2, 4, 32, 128, 128])  # 8 would have been next


def test_a_restart_begins_at_a_part_of_its_value_even_where_that_falls() -> None:
    engine = engine_of(Decision(factor=0.5, ramp=4, ramp_from=1 / 16))
    assert course(engine, 7) == pytest.approx([1, 1, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1 / 2])
    at_once = engine_of(Decision(factor=4.0, ramp_from=1.0))
    assert course(at_once, 4) == [1, 1, 4, 4]


def test_a_rise_is_counted_in_steps_of_the_schedule() -> None:
    """Which goes on by four for each of the engine's here, as under accelerate: 16 of them are four of its own."""
    engine = Engine([KnobSpec("lr", 0.0)], 1, Clock(2), Says(Decision(factor=16.0, ramp=16)))
    values = []
    for _ in range(7):
        values.append(engine.value(0, 1.0))
        if engine.tick():
            engine.close([1.0], scheduled=[1.0], schedule_step=4 * engine.step)
    assert values == pytest.approx([1, 1, 2, 4, 8, 16, 16])


@pytest.mark.parametrize("part", [0.0, -1.0, math.nan, math.inf])
def test_a_ramp_from_nothing_is_refused(part: float) -> None:
    with pytest.raises(ValueError, match="ramp_from"):
        Decision(ramp_from=part)


def test_a_ramp_is_part_of_the_state_and_older_states_load() -> None:
    straight = engine_of(Decision(factor=16.0, ramp=4))
    course(straight, 3)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed, older = engine_of(Decision()), engine_of(Decision())
    resumed.load_state_dict(state)
    assert course(resumed, 4) == course(straight, 4) == pytest.approx([4, 8, 16, 16])
    older.load_state_dict({key: value for key, value in state.items() if key != "ramps"})
    assert course(older, 2) == [16.0, 16.0]
