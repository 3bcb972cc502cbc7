"""Damaged states: whatever has become of one, it is refused with ValueError and nothing has changed, or it loads and the run goes on."""

from __future__ import annotations

import copy
import functools
import math
import warnings
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


def two_groups(parameters: Any, lr: float, **_: Any) -> hdet.FusedAdamW:
    own = list(parameters)
    return hdet.FusedAdamW([{"params": own[:2]}, {"params": own[2:]}], lr=lr)


class Run(harness.Run):
    """Three replicas in this process, or one with trials; ``whole``: the Ensemble, or a OneCycleAutoLR around it."""

    def __init__(
        self,
        controller: Any,
        scheduler: Any,
        knobs: Any = None,
        *,
        auto: bool = False,
        total: int = TOTAL,
    ) -> None:
        net = model()
        controller = controller(net)
        together = 1 if "auto" in getattr(controller, "name", "") else 3
        more = {"knobs": knobs} if knobs else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(
                net=net, together=together, controller=None if auto else controller, scheduler=scheduler, optimizer=two_groups, total=total,
                every=INTERVAL, **more,
            )  # fmt: skip
            if auto:
                self.ensemble.close()
                self.replicas.attach(self.optimizer)
                self.scheduler = hdet.OneCycleAutoLR(
                    self.optimizer, 3e-3, TOTAL, auto_lr_warmup_steps=0, ensemble_lr_spread_ratio=0.3, model_sync_interval=INTERVAL,
                    replicas=self.replicas, controller=controller,
                )  # fmt: skip
                self.ensemble = self.scheduler.ensemble
        self.whole = self.scheduler if auto else self.ensemble
        self.controller = controller

    def steps(self, count: int) -> Run:
        for _ in range(count):
            schedule = self.ensemble.schedule
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
        scheduler = (
            {}
            if self.scheduler is None
            else {
                k: v for k, v in vars(self.scheduler).items() if k not in ("optimizer", "ensemble")
            }
        )
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        parts = [
            self.controller,
            getattr(self.controller, "rule", None),
            getattr(self.controller, "then", None),
        ]
        plain = [
            sorted((k, v) for k, v in vars(part).items() if _is_plain(v))
            for part in parts
            if part is not None
        ]
        engine = sorted((k, v) for k, v in vars(self.ensemble.engine).items() if _is_plain(v))
        nested = [
            sorted((k, v) for k, v in vars(s).items() if k != "optimizer")
            for s in getattr(self.scheduler, "_schedulers", [])
        ]
        scheduler.pop("_schedulers", None)
        knobs = (
            [(knob.scheduled, knob.base, knob.left) for knob in self.ensemble.knobs],
            self.ensemble.values(),
            self.ensemble.corrections,
        )
        return repr((self.whole.state_dict(), scheduler, nested, groups, plain, engine, knobs))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, list, tuple, type(None)))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda _: None,
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 3e-3, TOTAL, cycle_momentum=False),
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda step: 0.97 ** min(step, 500)),
    "StepLR": lambda o: torchs.StepLR(o, 3),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [4, 9]),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, TOTAL),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 4, 2),
    "LinearLR": lambda o: torchs.LinearLR(o, 0.1, total_iters=20),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, 30),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.97),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, total_iters=5), torchs.CosineAnnealingLR(o, 30)], [5]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, 0.1, total_iters=9), torchs.ExponentialLR(o, 0.97)]
    ),
}
CONTROLLERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda net: None,
    "softmax": lambda net: hdet.SoftmaxController(decay=None),
    "softmax with a decay": lambda net: hdet.SoftmaxController(decay="printed"),
    "probe": probe,
}
AUTO: dict[str, Callable[[Any], Any]] = {
    "auto in a trial": lambda net: hdet.AutoLR(net, budget=0.99),
    "auto": lambda net: hdet.AutoLR(net, budget=0.99),
    "auto, then softmax": lambda net: hdet.SequentialController(
        hdet.AutoLR(net, budget=0.99), hdet.SoftmaxController(decay=None)
    ),
}
RUNS: dict[str, Callable[[], Run]] = {
    **{
        name: functools.partial(Run, build, SCHEDULERS["CosineAnnealingLR"])
        for name, build in CONTROLLERS.items()
    },
    **{
        name: functools.partial(Run, build, SCHEDULERS["CosineAnnealingLR"], total=240)
        for name, build in AUTO.items()
    },
    **{
        name: functools.partial(Run, CONTROLLERS["softmax"], build)
        for name, build in SCHEDULERS.items()
        if name != "none"
    },
    "constant rates": functools.partial(Run, CONTROLLERS["softmax"], SCHEDULERS["none"]),
    "two rates": functools.partial(
        Run, CONTROLLERS["softmax"], SCHEDULERS["StepLR"], [hdet.LearningRate(0.3, groups="each")]
    ),
    "OneCycleAutoLR": functools.partial(Run, CONTROLLERS["softmax"], None, auto=True),
}
SAVED_AFTER = {"auto in a trial": 3, "auto": 70, "auto, then softmax": 70}
WRONG = [
    None, True, False, 0, 1, 2, 3, -1, 7, 10**9, -(10**9), 10**400, 0.0, -0.0, 0.5, -0.5, 1e-320, 1e9, 1e30, -1e30, 1e200, 1e308, math.nan,
    math.inf, -math.inf, "", "x", b"", [], [0.0], [math.nan], [[]], [[[[1.0]]]], {}, {"a": 1}, (1, 2, 3), 1j, object(), torch.ones(2),
]  # fmt: skip


FLOATS = st.floats().filter(
    lambda x: not -1e-9 <= x < 0
)  # what rounding leaves of a rate at a schedule's end loads, and FusedAdamW refuses it


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def paths(state: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To every value in a state, however deep."""
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    for key, value in items:
        yield (*above, key)
        yield from paths(value, (*above, key))


def is_of_the_scheduler(name: str, path: tuple[Any, ...]) -> bool:
    """What numbers inside a scheduler's state lead to is torch's: a checkpoint has checksums against damage."""
    return (
        path[0] != "ensemble"
        if name == "OneCycleAutoLR"
        else path[0] == "scheduler" and len(path) > 1
    )


def damaged(state: Any, path: tuple[Any, ...], how: str, wrong: Any = None) -> Any:
    state = copy.deepcopy(state)
    place = functools.reduce(lambda part, key: part[key], path[:-1], state)
    if how == "delete":
        del place[path[-1]]
    elif how == "double":
        place[path[-1]] = [place[path[-1]], place[path[-1]]]
    elif how == "longer":
        place[path[-1]] = (
            place[path[-1]] * 2 if isinstance(place[path[-1]], list) else [place[path[-1]]]
        )
    else:
        place[path[-1]] = wrong
    return state


@functools.cache
def saved(name: str) -> Any:
    run = RUNS[name]().steps(SAVED_AFTER.get(name, STEPS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run.whole.state_dict()


victims: dict[str, Run] = {}


def check(name: str, state: Any) -> str:
    run = victims.pop(name, None) or RUNS[name]().steps(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
        RUNS[name]().whole.load_state_dict(run.whole.state_dict())
    return "went on"


@pytest.mark.parametrize("name", RUNS)
def test_a_state_as_it_was_saved_loads(name: str) -> None:
    assert check(name, saved(name)) == "went on"


@pytest.mark.parametrize("name", RUNS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_state_is_refused_or_the_run_goes_on(name: str, data: st.DataObject) -> None:
    state = saved(name)
    path = data.draw(
        st.sampled_from([path for path in paths(state) if not is_of_the_scheduler(name, path)])
    )
    how = data.draw(st.sampled_from(["delete", "double", "longer", "other"]))
    wrong = (
        data.draw(st.one_of(st.sampled_from(WRONG), FLOATS, st.integers(), st.just(nested(3000))))
        if how == "other"
        else None
    )
    check(name, damaged(state, path, how, wrong))


@pytest.mark.parametrize("steps", [110, 120])
def test_groups_without_a_knob_go_on_from_their_own_rates(steps: int) -> None:
    """The optimizer's state may be loaded later."""

    def build(optimizer: Any) -> torchs.SequentialLR:
        rises, falls = (
            torchs.LinearLR(optimizer, 1e-3, total_iters=10),
            torchs.CosineAnnealingLR(optimizer, 100, eta_min=1e-5),
        )
        return torchs.SequentialLR(optimizer, [rises, falls], [10])

    make = functools.partial(
        Run, CONTROLLERS["none"], build, [hdet.LearningRate(0.3, groups=[0])], total=200
    )
    make().ensemble.load_state_dict(make().steps(steps).ensemble.state_dict())


@pytest.mark.parametrize(
    "state", [None, 3, [], "x", {}, {"ensemble": 3, "last_epoch": 2}, nested(3000)]
)
@pytest.mark.parametrize("name", ["softmax", "OneCycleAutoLR"])
def test_what_is_no_state_at_all_is_refused(name: str, state: Any) -> None:
    assert check(name, state) == "refused"


class Torn:
    """A scheduler that has changed when it complains."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
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
    """One that loads as it likes."""

    name = "torn"
    freeze_after, frozen = None, False

    def check_state(self, state: Any, knobs: int | None = None) -> Any:
        return state

    def learn(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.step()
        return [hdet.Decision(factor=1.5)] * len(evidence.knobs)


@pytest.mark.filterwarnings("ignore:saving in the middle")
@pytest.mark.parametrize("part", ["scheduler", "controller_state"])
def test_what_complains_when_it_has_changed_already_gets_its_state_back(part: str) -> None:
    run = Run(lambda net: TornController(None), Torn).steps(7)
    state = copy.deepcopy(run.ensemble.state_dict())
    state[part]["first"] = 99
    run.steps(1)
    before = run.everything()
    with pytest.raises(ValueError, match="Torn.*cannot be loaded.*KeyError"):
        run.ensemble.load_state_dict(state)
    assert run.everything() == before
    run.ensemble.load_state_dict({**state, part: {"first": 3, "second": -3}})
    assert run.scheduler.first == (3 if part == "scheduler" else 7)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_a_state_of_a_schedule_s_last_step_loads(strategy: Any) -> None:
    """Torch's linear OneCycleLR goes below 0 in the step after its last."""
    build = functools.partial(
        torchs.OneCycleLR,
        max_lr=3e-3,
        total_steps=TOTAL,
        cycle_momentum=False,
        anneal_strategy=strategy,
    )
    run = Run(CONTROLLERS["none"], build).steps(TOTAL)
    assert run.ensemble.schedule.step == run.ensemble.schedule.total_steps
    Run(CONTROLLERS["none"], build).ensemble.load_state_dict(run.ensemble.state_dict())


def one_cycle(optimizer: Any) -> torchs.OneCycleLR:
    return torchs.OneCycleLR(optimizer, max_lr=3e-3, total_steps=TOTAL, cycle_momentum=False)


@pytest.mark.parametrize("total", [0.0, -1.0, TOTAL + 0.5, math.nan, math.inf])
def test_a_state_of_another_length_is_refused_whatever_number_it_is(total: float) -> None:
    run = Run(CONTROLLERS["none"], one_cycle).steps(INTERVAL)
    state = {
        **run.ensemble.state_dict(),
        "scheduler": {**run.ensemble.state_dict()["scheduler"], "total_steps": total},
    }
    before = run.everything()
    with pytest.raises(
        ValueError,
        match="the saved run has total_steps .*, this one 60: build the scheduler as the saved run did",
    ):
        run.ensemble.load_state_dict(state)
    assert run.everything() == before


def test_a_length_that_came_back_as_a_float_is_that_length() -> None:
    run = Run(CONTROLLERS["none"], one_cycle).steps(INTERVAL)
    run.ensemble.load_state_dict(
        {
            **run.ensemble.state_dict(),
            "scheduler": {**run.scheduler.state_dict(), "total_steps": float(TOTAL)},
        }
    )
    assert type(run.scheduler.total_steps) is int
    run.steps(TOTAL - INTERVAL)
    with pytest.raises(ValueError, match="Tried to step 61 times"):  # torch's
        run.scheduler.step()


class Unique(dict[str, int]):
    def __copy__(self) -> Unique:
        raise TypeError("there is one of these")


def test_a_state_loads_into_a_scheduler_that_cannot_be_copied() -> None:
    state = Run(CONTROLLERS["none"], one_cycle).steps(INTERVAL).ensemble.state_dict()

    def build(optimizer: Any) -> torchs.OneCycleLR:
        scheduler = one_cycle(optimizer)
        scheduler.marks = Unique()  # type: ignore[attr-defined]
        return scheduler

    run = Run(CONTROLLERS["none"], build)
    state["scheduler"]["marks"] = {}
    run.ensemble.load_state_dict(state)
    assert run.scheduler.last_epoch == INTERVAL
