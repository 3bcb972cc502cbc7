"""A schedule's peak is noticed at every step, also where it rises and falls within one cycle; cycles that are too long to decide are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import hdet
from tests.harness import Run, Scripted, model, probe

from .helpers import same


def linear(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Five steps up, and down to zero from there: below 95 % of its peak after step 9, below 90 % after step 14."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / 5, (100 - step) / 95))


def run(every: int, controller: Any = "probe", **settings: Any) -> Run:
    return Run(
        together=4,
        total=100,
        every=every,
        controller=controller,
        **{"scheduler": linear, **settings},
    )


def spread_in(run: Run) -> list[bool]:
    """By cycle."""
    return [len(set(record["multipliers"]["lr"])) > 1 for record in run.records]


@pytest.mark.parametrize(("every", "decisions"), [(10, 1), (20, 0), (50, 0)])
def test_a_peak_between_two_ends_of_cycles_has_passed_and_the_spread_rests(
    every: int, decisions: int
) -> None:
    """It was above 90 % of its peak at the end of so many cycles, and at the end of none above 95 %."""
    under = run(every)
    with pytest.warns(
        UserWarning, match=rf"schedule of lr .*'probe'.* once in {every} steps.*hdet\.Sync"
    ):
        under.steps()
    assert spread_in(under) == [cycle <= decisions for cycle in range(100 // every)]


def test_it_is_said_once_for_all_groups() -> None:
    class Groups(hdet.FusedSGD):
        def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
            first, *others = parameters
            super().__init__([{"params": [first]}, {"params": others}], lr=lr)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run(
            together=4, total=100, every=20, scheduler=linear, optimizer=Groups, controller="probe",
            knobs=[hdet.LearningRate(0.3, groups="each")],
        ).steps()  # fmt: skip
    told = [str(one.message) for one in caught if "of its peak" in str(one.message)]
    assert len(told) == 1 and "lr/0, lr/1" in told[0]


@pytest.mark.parametrize("every", [2, 5])
def test_where_cycles_end_near_the_peak_nothing_is_said(every: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under = run(every).steps()
    assert spread_in(under) == [cycle * every < 15 for cycle in range(100 // every)]


def test_a_controller_that_was_frozen_after_one_decision_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under = run(5, lambda net: probe(net, freeze_after=5)).steps()
    assert spread_in(under) == [True] + [False] * 19


def test_a_peak_within_the_warm_up_of_the_controller_has_passed() -> None:
    under = run(10, warmup_steps=30)
    with pytest.warns(UserWarning, match="of its peak"):
        under.steps()
    assert spread_in(under) == [True] * 4 + [False] * 6


def test_a_value_before_the_first_step_is_no_peak() -> None:
    """A loop that writes its own schedule has the optimizer's rate in its groups until then."""
    under = Run(together=4, total=40, every=5, controller="probe", scheduler=None)
    group = under.optimizer.param_groups[0]
    group["initial_lr"] = peak = group["lr"]
    for step in range(40):
        with under.ensemble.rescheduling():
            group["lr"] = peak * min((step + 1) / 20, (40 - step) / 20)
        under.step()
    assert spread_in(under) == [True] * 5 + [False] * 3


def test_a_resumed_run_knows_the_peak_of_the_cycle_that_it_goes_on_with() -> None:
    under, again = run(50), run(50)
    under.steps(20)
    under.ensemble.converge()
    again.ensemble.load_state_dict(under.ensemble.state_dict())
    again.index = 20
    with pytest.warns(UserWarning, match="of its peak"):
        again.steps()
    assert spread_in(again) == [True, False]


def test_rates_that_are_tensors_are_seen_without_a_wait() -> None:
    def tensors(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=torch.tensor(lr),
            weight_decay=weight_decay,
            foreach=False,
            capturable=False,
        )

    with pytest.warns(UserWarning, match="one replica"):
        one = Run(total=100, every=20, scheduler=linear, optimizer=tensors, controller="probe")
    one.steps(19)
    (knob,) = one.ensemble.knobs
    assert isinstance(knob.highest, torch.Tensor) and float(knob.highest) == pytest.approx(3e-3)
    with pytest.warns(UserWarning, match="of its peak"):
        one.steps()


def test_where_cycles_see_the_peak_no_bit_is_another_one() -> None:
    """Beside a controller that is told of no value but those at the ends of cycles."""

    class Older(hdet.ProbeController):
        def learn(self, evidence: hdet.Evidence) -> Any:
            return super().learn(hdet.Evidence(**{**evidence.to_dict(), "highest": ()}))

    def older(net: torch.nn.Module) -> hdet.Controller:
        made = probe(net)
        return Older(made.losses.loss_fn, made.losses.batches, model=net)

    one, two = (run(5, controller, lr=1e-4).steps() for controller in ("probe", older))
    assert same(one.weights(), two.weights()) and one.ensemble.corrections["lr"] != 1
    assert [record["multipliers"] for record in one.records] == [
        record["multipliers"] for record in two.records
    ]


def made(
    controller: Callable[[Any], hdet.Controller | None], total: int | None, **settings: Any
) -> hdet.Ensemble:
    net = model()
    return hdet.Ensemble(
        torch.optim.SGD(net.parameters(), lr=1e-3),
        total_steps=total,
        controller=controller(net),
        **settings,
    )


ENDS: dict[str, Callable[[Any], hdet.Controller]] = {
    "scripted": lambda net: Scripted(),
    "auto, then softmax": lambda net: hdet.SequentialController(
        hdet.AutoLR(net), hdet.SoftmaxController(decay=None)
    ),
}


@pytest.mark.filterwarnings("ignore:one replica")
@pytest.mark.parametrize("name", ENDS)
def test_a_run_of_fewer_than_two_cycles_is_warned_of_with_the_default_and_the_way_out(
    name: str,
) -> None:
    with pytest.warns(
        UserWarning,
        match=rf"has 1999 steps, .* T = 1000 \(1000 by default\): the controller '{name}'.*sync=hdet\.Sync\(99\)",
    ):
        made(ENDS[name], 1999)
    with pytest.warns(
        UserWarning, match=r"has 99 steps, .* T = 50 \(1000 by default\).*sync=hdet\.Sync\(4\)"
    ):
        made(ENDS[name], 99, sync=hdet.Sync(50))


def test_no_other_run_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(ENDS["scripted"], 2000)
        made(ENDS["scripted"], None)
        made(lambda net: None, 10)
        made(lambda net: hdet.Shadow(hdet.AutoLR(net)), 300)
        made(
            lambda net: hdet.AutoLR(net), 300
        )  # it decides in the first steps, whatever cycles there are
