"""A search is ended in the middle: states of a run with a controller, in one without."""

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
from tests.harness import Run, Scripted, probe

GONE = r"saved with controller 'scripted', and this run has none: the corrections lr 0.5 stay in "


def saved(**settings: Any) -> tuple[Run, dict[str, Any]]:
    """In the middle of a cycle, after a move: the rate is halved at the end of the first."""
    run = Run(**{"controller": Scripted([0.5]), **settings}).steps(13)
    run.ensemble.converge()
    return run, run.saved()


def resumed(state: dict[str, Any], **settings: Any) -> Run:
    return Run(**settings).loaded(state)


@pytest.mark.parametrize("scheduler", ["one cycle", lambda o: CosineAnnealingLR(o, 40), None])
def test_without_a_controller_the_corrected_rate_goes_on(scheduler: Any) -> None:
    """It does what the controller, which moves nothing any more, has left, and loads silently."""
    run, state = saved(scheduler=scheduler, spread=0.0)
    with pytest.warns(UserWarning, match=GONE + "force.*any more$"):
        off = resumed(state, scheduler=scheduler, spread=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = resumed(off.saved(), scheduler=scheduler, spread=0.0)
    assert later.ensemble.corrections == off.ensemble.corrections == {"lr": 0.5}
    for _ in range(13, 40):
        run.step(), off.step()
        assert off.rate == run.rate
    assert torch.equal(off.weights(), run.weights())


@pytest.mark.parametrize(("spread", "told"), [(0.3, True), (0.0, False)])
def test_a_probe_is_turned_off_and_a_spread_that_stays_is_said(spread: float, told: bool) -> None:
    """With several replicas the average goes on as long as they differ."""
    settings: dict[str, Any] = {"together": 4, "total": 60, "lr": 1e-5}
    _, state = saved(**settings, controller=probe)
    state["ensemble"]["corrections"] = [1.75]
    with pytest.warns(UserWarning, match="controller 'probe'.* lr 1.75 stay") as caught:
        off = resumed(state, **settings, spread=spread)
    assert any("LearningRate(0)" in str(one.message) for one in caught) == told
    assert off.steps().ensemble.corrections == {"lr": 1.75} and off.equal()
    assert (len(set(off.records[-1]["multipliers"]["lr"])) > 1) == told


def test_another_controller_is_refused_with_the_way_out() -> None:
    said = r"controller 'scripted', this run has 'softmax'.*controller=None, "
    with pytest.raises(ValueError, match=said + "which keeps the corrections"):
        resumed(saved()[1], controller=hdet.SoftmaxController(decay=None))


def test_a_decay_that_stands_for_the_schedule_cannot_be_left_alone() -> None:
    """Without its controller the rate would stay where it is to the end."""
    run, state = saved(together=4, controller=hdet.SoftmaxController())
    with pytest.raises(ValueError, match="'softmax'.*in the place of the schedule.*freeze_after=1"):
        resumed(state, together=4)
    frozen = hdet.SoftmaxController(freeze_after=1)
    values = resumed(state, together=4, controller=frozen).steps().ensemble.values()
    assert frozen.frozen and values["lr"] < state["ensemble"]["bases"][0]
    assert not run.steps().controller.frozen


def sequence(o: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, 37)], [3])


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("scheduler", "by_hand", "kept"), [
    *((lambda o: LambdaLR(o, lambda step: 1 - step / 41), *how) for how in ((0, 0), (1, 1))),
    *((lambda o: OneCycleLR(o, 3e-3, 41, cycle_momentum=False), *how) for how in ((0, 0), (1, 1))),
    (lambda o: CosineAnnealingLR(o, 41), 0, 1), (lambda o: StepLR(o, 10), 0, 1), (sequence, 0, 1),
])  # fmt: skip
def test_what_becomes_of_the_rate_where_hdet_is_taken_out(
    scheduler: Callable[..., LRScheduler], by_hand: bool, kept: bool
) -> None:
    """As docs/faq.md says."""
    run, _ = saved(scheduler=scheduler, spread=0.0)
    correction = run.ensemble.corrections["lr"]
    bare, other = (torch.optim.AdamW(run.net.parameters(), lr=3e-3) for _ in range(2))
    schedule, own = scheduler(bare), scheduler(other)
    bare.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    schedule.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))
    if by_hand:
        for group in bare.param_groups:
            for key in {"initial_lr", "max_lr", "min_lr"} & group.keys():
                group[key] *= correction
        schedule.base_lrs = [rate * correction for rate in schedule.base_lrs]
    for _ in range(13):
        own.step()
    for _ in range(20):
        schedule.step(), own.step()
        expected = (correction if kept else 1.0) * other.param_groups[0]["lr"]
        assert bare.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9)
