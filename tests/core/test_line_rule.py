"""The line's rule without tensors: what it reads off losses, and whole runs on a noisy quadratic, where the best rate is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Any

import pytest

from hdet.core.clock import Clock
from hdet.core.controllers import Decision, Evidence, LineRule
from hdet.core.controllers.line import Line, read_line
from hdet.core.engine import Engine, KnobSpec

# -- reading a line ------------------------------------------------------------------------------------------------------


class Made:
    """A line with these losses at rho, all differences with the same error."""

    def __init__(self, loss: Callable[[float], float], error: float = 1e-3, value: float = 1.0) -> None:
        self.loss, self.error, self.value = loss, error, value
        self.asked: list[tuple[float, float]] = []

    def difference(self, a: float, b: float) -> tuple[float, float]:
        self.asked.append((a, b))
        mean = self.loss(a) - self.loss(b)
        return mean, mean / self.error


def bowl(best: float) -> Callable[[float], float]:
    """Least at ``best``; at 0 what it is far below."""
    return lambda rho: math.log(max(rho, 1e-3) / best) ** 2


@pytest.mark.parametrize(
    ("best", "found", "higher"),
    [
        (37.0, 37.0, True), (3.0, 3.0, True), (1e5, 256.0, True),  # far below the right value, up to the farthest that is scored
        (1.3, 1.3, False), (1.0, 1.0, False), (0.8, 0.8, False),
        (0.4, 0.4, False), (0.01, 0.5 / math.sqrt(2), False),  # far above: no further than half an octave beside what was scored
    ],
)  # fmt: skip
def test_the_minimum_along_the_line_is_found(best: float, found: float, higher: bool) -> None:
    reading = read_line(Made(bowl(best)), 1.5, 256.0)
    assert reading.rho == pytest.approx(found, rel=1e-9)
    assert reading.higher is higher


def test_the_slope_is_by_the_logarithm_of_rho_and_t_has_the_direction() -> None:
    reading = read_line(Made(lambda rho: 3 * math.log(rho)), 1.5, 256.0)
    assert reading.slope == pytest.approx(3.0)
    assert reading.up == pytest.approx(3 * math.log(2) / 1e-3) and reading.down == -reading.up and reading.across == 2 * reading.up


def test_without_a_significant_difference_nothing_is_found() -> None:
    t = bowl(1.3)(0.5) - bowl(1.3)(1.0)  # the largest, at an error of 1
    assert read_line(Made(bowl(1.3), error=t / 1.49), 1.5, 256.0).rho is None
    assert read_line(Made(bowl(1.3), error=t / 1.51), 1.5, 256.0).rho is not None


def test_a_large_step_shows_what_a_small_one_hides() -> None:
    """Neither of 1/2 and 2 is significant, but 8 is."""
    reading = read_line(Made(bowl(1000.0), error=8.0), 1.5, 256.0)
    assert reading.up > -1.5 and reading.higher and reading.rho == 256.0


def test_losses_that_are_not_finite_count_as_very_high() -> None:
    """The controller clamps them to 1e30."""
    nowhere = read_line(Made(lambda rho: 1e30 if rho else 2.0), 1.5, 256.0, from_anchor=True)
    assert (nowhere.rho, nowhere.higher, nowhere.worse) == (None, False, True)
    beyond = read_line(Made(lambda rho: 1e30 if rho >= 2 else bowl(0.6)(rho)), 1.5, 256.0)
    assert beyond.rho is not None and beyond.rho < 1 and not beyond.higher
    cliff = read_line(Made(lambda rho: 1e30 if rho >= 16 else -rho), 1.5, 256.0)
    assert cliff.higher and cliff.rho is not None and 8 / math.sqrt(2) <= cliff.rho <= 8


def test_the_anchor_is_looked_at_last_and_only_where_asked_for() -> None:
    rising = Made(lambda rho: rho)
    assert read_line(rising, 1.5, 256.0, from_anchor=True).worse
    assert [i for i, pair in enumerate(rising.asked) if 0.0 in pair] == [len(rising.asked) - 1]
    falling, early = Made(bowl(40.0)), Made(lambda rho: rho)
    assert not read_line(falling, 1.5, 256.0, from_anchor=True).worse and not any(0.0 in pair for pair in falling.asked)
    assert not read_line(early, 1.5, 256.0).worse and not any(0.0 in pair for pair in early.asked)


# -- single decisions ----------------------------------------------------------------------------------------------------


def evidence(step: int, lines: Sequence[Made] | None, *, total: int = 1000, corrections: Sequence[float] = (1.0,), **more: Any) -> Evidence:
    n = len(corrections)
    given: dict[str, Any] = {
        "cycle": step // 10, "warmup_steps": 0, "sync_interval": 10, "knobs": [f"k{i}" for i in range(n)], "multipliers": [[1.0]] * n,
        "losses": [1.0], "probes": None, "scheduled": [1.0] * n, "peak": [1.0] * n, "floor": [0.0] * n, "values": list(corrections),
    } | more  # fmt: skip
    return Evidence(step=step, total_steps=total, line=lines, corrections=list(corrections), **given)


def test_without_a_line_nothing_moves_and_no_stage_passes() -> None:
    rule = LineRule()
    (decision,) = rule.update(evidence(10, None))
    assert (decision.factor, decision.base, decision.slope) == (1.0, None, None)
    assert rule.next_end(1000) == 10.0


def test_long_cycles_skip_stages_and_the_ends_are_parts_of_the_run() -> None:
    rule = LineRule()
    ends = [rule.next_end(1000)]
    for step in (10, 100, 300):
        rule.update(evidence(step, [Made(bowl(1.0))]))
        ends.append(rule.next_end(1000))
    assert ends == pytest.approx([10, 20, 140, 400])
    rule.update(evidence(990, [Made(bowl(1.0))]))
    assert rule.idle and rule.next_end(1000) == math.inf


def test_a_value_far_too_low_rises_by_and_by_and_one_far_too_high_falls_with_a_restart() -> None:
    (rise,) = LineRule().update(evidence(10, [Made(bowl(60.0), value=0.1)]))
    assert rise.factor == pytest.approx(0.3 * 60 * 0.1) and rise.over == 20 and not rise.restart and rise.slope is not None
    assert rise.t is not None and rise.t < 0
    (fall,) = LineRule().update(evidence(10, [Made(lambda rho: 1e30 if rho else 2.0, value=0.1)]))
    assert fall.factor < 1 / 2.5 and fall.restart and "taken back" in fall.note


def test_one_knobs_restart_takes_all_back_and_each_moves_by_itself() -> None:
    lines = [Made(lambda rho: 1e30 if rho else 2.0, value=0.1), Made(bowl(60.0), value=0.1)]
    high, low = LineRule().update(evidence(10, lines, corrections=(1.0, 1.0)))
    assert high.restart and low.restart
    assert high.factor < 1 < low.factor


def test_after_freeze_after_nothing_moves_and_it_rests() -> None:
    rule = LineRule(freeze_after=20)
    (moved,) = rule.update(evidence(20, [Made(bowl(60.0), value=0.1)]))
    assert moved.factor > 1 and rule.idle
    (held,) = rule.update(evidence(40, [Made(bowl(60.0), value=0.1)]))
    assert held.factor == 1.0 and rule.next_end(1000) == math.inf


def test_a_run_of_unknown_length_is_refused_and_settings_are_validated() -> None:
    with pytest.raises(ValueError, match="pass total_steps"):
        LineRule().check_run(None, [0.0])
    LineRule().check_run(1000, [0.0])
    for name in ("significant", "farthest", "restart"):
        for bad in (0, math.nan, math.inf, "2"):
            with pytest.raises(ValueError, match=name):
                LineRule(**{name: bad})


# -- whole runs ----------------------------------------------------------------------------------------------------------

EXAMPLES, NOISE, STEPS = 16, 0.3, 800
Vector = list[float]


def loss_of(x: Sequence[float], curvatures: Sequence[float]) -> float:
    loss = 0.5 * sum(h * v * v for h, v in zip(curvatures, x, strict=True))
    return loss if math.isfinite(loss) else math.inf


class Descent:
    """sum_i h_i x_i^2 / 2 with a noisy gradient: the optimum of each example lies somewhere else. A tenth of the run up, then a cosine.

    Knob k moves its own curvatures from its own start. Without a rule it is the fixed schedule.
    """

    def __init__(self, starts: Sequence[float], rule: LineRule | None, *, interval: int = 8, seed: int = 0, directions: int = 12) -> None:
        self.starts, self.rule, self.random = starts, rule, random.Random(seed)
        self.curvatures = [1 / (i + 1) for i in range(directions)]
        self.owner = [i % len(starts) for i in range(directions)]
        specs = [KnobSpec(f"k{k}", 0.0) for k in range(len(starts))]
        self.engine = Engine(specs, 1, Clock(interval, total_steps=STEPS), rule)
        self.x: Vector = [1.0] * directions
        self.anchor, self.begun, self.notes = list(self.x), 0, list[str]()
        self.forget()

    def forget(self) -> None:
        self.samples, self.mean, self.values = 0, [0.0] * len(self.x), [0.0] * len(self.starts)

    def phase(self) -> float:
        part = (self.engine.step + 1) / STEPS
        return 10 * part if part < 0.1 else 0.5 * (1 + math.cos(math.pi * (part - 0.1) / 0.9))

    def run(self, steps: int = STEPS) -> Descent:
        for _ in range(steps):
            phase = self.phase()
            rates = [self.engine.value(k, start * phase) for k, start in enumerate(self.starts)]
            center = [self.random.gauss(0, NOISE) for _ in self.x]
            self.x = [
                max(-1e30, min(1e30, v - rates[k] * h * (v - c)))
                for v, k, h, c in zip(self.x, self.owner, self.curvatures, center, strict=True)
            ]
            ends = self.engine.tick()
            if self.rule is not None and self.engine.step > (self.begun + self.rule.next_end(STEPS)) / 2:
                self.samples += 1
                self.mean = [m + (v - m) / self.samples for m, v in zip(self.mean, self.x, strict=True)]
                at = [rate / start for rate, start in zip(rates, self.starts, strict=True)]
                self.values = [v + (a - v) / self.samples for v, a in zip(self.values, at, strict=True)]
            if ends:
                self.close(phase, center)
        return self

    def close(self, phase: float, center: Vector) -> None:
        due = self.rule is not None and self.engine.step >= self.rule.next_end(STEPS) and self.samples
        lines = self.lines(center) if due else None
        outcome = self.engine.close([1.0], line=lines, scheduled=[s * phase for s in self.starts], peak=list(self.starts))
        self.notes += outcome.notes
        if not due or self.rule is None:
            return
        if any(decision.restart for decision in outcome.decisions):
            self.x = list(self.anchor)
        elif not self.rule.keeps:
            self.anchor = list(self.x)
        if not self.rule.keeps:
            self.begun = self.engine.step
        self.forget()

    def lines(self, center: Vector) -> list[Line]:
        """Scored on the examples of the last step's gradient, whose optima have ``center`` as their mean."""
        drawn = [[self.random.gauss(0, NOISE * EXAMPLES**0.5) for _ in range(EXAMPLES)] for _ in center]
        batch = [[s - fmean(own) + c for s in own] for own, c in zip(drawn, center, strict=True)]
        return [_Way(self, k, batch) for k in range(len(self.starts))]

    def loss(self) -> float:
        return loss_of(self.x, self.curvatures)


class _Way:
    def __init__(self, run: Descent, k: int, batch: list[Vector]) -> None:
        self.run, self.k, self.batch, self.value = run, k, batch, run.values[k]

    def losses(self, rho: float) -> Vector:
        run = self.run
        point = [
            a + (rho if owner == self.k else 1.0) * (m - a) for a, m, owner in zip(run.anchor, run.mean, run.owner, strict=True)
        ]  # fmt: skip
        shifts = zip(*self.batch, strict=True)
        return [min(loss_of([v - s for v, s in zip(point, shift, strict=True)], run.curvatures), 1e30) for shift in shifts]

    def difference(self, a: float, b: float) -> tuple[float, float]:
        d = [x - y for x, y in zip(self.losses(a), self.losses(b), strict=True)]
        scatter = stdev(d) / math.sqrt(len(d))
        return fmean(d), fmean(d) / scatter if scatter else math.copysign(1e6, fmean(d)) if fmean(d) else 0.0


@cache
def fixed(start: float) -> float:
    """Mean loss over seeds at the end of the fixed schedule."""
    return fmean(Descent([start], None, seed=seed).run().loss() for seed in range(3))


@cache
def best() -> float:
    return min((2.0**k for k in range(-3, 2)), key=fixed)


@pytest.mark.parametrize("exponent", [-8, -5, -2, 0, 3, 6])
def test_from_256_times_too_low_to_64_times_too_high_the_end_is_as_good_as_the_best_rates(exponent: int) -> None:
    """Within a factor of 3 of the best fixed rate's loss (the start alone: 1 000 times at 2^-8, 10^10 at 2^6); at the best it does no harm."""
    start = best() * 2.0**exponent
    runs = [Descent([start], LineRule(), seed=seed).run() for seed in range(3)]
    assert fmean(run.loss() for run in runs) < 3 * fixed(best())
    values = [start * run.engine.corrections[0] / best() for run in runs]
    assert all(1 / 10 < value < 3 for value in values), values
    restarts = sum("taken back" in note for run in runs for note in run.notes)
    assert restarts > 0 if exponent == 6 else restarts == 0 if exponent <= 0 else True


def test_knobs_find_their_own_values() -> None:
    run = Descent([best() / 64, best() * 16], LineRule()).run()
    low, high = run.engine.corrections
    assert 6 < low < 192 and 1 / 160 < high < 1 / 5


def test_a_state_that_is_loaded_goes_on_alike() -> None:
    straight = LineRule()
    for step, at in ((10, 60.0), (20, 8.0), (40, 3.0), (80, 0.5), (140, 1.5), (240, 2.0), (400, 0.7)):
        other = LineRule()
        other.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        ours, theirs = (rule.update(evidence(step, [Made(bowl(at), value=0.5)])) for rule in (straight, other))
        assert ours == theirs
        assert straight.state_dict() == other.state_dict() and (straight.idle, straight.next_end(1000)) == (
            other.idle,
            other.next_end(1000),
        )
    assert straight.idle and straight.moved == [True]


@pytest.mark.parametrize(("rho", "moved"), [(2.0, False), (3.0, True), (8.0, True)])
def test_the_users_value_stays_within_the_band(rho: float, moved: bool) -> None:
    """At the first end a value of 1 is moved if it is below 0.3 R, and R is rho^1.5, from 4 on rho, times the value."""
    rule = LineRule()
    (decision,) = rule.update(evidence(10, [Made(bowl(rho))]))
    assert (decision.factor != 1.0) is moved is rule.moved[0]


# -- easing and restarts in the engine -----------------------------------------------------------------------------------


class Says:
    """Answers with these decisions, one after the other."""

    name, needs_probe = "says", False

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)

    def update(self, evidence: Evidence) -> list[Decision]:
        return [self.decisions.pop(0) if self.decisions else Decision()]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


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


def test_a_rise_comes_in_even_steps_and_a_fall_at_once() -> None:
    engine = engine_of(Decision(factor=5.0, over=4), Decision(), Decision(factor=0.5, over=4))
    assert course(engine, 9) == pytest.approx([1, 1, 2, 3, 4, 5, 2.5, 2.5, 2.5])


def test_a_rise_that_is_under_way_goes_on_from_what_is_in_force() -> None:
    engine = engine_of(Decision(factor=5.0, over=4), Decision(factor=2.0, over=2))
    assert course(engine, 7) == pytest.approx([1, 1, 2, 3, 7, 10, 10])  # 4 would have been next


def test_a_restart_begins_at_nothing_even_where_the_value_falls() -> None:
    engine = engine_of(Decision(factor=0.5, over=4, restart=True))
    assert course(engine, 7) == pytest.approx([1, 1, 0.125, 0.25, 0.375, 0.5, 0.5])


def test_easing_is_part_of_the_state_and_older_states_load() -> None:
    straight = engine_of(Decision(factor=5.0, over=4))
    course(straight, 3)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed, older = engine_of(Decision()), engine_of(Decision())
    resumed.load_state_dict(state)
    assert course(resumed, 4) == course(straight, 4) == pytest.approx([3, 4, 5, 5])
    older.load_state_dict({key: value for key, value in state.items() if key != "eased"})
    assert course(older, 2) == [5.0, 5.0]
