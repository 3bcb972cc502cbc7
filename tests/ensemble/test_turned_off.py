"""A search is ended in the middle of a project: states of a run with a controller, in one without."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import hdet
from tests.harness import Run, probe


class Halves(hdet.Controller):
    """Once, at the end of the first cycle."""

    name, needs_replicas = "halves", False

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        return [hdet.Decision(factor=0.5 if evidence.cycle == 0 else 1.0) for _ in evidence.knobs]


def saved(**settings: Any) -> tuple[Run, dict[str, Any]]:
    """In the middle of a cycle, after a move."""
    run = Run(**{"controller": lambda net: Halves(), **settings}).steps(13)
    run.ensemble.converge()
    return run, copy.deepcopy(run.ensemble.state_dict())


def resumed(run: Run, state: dict[str, Any], **settings: Any) -> Run:
    again = Run(**settings)
    again.net.load_state_dict(run.net.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    again.index = run.index
    again.ensemble.load_state_dict(state)
    return again


@pytest.mark.parametrize(
    "scheduler", ["one cycle", lambda optimizer: CosineAnnealingLR(optimizer, 40), None]
)
def test_without_a_controller_the_corrected_rate_goes_on(scheduler: Any) -> None:
    run, state = saved(scheduler=scheduler, spread=0.0)
    with pytest.warns(
        UserWarning,
        match=r"saved with controller 'halves', and this run has none: the corrections lr 0.5 stay in force.*any more$",
    ):
        off = resumed(run, state, scheduler=scheduler, spread=0.0)
    assert off.ensemble.corrections == {"lr": 0.5}
    for _ in range(13, 40):
        run.step()
        off.step()
        assert off.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    assert torch.equal(off.weights(), run.weights()), (
        "it does what the controller, which moves nothing any more, has left"
    )


def test_what_it_saves_then_loads_without_a_word() -> None:
    run, state = saved(spread=0.0)
    with pytest.warns(UserWarning, match="this run has none"):
        off = resumed(run, state, spread=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = resumed(off, off.ensemble.state_dict(), spread=0.0)
    assert later.ensemble.corrections == {"lr": 0.5}


@pytest.mark.parametrize(("spread", "told"), [(0.3, True), (0.0, False)])
def test_a_probe_is_turned_off_and_a_spread_that_stays_is_said(spread: float, told: bool) -> None:
    """With several replicas the average goes on as long as they differ."""
    settings: dict[str, Any] = {"together": 4, "optimizer": hdet.FusedAdamW, "total": 60}
    run, state = saved(**settings, controller=lambda net: probe(net), lr=1e-5)
    state["corrections"] = [1.75]
    with pytest.warns(UserWarning, match="controller 'probe'.* lr 1.75 stay") as caught:
        off = resumed(run, state, **settings, lr=1e-5, spread=spread)
    assert any("LearningRate(0)" in str(one.message) for one in caught) == told
    off.steps()
    assert off.ensemble.corrections == {"lr": 1.75} and off.equal()
    assert (len(set(off.records[-1]["multipliers"]["lr"])) > 1) == told


def test_another_controller_is_refused_with_the_way_out() -> None:
    run, state = saved()
    with pytest.raises(
        ValueError,
        match=r"controller 'halves', this run has 'softmax'.*controller=None, which keeps the corrections",
    ):
        resumed(run, state, controller=lambda net: hdet.SoftmaxController(decay=None))


def test_a_decay_that_stands_for_the_schedule_cannot_be_left_alone() -> None:
    """Without its controller the rate would stay where it is to the end."""
    softmax: Callable[..., hdet.Controller] = hdet.SoftmaxController
    run, state = saved(together=4, controller=lambda net: softmax())
    with pytest.raises(ValueError, match="'softmax'.*in the place of the schedule.*freeze_after=1"):
        resumed(run, state, together=4)
    frozen = resumed(run, state, together=4, controller=lambda net: softmax(freeze_after=1)).steps()
    moved = run.steps()
    assert (
        frozen.controller.frozen
        and frozen.ensemble.values()["lr"] < state["bases"][0]
        and not moved.controller.frozen
    )


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 37)], [3]
    )


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("scheduler", "kept"), [
    (lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / 41), False),
    (lambda optimizer: OneCycleLR(optimizer, 3e-3, 41, cycle_momentum=False), False),
    (lambda optimizer: CosineAnnealingLR(optimizer, 41), True),
    (lambda optimizer: StepLR(optimizer, 10), True),
    (sequence, True),
])  # fmt: skip
def test_what_becomes_of_the_rate_where_hdet_is_taken_out(
    scheduler: Callable[..., LRScheduler], kept: bool
) -> None:
    """As docs/faq.md says."""
    run, _ = saved(scheduler=scheduler, spread=0.0)
    correction = run.ensemble.corrections["lr"]
    for by_hand in (False, True):
        if by_hand and kept:
            continue
        bare = torch.optim.AdamW(run.net.parameters(), lr=3e-3)
        schedule = scheduler(bare)
        bare.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        schedule.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))
        if by_hand:
            for group in bare.param_groups:
                for key in {"initial_lr", "max_lr", "min_lr"} & group.keys():
                    group[key] *= correction
            schedule.base_lrs = [rate * correction for rate in schedule.base_lrs]
        own = scheduler(torch.optim.AdamW(run.net.parameters(), lr=3e-3))
        for _ in range(13):
            own.step()
        for _ in range(20):
            schedule.step()
            own.step()
            factor = correction if kept or by_hand else 1.0
            assert bare.param_groups[0]["lr"] == pytest.approx(
                factor * own.optimizer.param_groups[0]["lr"], rel=1e-9
            )
