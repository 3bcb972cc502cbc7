"""Mistakes that a loop can make without an error: each is warned of once, with what to change."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdet
from tests.harness import TwoReplicas

STEPS = 60


class Loop:
    """A model, its optimizer, a cosine over `STEPS`."""

    def __init__(self, lr: float = 1e-3, frozen: bool = False, length: int = STEPS) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        self.model.requires_grad_(not frozen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, length)

    def train(
        self, steps: int = STEPS, total: int = STEPS, state: Any = None, **settings: Any
    ) -> hdet.Ensemble:
        ensemble = hdet.Ensemble(self.optimizer, self.scheduler, total_steps=total, **settings)
        if state is not None:
            ensemble.load_state_dict(state)
        for step in range(steps):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ensemble.step(loss)
        return ensemble


def never_stepped() -> None:
    loop = Loop()
    ensemble = hdet.Ensemble(loop.optimizer, loop.scheduler, total_steps=STEPS)
    for _ in range(5):
        ensemble.step(1.0)


def stepped_twice() -> None:
    loop = Loop()
    ensemble = hdet.Ensemble(loop.optimizer, loop.scheduler, total_steps=STEPS)
    for _ in range(30):
        loop.model(torch.ones(4)).backward()
        loop.optimizer.step()
        for _ in range(2):
            ensemble.step(1.0)


def resumed(whole: bool) -> None:
    """``whole``: with the Ensemble's state."""
    loops = [Loop(), Loop()]
    for loop in loops:
        loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0)
    first, then = loops
    ensemble = first.train(10)
    ensemble.set_value("lr", 0.01)
    then.optimizer.load_state_dict(first.optimizer.state_dict())
    then.scheduler.load_state_dict(first.scheduler.state_dict())
    then.train(5, state=ensemble.state_dict() if whole else None)


def half_resumed(is_before: bool) -> None:
    """With the state of the optimizer alone; is its scheduler made before that is loaded?"""
    first, then = Loop(lr=0.01), Loop()
    first.train(3)
    then.optimizer.load_state_dict(first.optimizer.state_dict())
    then.optimizer.param_groups[0]["lr"] = 0.01
    if not is_before:
        then.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(then.optimizer, STEPS)
    ensemble = then.train(40, search=hdet.AutoLR(then.model, budget=0))
    assert ensemble.corrections == {"lr": 1.0} and "stays (the optimizer" in ensemble.report()


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "optimizer.step is never called": (never_stepped, r"no optimizer\.step\(\) before it"),
    "ensemble.step is called twice": (stepped_twice, "called 40 times, but there were 20 steps"),
    "a resume leaves out the Ensemble's state": (
        lambda: resumed(False), r"was 0.01, its scheduler's 0.001.* ensemble.state_dict\(\)",
    ),
    "a new schedule of an optimizer that is loaded": (
        lambda: half_resumed(True), "was 0.01, its scheduler's 0.001.*load the states of both",
    ),
    "a schedule that begins again": (
        lambda: half_resumed(False), "optimizer has made steps, and no scheduler has.*load the",
    ),
    "the loop is longer than the run": (
        lambda: Loop().train(STEPS + 9), "step after the last one .* total_steps=60",
    ),
    "the schedule is shorter than the run": (
        lambda: Loop(length=20).train(), "T_max of the CosineAnnealingLR is 20: write one number",
    ),
    "the rate is 0": (lambda: Loop(lr=0.0).train(), "learning rate is 0.*nothing is trained"),
    "replicas do not differ": (
        lambda: Loop().train(
            controller=hdet.SoftmaxController(decay=None), replicas=TwoReplicas(),
            knobs=[hdet.LearningRate(0)], sync=hdet.Sync(10),
        ), r"compares replicas, .* pass LearningRate\(spread=1/9\), .*ensemble_lr_spread_ratio=1/9",
    ),
    "the run is shorter than two cycles": (
        lambda: Loop().train(
            controller=hdet.SoftmaxController(decay=None), replicas=TwoReplicas(),
            sync=hdet.Sync(31),
        ), r"60 steps, and cycles have T = 31 .*hardly do anything.* sync=hdet.Sync\(3\)",
    ),
    "all is frozen": (lambda: Loop(frozen=True).train(), "frozen .*nothing is trained"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_warned_of_once(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    assert [w.category for w in caught] == [UserWarning], [str(w.message) for w in caught]
    assert caught[0].filename == __file__, "the user's line"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(caught[0].message))


@pytest.mark.filterwarnings("ignore:ensemble.step")  # which is warned of before
def test_a_backward_pass_behind_a_trials_step_is_refused_by_name() -> None:
    loop = Loop(length=1000)
    auto = hdet.AutoLR(loop.model)
    ensemble = hdet.Ensemble(loop.optimizer, loop.scheduler, total_steps=1000, search=auto)
    losses_of = lambda: loop.model(torch.randn(16, 4)).square().mean(1)

    def step() -> None:
        loss = losses_of().mean()
        ensemble.step(loss, closure=losses_of)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    step()  # no optimizer step before it, so no trial
    with pytest.raises(RuntimeError, match=r"move ensemble\.step\(\) behind optimizer\.step\(\)"):
        step()


def test_a_loop_without_mistakes_is_warned_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Loop().train().report() == "no controller: nothing moves the values of the schedule"
        loop = Loop()
        loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0)
        loop.train(9).close()
        loop.train(9)  # goes on at the scheduler's own rate
        resumed(True)
        hdet.Ensemble(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0))  # rescheduled


def test_a_trials_result_is_printed_when_it_is_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as in a script that has not called logging.basicConfig: pytest has
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = logging.getLogger("hdet")
    for level, printed in ((logging.WARNING, False), (logging.INFO, True)):
        log.setLevel(level)
        loop = Loop()
        loop.train(40, search=hdet.AutoLR(loop.model, budget=0))
        said = capsys.readouterr().err
        assert said.startswith("hdet, step 27: learning rate 0.001") == printed
        assert said.count("\n") == printed


@pytest.mark.parametrize(("sync", "cycles"), [(None, 6), (hdet.Sync(25), 3)])
def test_a_run_that_only_searches_has_records_for_a_curve(sync: Any, cycles: int) -> None:
    """Nothing else happens where its cycles end, so they may be short; at least 20 steps, whose
    mean loss is no noise."""
    loop = Loop(length=120)
    auto = hdet.AutoLR(loop.model, budget=0)
    ensemble = loop.train(min(120, 25 * cycles if sync else 120), 120, search=auto, sync=sync)
    assert len(ensemble.history) == cycles
    assert all(record["losses"][0] is not None for record in ensemble.history)
