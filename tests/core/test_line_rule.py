"""The line's rule without tensors, decision by decision. (Whole runs: tests/controllers/test_line_runs.py.)"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec, ask_and_tell
from hdet.core.evidence import Evidence, Run
from hdet.core.plan import Decision, Level, Moment, Question, Restore
from hdet.core.rules import LineRule
from hdet.core.rules.range_test import BREAK_OVER_MEAN

TOTAL, CYCLE = 1000, 10
NOTHING = SimpleNamespace(**vars(Decision()), restart=False)
LEARNS = [2.0, 1.2, 0.9]


@dataclass(frozen=True)
class Line:
    """Answers questions: ``loss`` at rho, and the current batch's mean loss, which is at most 2 at rho = 0 unless the batch is ``bad``."""

    loss: Callable[[float], float]
    level: float = 2.0
    error: float = 1e-3
    examples: float = 32.0
    bad: bool = False

    def __call__(self, asked: Question) -> tuple[float, ...]:
        if isinstance(asked, Level):
            return self.level if asked.rho or self.bad else min(self.level, 2.0), self.error, self.examples
        mean = self.loss(asked.a) - self.loss(asked.b)  # type: ignore[attr-defined]
        return mean, mean / self.error


def bowl(best: float) -> Line:
    """Least at ``best``; at 0 what it is far below."""
    return Line(lambda rho: math.log(max(rho, 1e-3) / best) ** 2)


SHOWN = Line(lambda rho: (rho - 5) ** 2)
"""Above its beginning from rho = 10 on, that is at 16 in steps of 2."""
LOST = replace(SHOWN, level=1e30)
"""Of weights that are not finite."""
BAD = replace(SHOWN, level=1e28, bad=True)
"""Of a mini-batch with an example that has no finite loss, whatever the weights are."""
STILL = Line(lambda rho: 0.0)


def decide(rule: LineRule, step: int, line: Line | None = None, loss: float | None = 1.0, correction: float = 1.0, **more: Any) -> Any:
    """The decision on one knob, whose schedule is 1 if nothing else is said; ``restart``: are the weights to be taken back?"""
    given: dict[str, Any] = {
        "cycle": step // CYCLE, "total_steps": TOTAL, "warmup_steps": 0, "sync_interval": CYCLE, "knobs": ["k"], "multipliers": [[1.0]],
        "losses": [loss], "scheduled": [1.0], "peak": [1.0], "floor": [0.0], "mean": [1.0], "corrections": [correction], **more,
    }  # fmt: skip
    learned, _ = ask_and_tell(rule, Evidence(step=step, values=[correction * given["scheduled"][0]], **given), line)
    return SimpleNamespace(**vars(learned.decisions[0]), restart=isinstance(learned.end, Restore))


def coarse_scan(rule: LineRule, **more: Any) -> Any:
    return decide(rule, CYCLE, SHOWN, 2.0, **more)


def swept(rule: LineRule, losses: Sequence[float | None], lost: Line = LOST, **more: Any) -> Any:
    """One doubling, of one cycle, for each loss, None being that of broken weights; the decision after the last."""
    for loss in losses:
        decision = decide(rule, int(rule.next_end(TOTAL, CYCLE)), lost if loss is None else SHOWN, loss, **more)
    return decision


def after_sweep(**settings: Any) -> LineRule:
    rule = LineRule(**settings)
    coarse_scan(rule)
    swept(rule, [*LEARNS, None])
    assert not rule.sweeping
    return rule


def test_a_run_begins_at_a_16th_and_nothing_moves_before_a_doubling_ends() -> None:
    rule = LineRule()
    engine = Engine([KnobSpec("k", 0.0)], 1, Clock(CYCLE, total_steps=TOTAL), rule)
    assert engine.corrections == [1 / 16] and engine.value(0, 3.0) == 3 / 16
    assert decide(rule, CYCLE - 1) == NOTHING
    assert rule.sweeping and rule.next_end(TOTAL, CYCLE) == CYCLE


@pytest.mark.parametrize(
    ("total", "interval", "steps"),
    [
        (1000, 10, 10), (1000, 1, 8), (600, 1, 4), (800, 2, 6), (2000, 10, 10), (10_000, 3, 9), (10_000, 30, 8), (10**6, 1000, 8),
        (100, 1, 1), (20, 2, 1),
    ],
)  # fmt: skip
def test_a_doubling_is_a_part_of_the_run_eight_steps_at_most_in_whole_cycles_or_less_than_one(
    total: int, interval: int, steps: int
) -> None:
    rule = LineRule()
    assert steps == rule.next_end(total, interval)
    if interval > max(1, total // 10):
        return
    rule.start(Run(Clock(interval, total_steps=total), [KnobSpec("k", 0.0)], 1, [0.0]))
    assert rule.plan(Moment(0, 5, 5)).steps == min(interval, steps)
    rule.load_state_dict(after_sweep().state_dict())
    assert rule.plan(Moment(0, 0, 0)).steps == interval
    assert interval == 1 or rule.plan(Moment(3, 3 * interval + 1, 0)).steps == interval - 1


def test_a_sweep_that_learns_nothing_has_twenty_doublings_however_long_the_run_is() -> None:
    rule, count = LineRule(), 0
    coarse_scan(rule, total_steps=10**6)
    while rule.sweeping:
        decision = decide(rule, int(rule.next_end(10**6, CYCLE)), SHOWN, 2.0, 3.0, total_steps=10**6)
        count += 1
    assert count == 160 / CYCLE - 1  # the coarse scan is one
    assert decision.restart and 3 * decision.factor == pytest.approx(1.0) and "nothing was found" in decision.note


@pytest.mark.parametrize(("value", "peak"), [(1.0, 1.0), (0.01, 1.0), (3e-5, 2e-3)])
def test_the_first_doubling_ends_far_below_the_divergence_threshold_whatever_the_schedule_is(value: float, peak: float) -> None:
    """The threshold is at 16 times the value in force."""
    rule = LineRule()
    decision = coarse_scan(rule, correction=value / peak, scheduled=[peak], peak=[peak])
    assert 1 / 16 <= decision.factor < 16 / 4 and decision.ramp == CYCLE
    assert rule.threshold == pytest.approx(16 * value / peak) and rule.sweeping


def test_doublings_double_the_rate_whatever_the_schedule_does_meanwhile() -> None:
    """It grows evenly by the logarithm here, by 3/2 a doubling: then the correction has to grow by 4/3."""
    rule = LineRule()
    coarse_scan(rule, correction=0.1, scheduled=[0.01])
    assert rule.untrained == [0.0, 2.0, pytest.approx(SHOWN.error / math.sqrt(CYCLE))]  # of the mean over as many batches
    for doubling in range(4):
        scheduled = [0.01 * 1.5 ** (doubling + 1)]
        decision = decide(rule, (doubling + 2) * CYCLE, SHOWN, 2.0 - 0.3 * doubling, 0.1, scheduled=scheduled)
        assert decision.factor == pytest.approx(4 / 3) and decision.ramp == CYCLE and not decision.restart


def test_what_breaks_is_taken_back_and_the_estimate_comes_gently() -> None:
    rule = LineRule()
    coarse_scan(rule, correction=60.0)
    decision = swept(rule, [*LEARNS, None], correction=60.0)
    # The doublings of these made-up evidences are all at 60 / sqrt(2), so the break says less than what is sufficient.
    assert decision.restart and 0 < decision.ramp_from < 1 / 4 and 0.02 * TOTAL < decision.ramp < 0.2 * TOTAL
    assert 60 * decision.factor == pytest.approx(60 / math.sqrt(2) / BREAK_OVER_MEAN)
    assert "training broke" in decision.note and "begun again" in decision.note
    assert not rule.sweeping and not rule.idle and 0.2 * TOTAL < rule.next_end(TOTAL, CYCLE) < 0.4 * TOTAL


@pytest.mark.parametrize(
    ("best", "examples", "mean", "stays"),
    [
        (0.65, 7, 1.0, False), (0.75, 7, 1.0, True), (1.0, 32, 1.0, True), (2.4, 7, 1.0, True), (2.6, 32, 1.0, False), (9.0, 7, 1.0, False),
        (0.06, 6, 1.0, False), (0.08, 6, 1.0, True), (9.0, 6, 1.0, True), (24.0, 6, 1.0, True), (26.0, 6, 1.0, False),
        (0.65, 32, 0.85, True), (2.4, 32, 0.85, False), (0.3, 32, 0.5, False),
    ],
)  # fmt: skip
def test_the_user_s_value_stays_within_a_band_which_is_wider_where_losses_are_few(
    best: float, examples: float, mean: float, stays: bool
) -> None:
    """``best``: the best mean rate of the run, of which the schedule's ``mean`` makes a peak. Six examples in ten steps are too few, seven not."""
    rule, broken = LineRule(), best * BREAK_OVER_MEAN * math.sqrt(2)
    coarse_scan(rule, correction=broken)
    decision = swept(rule, [*LEARNS, None], replace(LOST, examples=examples), correction=broken, mean=[mean])
    assert broken * decision.factor == pytest.approx(1.0 if stays else best / mean) and decision.restart
    assert ("which stays" in decision.note) is stays
    assert ("from 60 losses to a doubling of the rate" in decision.note) is (examples == 6)


@pytest.mark.parametrize("losses", [[None], [2.0, None], [2.0, 9.0, 9.0], [2.0, 1e30, None]])
def test_what_breaks_at_once_begins_again_lower(losses: list[float | None]) -> None:
    rule = LineRule()
    coarse_scan(rule)
    decision = swept(rule, losses)
    assert decision.restart and 1 / 256 < decision.factor < 1 / 4 and decision.ramp_from == 1.0
    assert rule.sweeping and rule.doublings == []
    # The line is scanned again there.
    swept(rule, [1.5], correction=decision.factor)
    assert rule.sweeping and rule.threshold == pytest.approx(16 * decision.factor) and rule.doublings == []


def test_not_finite_at_the_first_steps_begins_again_lower() -> None:
    rule = LineRule()
    decision = decide(rule, CYCLE, Line(lambda rho: 1e30 if rho > 0.3 else 2.0 - rho, level=1e30), None)
    assert decision.restart and 1 / 256 < decision.factor < 1 / 4 and rule.sweeping and rule.threshold == 0.0


@pytest.mark.parametrize(("line", "loss", "note"), [(LOST, None, "nothing finite"), (STILL, 1.0, "do not move")])
def test_what_shows_nothing_gives_the_user_s_value_back_after_15_percent(line: Line, loss: float | None, note: str) -> None:
    rule = LineRule()
    while rule.sweeping:
        step = int(rule.next_end(TOTAL, CYCLE))
        decision = decide(rule, step, line, loss, 3.0)
    assert step == 0.15 * TOTAL and 3 * decision.factor == pytest.approx(1.0) and note in decision.note


def test_weights_that_do_not_move_are_given_a_higher_rate_and_scanned_again() -> None:
    """A scaler has skipped the first steps, or a rate is below the parameters' last bit."""
    rule = LineRule()
    decision = decide(rule, CYCLE, STILL)
    assert decision.factor == 16 and not decision.restart and rule.threshold == 0.0
    decide(rule, 2 * CYCLE, SHOWN)
    assert rule.threshold == 16


def test_a_bad_mini_batch_at_a_doublings_end_is_not_read() -> None:
    """The next cycle is, and its training losses count like the others'; not for ever."""
    rule, plain = LineRule(), LineRule()
    assert decide(rule, CYCLE, BAD, None) == NOTHING and rule.threshold == 0.0
    decide(rule, 2 * CYCLE, SHOWN)
    decide(plain, CYCLE, SHOWN)
    assert rule.threshold == plain.threshold and rule.untrained[1] == plain.untrained[1]
    assert decide(rule, 3 * CYCLE, BAD) == NOTHING
    decide(rule, 4 * CYCLE, SHOWN, 2.0)
    assert [row[1] for row in rule.doublings] == [1.5]
    said = {step: decide(rule, step, BAD, None, 3.0) for step in range(50, 160, CYCLE)}
    assert [step for step, decision in said.items() if decision != NOTHING] == [0.15 * TOTAL]
    assert said[150].restart and 3 * said[150].factor == pytest.approx(1.0) and not rule.sweeping


@pytest.mark.parametrize("losses", [[2.0, None, 1.0], [2.0, 1.0, None], [None, 2.0, 1.0]])
def test_a_mini_batch_without_a_loss_is_left_out(losses: list[float | None]) -> None:
    found = []
    for told in (losses, [x for x in losses if x is not None]):
        rule = LineRule()
        long = {"total_steps": 3 * TOTAL, "sync_interval": 1}
        coarse_scan(rule, **long)
        for step, loss in enumerate(told, 19 - len(told)):  # the doubling ends at 18
            decision = decide(rule, step, SHOWN if step == 18 else None, loss, **long)
        found.append((decision, [row[1] for row in rule.doublings]))
    assert found[0] == found[1] and not found[0][0].restart


def test_where_a_doubling_has_no_loss_the_current_batch_stands_for_it() -> None:
    rule = LineRule()
    coarse_scan(rule)
    decision = decide(rule, 2 * CYCLE, replace(SHOWN, level=1.75), None)
    assert not decision.restart and rule.doublings[0][1] == 1.75


@pytest.mark.parametrize(
    ("now", "goal", "note"), [(100.0, 1.0, "no reason to go higher"), (1.0, 1 / math.sqrt(2) / 15, "training broke, the best")]
)
def test_a_break_before_anything_was_learned_lowers_a_rate_but_raises_none(now: float, goal: float, note: str) -> None:
    rule = LineRule()
    coarse_scan(rule, correction=now)
    decision = swept(rule, [2.0, 2.0, 2.0, 2.0, 9.0, 9.0], correction=now)
    assert not rule.sweeping and decision.restart
    assert now * decision.factor == pytest.approx(goal) and note in decision.note


def test_more_that_does_not_help_is_enough() -> None:
    """Two doublings without progress, of losses with small errors."""
    rule = LineRule()
    coarse_scan(rule, correction=0.1)
    swept(rule, [2.0, 1.0, 1.0], correction=0.1)
    assert rule.sweeping
    assert "more does not help" in swept(rule, [1.0], correction=0.1).note and not rule.sweeping


def test_several_cycles_a_doubling_count_alike_and_one_that_is_not_finite_breaks() -> None:
    said = []
    for first, second, line in ((1.0, 2.0, SHOWN), (1.5, 1.5, SHOWN), (1.0, None, LOST)):
        rule = LineRule()
        short = {"total_steps": 2600, "sync_interval": 4}
        for step in (4, 8, 12, 16):
            decide(rule, step, SHOWN if step % 8 == 0 else None, 2.0, **short)
        assert rule.next_end(2600, 4) == 24
        decide(rule, 20, None, first, **short)
        said.append((decide(rule, 24, line, second, **short), rule.state_dict()))
    assert said[0] == said[1] and not said[0][0].restart
    assert said[2][0].restart and "broken at once" in said[2][0].note


@pytest.mark.parametrize(("best", "moves"), [(8.0, True), (1.5, False), (1.0, False), (0.5, False), (0.02, False)])
def test_a_late_line_search_counts_where_the_rate_is_far_too_low(best: float, moves: bool) -> None:
    decision = decide(after_sweep(), 260, bowl(best))
    assert decision.factor == (pytest.approx(best / 2, rel=0.05) if moves else 1.0)
    assert decision.t is not None and (decision.t < 0) is (best > 1) and not decision.restart
    assert ("far too low" in decision.note) is moves


def test_it_rests_after_40_percent_and_long_cycles_skip_a_late_line_search() -> None:
    rule, once = after_sweep(), after_sweep()
    ends = [rule.next_end(TOTAL, CYCLE)]
    for step in (260, 400):
        assert not rule.idle
        decide(rule, step, bowl(1.0))
        ends.append(rule.next_end(TOTAL, CYCLE))
    assert ends == [260, 400, math.inf] and rule.idle
    decide(once, 410, bowl(1.0))
    assert once.idle


def test_freeze_after_the_sweep_keeps_what_was_found() -> None:
    rule = after_sweep(freeze_after=100)
    decide(rule, 100)
    assert rule.idle
    held = decide(rule, 260, bowl(60.0))
    assert held.factor == 1.0 and not held.restart


@pytest.mark.parametrize("freeze_after", [25, 0.025])
def test_frozen_in_the_middle_of_the_sweep_it_is_the_user_s_value(freeze_after: float) -> None:
    rule = LineRule(freeze_after=freeze_after)
    coarse_scan(rule)
    swept(rule, [1.9], correction=3.0)
    assert rule.sweeping
    decision = swept(rule, [1.8], correction=3.0)
    assert decision.restart and 3 * decision.factor == pytest.approx(1.0) and "frozen" in decision.note and rule.idle
    for step in (int(rule.risen) - 1, int(rule.risen)):
        assert not rule.finished
        decide(rule, step)
    assert rule.finished


def test_what_is_under_way_begins_anew_and_what_was_found_stays() -> None:
    rule = LineRule()
    coarse_scan(rule)
    swept(rule, [1.8, 1.2])
    rule.restart(Moment(3, 33, 33))
    assert rule.sweeping and rule.doublings == [] and rule.next_end(TOTAL, CYCLE) == 43
    assert 1 / 16 <= decide(rule, 43, SHOWN, 1.1).factor < 16 / 4 and rule.sweeping
    found = after_sweep()
    before = found.state_dict()
    found.restart(Moment(33, 333, 333))
    assert found.state_dict() == before


def test_a_state_that_is_loaded_goes_on_alike_at_any_time() -> None:
    straight, moved = LineRule(), 0
    losses = [(10, 2.0), (20, 2.1), (30, 1.9), (40, 1.2), (50, 1.1), (60, 0.9)]
    course = [*((step, SHOWN, loss) for step, loss in losses), (70, LOST, None), (260, bowl(60.0), 0.5), (400, bowl(0.5), 0.5)]
    for step, line, loss in course:
        other = LineRule()
        other.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        (ours, *now), then = (
            [decide(rule, step, line, loss), rule.state_dict(), rule.idle, rule.sweeping, rule.next_end(TOTAL, CYCLE)]
            for rule in (straight, other)
        )
        assert [ours, *now] == then
        moved += ours.factor != 1
    assert straight.idle and moved >= 6


def test_a_run_of_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match="pass total_steps"):
        LineRule().start(Run(Clock(1), [KnobSpec("k", 0.0)], 1, [0.0]))


@pytest.mark.parametrize("name", ["significant", "farthest"])
@pytest.mark.parametrize("bad", [0, math.nan, math.inf, "2"])
def test_settings_are_validated(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=name):
        LineRule(**{name: bad})
