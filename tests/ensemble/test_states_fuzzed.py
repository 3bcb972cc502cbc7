"""A damaged state is refused with ValueError and changes nothing, or loads and the run goes on."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torchs

import hdet
from tests import harness
from tests.harness import model, probe

TOTAL, INTERVAL, STEPS = 60, 5, 7
PLAIN = (int, float, str, list, tuple, dict, type(None))
quiet = pytest.mark.filterwarnings("ignore")


def two_groups(parameters: Any, lr: float, **_: Any) -> hdet.FusedAdamW:
    own = list(parameters)
    return hdet.FusedAdamW([{"params": own[:2]}, {"params": own[2:]}], lr=lr)


class Run(harness.Run):
    """Three replicas, or one with trials; ``whole``: the Ensemble or a OneCycleAutoLR around it."""

    def __init__(
        self, controller: Any, scheduler: Any = None, *, auto: bool = False, search: Any = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        net = model()
        made = controller(net)
        super().__init__(
            net=net, together=3 if search is None else 1, every=INTERVAL,
            controller=None if auto else made, search=search, scheduler=scheduler,
            optimizer=two_groups, **{"total": TOTAL, **settings},
        )  # fmt: skip
        if auto:
            self.ensemble.close()
            self.replicas.attach(self.optimizer)
            self.scheduler = hdet.OneCycleAutoLR(
                self.optimizer, 3e-3, TOTAL, auto_lr_warmup_steps=0, ensemble_lr_spread_ratio=0.3,
                model_sync_interval=INTERVAL, replicas=self.replicas, controller=made,
            )  # fmt: skip
            self.ensemble = self.scheduler.ensemble
        self.whole = self.scheduler if auto else self.ensemble
        self.controller = made

    def steps(self, count: int) -> Run:
        schedule = self.ensemble._schedule
        for _ in range(count):
            if schedule.step is not None and schedule.step == schedule.total_steps:
                break
            loss = self.backward()
            self.optimizer.step()
            if self.replicas is None:
                self.whole.step(loss, closure=functools.partial(self.losses, self.batches()[0]))
            else:
                self.whole.step()
            self.index += 1
        return self

    def everything(self) -> str:
        """All that a load could have changed, to the last bit."""
        parts = [
            self.controller,
            self.search,
            self.scheduler,
            *getattr(self.scheduler, "_schedulers", []),
            self.ensemble._engine,
        ]
        plain = [
            sorted((k, v) for k, v in vars(part).items() if isinstance(v, PLAIN))
            for part in parts
            if part is not None
        ]
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        knobs = [
            (knob.scheduled, knob.off_schedule, knob.left) for knob in self.ensemble._schedule.knobs
        ]
        values = self.ensemble.values(), self.ensemble.corrections
        return repr((self.whole.state_dict(), plain, groups, knobs, values))


def one_cycle(optimizer: Any, **settings: Any) -> torchs.OneCycleLR:
    return torchs.OneCycleLR(optimizer, 3e-3, TOTAL, cycle_momentum=False, **settings)


def rise_and_fall(o: Any) -> torchs.SequentialLR:
    rises = torchs.LinearLR(o, 1e-3, total_iters=10)
    return torchs.SequentialLR(o, [rises, torchs.CosineAnnealingLR(o, 100, 1e-5)], [10])


# What is inside of a scheduler's state is the scheduler's: one of each shape is enough.
COSINE = lambda o: torchs.CosineAnnealingLR(o, TOTAL)
STEP = lambda o: torchs.StepLR(o, 3)
CHAINED = lambda o: torchs.ChainedScheduler([STEP(o), torchs.ExponentialLR(o, 0.97)])
NONE = lambda net: None
SOFTMAX = lambda net: hdet.SoftmaxController(decay=None)
AUTO = lambda net: hdet.AutoLR(net, budget=0.99)
EACH, FIRST = ([hdet.LearningRate(0.3, groups=groups)] for groups in ("each", [0]))
RUNS: dict[str, Callable[[], Run]] = {
    "none": lambda: Run(NONE, COSINE),
    "softmax": lambda: Run(SOFTMAX, COSINE),
    "softmax with a decay": lambda: Run(lambda _: hdet.SoftmaxController(decay="floor"), one_cycle),
    "probe": lambda: Run(probe, COSINE),
    "auto in a trial": lambda: Run(NONE, COSINE, total=240, search=AUTO),
    "auto": lambda: Run(NONE, COSINE, total=240, search=AUTO),
    "auto, then softmax": lambda: Run(SOFTMAX, COSINE, total=240, search=AUTO),
    "SequentialLR": lambda: Run(SOFTMAX, rise_and_fall),
    "ChainedScheduler": lambda: Run(SOFTMAX, CHAINED),
    "constant rates": lambda: Run(SOFTMAX),
    "two rates": lambda: Run(SOFTMAX, STEP, knobs=EACH),
    "OneCycleAutoLR": lambda: Run(SOFTMAX, auto=True),
}
# Torch's linear OneCycleLR goes below 0 in the step after its last. Groups without a knob go on
# from their own rates, as the optimizer's state may be loaded later.
AT_AN_END: dict[str, Callable[[], Run]] = {
    "cos": lambda: Run(NONE, functools.partial(one_cycle, anneal_strategy="cos")),
    "linear": lambda: Run(NONE, functools.partial(one_cycle, anneal_strategy="linear")),
    "after a rise": lambda: Run(NONE, rise_and_fall, knobs=FIRST, total=200),
    "after a fall": lambda: Run(NONE, rise_and_fall, knobs=FIRST, total=200),
}
SAVED_AFTER = {"auto in a trial": 3, "auto": 70, "auto, then softmax": 70, "cos": TOTAL}
SAVED_AFTER |= {"linear": TOTAL, "after a rise": 110, "after a fall": 120}
WRONG = [
    None, True, False, 0, 1, 2, 3, -1, 7, 10**9, -(10**9), 10**400, 0.0, -0.0, 0.5, -0.5, 1e-320,
    1e9, 1e30, -1e30, 1e200, 1e308, math.nan, math.inf, -math.inf, "", "x", b"", [], [0.0],
    [math.nan], [[]], [[[[1.0]]]], {}, {"a": 1}, (1, 2, 3), 1j, object(), torch.ones(2),
]  # fmt: skip
# What rounding leaves of a rate at a schedule's end loads, and FusedAdamW refuses it.
FLOATS = st.floats().filter(lambda x: not -1e-9 <= x < 0)
DEEP: Any = functools.reduce(lambda value, _: [value], range(3000), [])


def paths(state: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To every value in a state, however deep."""
    listed = enumerate(state) if isinstance(state, list) else ()
    for key, value in state.items() if isinstance(state, dict) else listed:
        yield (*above, key)
        yield from paths(value, (*above, key))


def is_of_the_scheduler(name: str, path: tuple[Any, ...]) -> bool:
    """What numbers inside a scheduler's state lead to is torch's."""
    if name == "OneCycleAutoLR":
        return path[0] != "ensemble"
    return path[0] == "scheduler" and len(path) > 1


def damaged(state: Any, path: tuple[Any, ...], how: str, wrong: Any) -> Any:
    state = copy.deepcopy(state)
    *above, key = path
    place = functools.reduce(lambda part, key: part[key], above, state)
    value = place.pop(key) if how == "delete" else place[key]
    if how != "delete":
        longer = value * 2 if isinstance(value, list) else [value]
        place[key] = {"double": [value, value], "longer": longer, "other": wrong}[how]
    return state


@functools.cache
def saved(name: str) -> Any:
    return (RUNS | AT_AN_END)[name]().steps(SAVED_AFTER.get(name, STEPS)).whole.state_dict()


victims: dict[str, Run] = {}


def check(name: str, state: Any) -> str:
    make = (RUNS | AT_AN_END)[name]
    run = victims.pop(name, None) or make().steps(2)
    before = run.everything()
    try:
        run.whole.load_state_dict(state)
    except ValueError:
        assert run.everything() == before
        victims[name] = run  # as good as new
        return "refused"
    try:
        run.steps(INTERVAL)
    except hdet.ReplicasDiverged:  # at a rate of 1e30
        return "diverged"
    make().whole.load_state_dict(run.whole.state_dict())
    return "went on"


@quiet
@pytest.mark.parametrize("name", RUNS | AT_AN_END)
def test_a_state_as_it_was_saved_loads(name: str) -> None:
    assert check(name, saved(name)) == "went on"


@quiet
@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_state_is_refused_or_the_run_goes_on(name: str, data: st.DataObject) -> None:
    state = saved(name)
    own = [path for path in paths(state) if not is_of_the_scheduler(name, path)]
    path, wrong = data.draw(st.sampled_from(own)), None
    how = data.draw(st.sampled_from(["delete", "double", "longer", "other"]))
    if how == "other":
        kinds = st.one_of(st.sampled_from(WRONG), FLOATS, st.integers(), st.just(DEEP))
        wrong = data.draw(kinds)
    check(name, damaged(state, path, how, wrong))


@quiet
@pytest.mark.parametrize("name", ["probe", "softmax with a decay"])
def test_lists_of_another_length_than_there_are_knobs_are_refused(name: str) -> None:
    """Else what was learned would begin anew without a word."""
    state = saved(name)["controller_state"]
    lists = [key for key, value in state.items() if isinstance(value, list) and value]
    assert len(lists) >= 3
    for key in lists:
        damage = damaged(saved(name), ("controller_state", key), "longer", None)
        assert check(name, damage) == "refused", key


class Torn:
    """A scheduler that has changed when it complains."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.first, self.second = optimizer, 0, 0

    def step(self) -> None:
        self.first, self.second = self.first + 1, self.second - 1

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        if state["first"] != -state["second"]:
            raise KeyError("second")
        self.second = state["second"]


class TornController(Torn, hdet.Controller):
    name = "torn"
    freeze_after, frozen = None, False

    def check_state(self, state: Any) -> Any:
        return state

    def learn(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.step()
        return [hdet.Decision(factor=1.5)] * len(evidence.knobs)


@quiet
@pytest.mark.parametrize("part", ["scheduler", "controller_state"])
def test_what_complains_when_it_has_changed_already_gets_its_state_back(part: str) -> None:
    run = Run(lambda net: TornController(None), Torn).steps(7)
    state = copy.deepcopy(run.ensemble.state_dict())
    state[part]["first"] = 99
    before = run.steps(1).everything()
    with pytest.raises(ValueError, match="Torn.*cannot be loaded.*KeyError"):
        run.ensemble.load_state_dict(state)
    assert run.everything() == before
    run.ensemble.load_state_dict({**state, part: {"first": 3, "second": -3}})
    assert run.scheduler.first == (3 if part == "scheduler" else 7)


def of_length(total: float) -> tuple[Run, dict[str, Any]]:
    run = Run(NONE, one_cycle).steps(INTERVAL)
    state = run.ensemble.state_dict()
    return run, {**state, "scheduler": {**state["scheduler"], "total_steps": total}}


@pytest.mark.parametrize("total", [0.0, -1.0, TOTAL + 0.5, math.nan, math.inf])
def test_a_state_of_another_length_is_refused_whatever_number_it_is(total: float) -> None:
    run, state = of_length(total)
    before = run.everything()
    said = "the saved run has total_steps .*, this one 60: build the scheduler as the saved run did"
    with pytest.raises(ValueError, match=said):
        run.ensemble.load_state_dict(state)
    assert run.everything() == before


def test_a_length_that_came_back_as_a_float_is_that_length() -> None:
    run, state = of_length(float(TOTAL))
    run.ensemble.load_state_dict(state)
    assert type(run.scheduler.total_steps) is int
    run.steps(TOTAL - INTERVAL)
    with pytest.raises(ValueError, match="Tried to step 61 times"):  # torch's
        run.scheduler.step()
