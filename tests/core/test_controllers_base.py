"""What every controller does: it rests after freeze_after, its state continues exactly, and the
bare protocol is enough."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdet
from hdet.controllers.probe_rule import ProbeRule
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import CycleOutcome, Engine, KnobSpec
from hdet.core.evidence import Evidence, Run
from hdet.core.plan import Decision, Plan
from tests.core.controller_runs import bowl, decide, end_of, evidence


def softmax(**settings: Any) -> SoftmaxController:
    return SoftmaxController(decay=None, **settings)


ALL: dict[str, Callable[..., Controller]] = {"softmax": softmax, "probe": ProbeRule}
PEAKED = [name for name in ALL if name != "softmax"]


@pytest.mark.parametrize("freeze_after", [15, 0.5])
@pytest.mark.parametrize("name", ALL)
def test_after_freeze_after_nothing_moves_and_the_spread_rests(
    name: str, freeze_after: float
) -> None:
    history = list(bowl(ALL[name](freeze_after=freeze_after), [30.0], cycles=30))
    moved = [engine_outcome.decisions[0].factor != 1.0 for _, engine_outcome, _ in history]
    assert any(moved[:15]) and not any(moved[15:])
    assert history[-1][2] == history[14][2], "what was learned stays in force"
    rested = [set(outcome.multipliers[0]) == {1.0} for _, outcome, _ in history]
    assert rested == [False] * 15 + [True] * 15


@pytest.mark.parametrize("name", PEAKED)
def test_a_frozen_decision_reports_what_it_measured(name: str) -> None:
    """The engine lets the spread rest; somebody else may still bring evidence."""
    frozen, free, rho = ALL[name](freeze_after=3), ALL[name](), [0.7, 0.9, 1.1, 1.3]
    probes = [[(1 + chunk / 100) * math.log(x) for chunk in range(8)] for x in rho]
    for step in range(1, 13):
        losses = [(1 + 0.01 * math.sin(step)) * math.log(x) for x in rho]
        one, other = (
            decide(controller, evidence(step=step, losses=losses, probes=probes))[0]
            for controller in (frozen, free)
        )
    assert one.factor == 1.0 and other.factor < 1.0
    assert (
        (one.slope, one.error, one.t) == (other.slope, other.error, other.t)
        and one.t is not None
        and one.t > 2
    )


def test_a_decision_at_freeze_after_still_moves_and_it_rests_in_a_cycle_that_would_end_too_late() -> (  # noqa: E501
    None
):
    rule, early, last = (
        ProbeRule(freeze_after=10),
        ProbeRule(freeze_after=25),
        ProbeRule(freeze_after=1.0),
    )
    rows = [[math.log(rho) * (1 + c / 10) for c in range(8)] for rho in (0.7, 0.9, 1.1, 1.3)]
    assert decide(rule, evidence(step=10, probes=rows))[0].factor < 1.0 and rule.idle
    assert decide(rule, evidence(step=11, probes=rows))[0].factor == 1.0
    for cut_short in (early, last):
        decide(cut_short, evidence(step=20, sync_interval=10, total_steps=25))
    assert not early.idle and not last.idle
    decide(early, evidence(step=20, sync_interval=10, total_steps=100))
    assert early.idle


def test_a_frozen_decay_goes_on_and_reacts_to_nothing() -> None:
    """It stands for the schedule: a rate that stopped falling would end the run too high."""

    def values(controller: SoftmaxController, slope: float) -> list[float]:
        engine, found = Engine([KnobSpec("lr", 0.3)], 4, Clock(1, 0, 10), controller), []
        for _ in range(10):
            engine.tick()
            engine.close(
                [slope * math.log(rho) for rho in engine.multipliers()[0]],
                scheduled=[1.0],
                floor=[0.1],
            )
            found.append(engine.value(0, 1.0))
        return found

    neutral, frozen = (
        values(SoftmaxController(), 0.0),
        values(SoftmaxController(freeze_after=2), -1.0),
    )
    assert frozen[1] > neutral[1], "it has learned before"
    factor = neutral[5] / neutral[4]
    assert factor < 1 and [b / a for a, b in pairwise(frozen[1:])] == pytest.approx([factor] * 8)


@pytest.mark.parametrize("wrong", [0, -1, 0.0, 1.5, -0.5, math.nan, True, "half"])
def test_freeze_after_is_validated(wrong: Any) -> None:
    with pytest.raises(ValueError, match="freeze_after"):
        ProbeRule(freeze_after=wrong)


@pytest.mark.parametrize("name", ALL)
def test_a_part_of_a_run_of_unknown_length_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"freeze_after=0\.5.*total_steps"):
        ALL[name](freeze_after=0.5).start(run(None))
    ALL[name](freeze_after=0.5).start(run(100))
    ALL[name](freeze_after=50).start(run(None))


def run(total_steps: int | None) -> Run:
    return Run(Clock(1, total_steps=total_steps), [KnobSpec("lr", 0.3)], 4, [0.0])


@pytest.mark.parametrize("name", ALL)
def test_a_state_continues_exactly_also_through_json(name: str) -> None:
    """Handed to a new controller after every decision."""

    def cycles() -> Iterator[tuple[Engine, CycleOutcome, list[float]]]:
        return bowl(ALL[name](freeze_after=0.9), [0.05, 8.0], replicas=8, cycles=40, seed=3)

    resumed = []
    for engine, _, values in cycles():
        assert engine.controller is not None
        state, engine.controller = (
            json.loads(json.dumps(engine.controller.state_dict())),
            ALL[name](freeze_after=0.9),
        )
        engine.controller.load_state_dict(state)
        resumed.append(values)
    assert resumed == [values for _, _, values in cycles()]


@pytest.mark.parametrize("name", ALL)
def test_a_state_that_lacks_a_key_is_refused_and_changes_nothing(name: str) -> None:
    controller = ALL[name]()
    decide(controller, evidence())
    before = controller.state_dict()
    for key in controller.state_keys:
        state = controller.state_dict()
        state.pop(key)
        with pytest.raises(ValueError, match=f"{type(controller).__name__}.*lacks '{key}'"):
            controller.load_state_dict(state)
    assert controller.state_dict() == before


@pytest.mark.parametrize("name", ALL)
def test_a_state_from_before_the_first_decision_is_that_of_a_new_controller(name: str) -> None:
    used = ALL[name]()
    next(bowl(used))
    used.load_state_dict(json.loads(json.dumps(ALL[name]().state_dict())))
    assert end_of(bowl(used, [0.1], cycles=20)) == end_of(bowl(ALL[name](), [0.1], cycles=20))


@pytest.mark.parametrize("name", ALL)
def test_a_state_is_a_copy(name: str) -> None:
    run = bowl(controller := ALL[name](), [0.1])
    next(run)
    state = json.dumps(before := controller.state_dict())
    for _ in range(5):
        next(run)
    assert json.dumps(before) == state


class Bare(Controller):
    """One hook and nothing else but a name."""

    name = "bare"

    def decide(self, evidence: Evidence) -> list[Decision]:
        return [Decision(factor=2.0)] * len(evidence.knobs)


def test_a_controller_of_one_hook_plans_cycles_as_published() -> None:
    bare = Bare()
    bare.start(run(None))
    bare.observe(evidence())
    bare.restart()
    assert bare.plan() == Plan()
    assert end_of(bowl(Bare(freeze_after=3), cycles=10)) == [8.0]
    assert json.loads(json.dumps(bare.state_dict())) == {"frozen": False}
    with pytest.raises(NotImplementedError, match="decide"):
        decide(Controller(), evidence())


@pytest.mark.parametrize("name", ["", None])
def test_a_controller_without_a_name_is_refused(name: Any) -> None:
    """A checkpoint of it would be loaded by any other without one."""

    class Nameless(Bare):
        pass

    Nameless.name = name
    with pytest.raises(ValueError, match=f"the name of Nameless is {name!r}.*write name = "):
        next(bowl(Nameless(), [30.0], cycles=1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="the name of Nameless"):
        hdet.Ensemble(optimizer, controller=Nameless())
    assert "step" not in optimizer.__dict__


@pytest.mark.parametrize("said", [Decision(), [Decision()] * 2, [], None])
def test_what_is_not_one_decision_for_each_knob_is_refused_by_name(said: Any) -> None:
    class Says(Bare):
        def decide(self, evidence: Evidence) -> Any:
            return said

    with pytest.raises(
        ValueError,
        match="controller 'bare' has decided .*a list of 1, a hdet.Decision for each knob",
    ):
        list(bowl(Says(), [30.0], cycles=1))


@pytest.mark.parametrize(
    "said", [{"factor": torch.tensor(0.5)}, {"value": torch.tensor(0.5)}, {"factor": "0.5"}]
)
def test_a_decision_is_made_of_numbers(said: dict[str, Any]) -> None:
    """A tensor would become the correction, and a part of records and states."""
    with pytest.raises(ValueError, match="and an int or a float, got"):
        Decision(**said)


@pytest.mark.parametrize("said", [0.5, None])
def test_what_is_no_decision_is_refused_by_name(said: Any) -> None:
    class Says(Bare):
        def decide(self, evidence: Evidence) -> Any:
            return [said]

    with pytest.raises(
        TypeError, match=f"controller 'bare' has decided {said}: each decision is a hdet.Decision"
    ):
        list(bowl(Says(), [30.0], cycles=1))


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (None, "controller 'bare' has planned None: plan must return a hdet.Plan"),
        (
            Plan(measures="norm"),
            r"plans measures='norm', but it is a tuple of names: write \('norm',\)",
        ),
        (Plan(measures=["norm"]), "measures 'norm', and has no measurement of that name"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(planned: Any, message: str) -> None:
    class Plans(Bare):
        def plan(self) -> Any:
            return planned

    with pytest.raises((TypeError, ValueError), match=message):
        list(bowl(Plans(), [30.0], cycles=1))


def test_a_name_without_its_comma_is_refused_with_the_class() -> None:
    """Its letters would be taken for names."""
    with pytest.raises(
        TypeError, match=r"state_keys of Listed is 'best', .*write state_keys = \('best',\)"
    ):
        type("Listed", (Bare,), {"state_keys": "best"})


def test_a_controller_that_does_not_call_the_constructor_above_works() -> None:
    class Own(Bare):
        def __init__(self) -> None:
            self.own = 1

    assert end_of(bowl(Own(), cycles=3)) == end_of(bowl(Bare(), cycles=3))


@pytest.mark.parametrize("value", [None, "high", {"a": 1.0}, [1.0, None]])
def test_a_state_that_is_no_number_is_refused_by_name(value: Any) -> None:
    class Kept(Controller):
        state_keys = ("best",)
        best = value

    with pytest.raises(TypeError, match=r"Kept\.best is .*numbers, booleans and lists of them"):
        Kept().state_dict()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(ALL)),
    seed=st.integers(0, 10_000),
    start=st.floats(-8, 8).map(math.exp),
    spoiled=st.lists(
        st.tuples(
            st.integers(0, 19),
            st.integers(0, 3),
            st.sampled_from([None, math.nan, math.inf, -math.inf, 1e30]),
        ),
        max_size=40,
    ),
)
def test_whatever_the_losses_are_values_stay_finite_and_within_the_bound(
    name: str, seed: int, start: float, spoiled: list[tuple[int, int, float | None]]
) -> None:
    def spoil(cycle: int, losses: list[float | None]) -> list[float | None]:
        at = {replica: value for when, replica, value in spoiled if when == cycle}
        return [at.get(r, loss) for r, loss in enumerate(losses)]

    limit = {} if name == "softmax" else {"bound": 5.0}
    for _, outcome, values in bowl(ALL[name](**limit), [start], cycles=20, seed=seed, spoil=spoil):
        assert math.isfinite(values[0]) and values[0] > 0
        if limit:
            assert 0.2 * 0.999 <= values[0] / start <= 5.0 * 1.001
        assert all(
            math.isfinite(x)
            for d in outcome.decisions
            for x in (d.slope, d.error, d.t)
            if x is not None
        )
