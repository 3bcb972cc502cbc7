"""What every controller does: it rests after freeze_after, and the bare protocol is enough. (What
a contract asks: tests/controllers/test_contract.py.)"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.controllers.probe_rule import ProbeRule
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import Engine
from hdet.core.evidence import Evidence
from hdet.core.plan import Decision, Plan
from hdet.core.value import Value
from tests.core.controller_runs import bowl, close, end_of, evidence, rows, value_of


def softmax(**settings: Any) -> SoftmaxController:
    return SoftmaxController(decay=None, **settings)


ALL: dict[str, Callable[..., Controller]] = {"softmax": softmax, "probe": ProbeRule}


@pytest.mark.parametrize("freeze_after", [15, 0.5])
@pytest.mark.parametrize("name", ALL)
def test_after_freeze_after_nothing_moves_and_the_spread_rests(
    name: str, freeze_after: float
) -> None:
    history = list(bowl(ALL[name](freeze_after=freeze_after), [30.0], cycles=30))
    moved = [outcome.decisions[0].factor != 1.0 for _, outcome, _ in history]
    assert any(moved[:15]) and not any(moved[15:])
    assert history[-1][2] == history[14][2], "what was learned stays in force"
    rested = [set(outcome.multipliers[0]) == {1.0} for _, outcome, _ in history]
    assert rested == [False] * 15 + [True] * 15


def test_a_frozen_decision_reports_what_it_measured() -> None:
    """The engine lets the spread rest; somebody else may still bring evidence."""
    frozen, free = (ProbeRule(freeze_after=after) for after in (3, None))
    for step in range(1, 6):
        seen = evidence(step=step, probes=rows(1.0))
        one, other = (controller.learn(seen)[0] for controller in (frozen, free))
    assert one.factor == 1.0 and other.factor < 1.0 and one.t is not None and one.t > 2
    assert (one.slope, one.error, one.t) == (other.slope, other.error, other.t)


def test_a_decision_at_freeze_after_still_moves_and_a_cycle_that_would_end_too_late_rests() -> None:
    rule, early, last = (ProbeRule(freeze_after=after) for after in (10, 25, 1.0))
    assert rule.learn(evidence(step=10, probes=rows(1.0)))[0].factor < 1.0 and rule.idle
    assert rule.learn(evidence(step=11, probes=rows(1.0)))[0].factor == 1.0
    for cut_short in (early, last):
        cut_short.learn(evidence(step=20, sync_interval=10, total_steps=25))
    assert not early.idle and not last.idle
    early.learn(evidence(step=20, sync_interval=10, total_steps=100))
    assert early.idle


def test_a_frozen_decay_goes_on_and_reacts_to_nothing() -> None:
    """It stands for the schedule: a rate that stopped falling would end the run too high."""

    def values(controller: SoftmaxController, slope: float) -> list[float]:
        engine, values = Engine([Value("lr", 0.3)], 4, Clock(1, 0, 10), controller), []
        for _ in range(10):
            engine.tick()
            losses = [slope * math.log(rho) for rho in engine.multipliers()[0]]
            close(engine, losses, floor=[0.1])
            values.append(value_of(engine, 1.0))
        return values

    neutral = values(SoftmaxController(), 0.0)
    frozen = values(SoftmaxController(freeze_after=2), -1.0)
    assert frozen[1] > neutral[1], "it has learned before"
    factor = neutral[5] / neutral[4]
    assert factor < 1 and [b / a for a, b in pairwise(frozen[1:])] == pytest.approx([factor] * 8)


# -- state -----------------------------------------------------------------------------------------


class Kept(Controller):
    state_keys = ("best",)
    best: Any = math.inf


@pytest.mark.parametrize("value", [None, "high", {"a": 1.0}, [1.0, None]])
def test_a_state_that_is_no_number_is_refused_by_name(value: Any) -> None:
    """One that is infinite loads."""
    kept = Kept()
    kept.load_state_dict({"frozen": False, "best": [-math.inf]})
    assert kept.state_dict()["best"] == [-math.inf]
    kept.best = torch.tensor(0.5)
    assert kept.state_dict()["best"] == 0.5
    kept.best = value
    with pytest.raises(ValueError, match=r"Kept\.best is .*numbers, booleans and lists of them"):
        kept.state_dict()


# -- the protocol ----------------------------------------------------------------------------------


class Bare(Controller):
    """One hook and nothing else."""

    def decide(self, evidence: Evidence) -> list[Decision]:
        return [Decision(factor=2.0)] * len(evidence.knobs)


class WithoutConstructor(Bare):
    """It does not call the constructor above."""

    def __init__(self) -> None:
        self.own = 1


def test_a_controller_of_one_hook_plans_cycles_as_published() -> None:
    assert Bare().plan() == Plan()
    assert end_of(bowl(Bare(freeze_after=3), cycles=10)) == [8.0]
    assert end_of(bowl(WithoutConstructor(), cycles=3)) == [8.0]
    assert json.loads(json.dumps(Bare().state_dict())) == {"frozen": False}
    with pytest.raises(NotImplementedError, match="decide"):
        Controller().learn(evidence())


def test_a_controller_without_a_name_has_its_classs() -> None:
    """Else a checkpoint of it would be loaded by any other without one."""
    assert (Bare.name, WithoutConstructor.name) == ("Bare", "WithoutConstructor")


@pytest.mark.parametrize("said", [Decision(), [Decision()] * 2, [], None, [0.5], [None]])
def test_what_is_not_one_decision_for_each_knob_is_refused_by_name(said: Any) -> None:
    class Says(Bare):
        def decide(self, evidence: Evidence) -> Any:
            return said

    message = "controller 'Says' has decided .*a list of 1, a hdet.Decision such as"
    with pytest.raises(ValueError, match=message):
        list(bowl(Says(), [30.0], cycles=1))


BAD = st.sampled_from([None, math.nan, math.inf, -math.inf, 1e30])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(ALL)),
    seed=st.integers(0, 10_000),
    start=st.floats(-8, 8).map(math.exp),
    spoiled=st.dictionaries(st.tuples(st.integers(0, 19), st.integers(0, 3)), BAD, max_size=40),
)
def test_whatever_the_losses_are_values_stay_finite_and_within_the_bound(
    name: str, seed: int, start: float, spoiled: dict[tuple[int, int], float | None]
) -> None:
    def spoil(cycle: int, losses: list[float | None]) -> list[float | None]:
        return [spoiled.get((cycle, r), loss) for r, loss in enumerate(losses)]

    limit = {} if name == "softmax" else {"bound": 5.0}
    for _, outcome, values in bowl(ALL[name](**limit), [start], cycles=20, seed=seed, spoil=spoil):
        assert math.isfinite(values[0]) and values[0] > 0
        if limit:
            assert 0.2 * 0.999 <= values[0] / start <= 5.0 * 1.001
        said = [x for d in outcome.decisions for x in (d.slope, d.error, d.t) if x is not None]
        assert all(map(math.isfinite, said))


# -- on a loss whose best value is 1 -----------------------------------------------------------


@pytest.mark.parametrize("start", [1 / 30, 1.0, 30.0])
@pytest.mark.parametrize("name", ALL)
def test_it_walks_to_the_best_value_and_stays_there(name: str, start: float) -> None:
    """Each knob to its own."""
    low, high = (start, 1 / start) if name == "probe" else (start, 1.0)
    seen = [values for *_, values in bowl(ALL[name](), [low, high], replicas=8, shared=0.1)]
    for values in seen if start == 1 else seen[-1:]:
        assert all(0.75 < value < 1.35 for value in values)


def test_noise_alone_moves_it_little() -> None:
    """120 cycles of a loss that does not depend on the value."""
    ends = sorted(
        abs(math.log(end_of(bowl(ProbeRule(), depth=0.0, cycles=120, seed=seed))[0]))
        for seed in range(8)
    )
    assert ends[4] < 0.3 and ends[-1] < 1.0
