"""What a scheduler is going to do: told before it does it, and without touching it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import hdet
from hdet.knobs import LearningRate, bind_all
from hdet.run.forecast import means
from hdet.run.schedule import Schedule

TOTAL = 40


def adam() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(3))], "lr": lr, "name": name} for lr, name in ((0.1, "a"), (0.02, "b"))]
    return torch.optim.AdamW(groups)


def wsd(step: int) -> float:
    return min(1.0, (step + 1) / 4, (TOTAL - step) / 8)


def warm_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lrs.LinearLR(optimizer, 0.1, total_iters=5), lrs.CosineAnnealingLR(optimizer, TOTAL - 5)]
    return lrs.SequentialLR(optimizer, parts, [5])


def begun(optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
    """It has done a quarter of the run."""
    for _ in range(TOTAL // 4):
        optimizer.step()
        scheduler.step()
    return scheduler


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.02], TOTAL),  # cycles betas too
    "cosine": lambda o: lrs.CosineAnnealingLR(o, TOTAL),
    "wsd": lambda o: lrs.LambdaLR(o, wsd),
    "sequential": warm_then_cosine,
    "steps": lambda o: lrs.MultiStepLR(o, [10, 30]),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 7),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, TOTAL)]),
    "begun": lambda o: begun(o, lrs.CosineAnnealingLR(o, TOTAL)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_it_is_what_the_scheduler_then_does_and_leaves_it_alone(name: str) -> None:
    optimizer = adam()
    scheduler = SCHEDULERS[name](optimizer)
    before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups], str(scheduler.state_dict())
    ahead = means(scheduler, TOTAL)
    assert before == ([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups], str(scheduler.state_dict()))
    real: list[list[float]] = [[], []]
    steps = TOTAL * 3 // 4 if name == "begun" else TOTAL
    for _ in range(steps):
        for column, group in zip(real, optimizer.param_groups, strict=True):
            column.append(group["lr"])
        optimizer.step()
        if len(real[0]) < steps:
            scheduler.step()
    assert ahead == [pytest.approx(sum(column) / steps) for column in real]


@pytest.mark.parametrize(
    "make", [lambda o: lrs.LambdaLR(o, wsd), lambda o: lrs.MultiplicativeLR(o, lambda step: wsd(step) / wsd(step - 1))]
)
def test_a_tensor_as_rate_is_told_too_and_stays_what_it_is(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=torch.tensor(0.1))
    scheduler = make(optimizer)
    first = float(optimizer.param_groups[0]["lr"]) / wsd(0)
    ahead = means(scheduler, TOTAL)
    assert ahead == [pytest.approx(first * sum(map(wsd, range(TOTAL))) / TOTAL)]
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(first * wsd(0))


class Odd(lrs.LRScheduler):
    """Somebody's own: raises in its fourth step, or holds what cannot be copied."""

    def __init__(self, optimizer: torch.optim.Optimizer, lock: Any = None) -> None:
        self.lock = lock
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch == 3 and self.lock is None:
            raise KeyError("no such epoch")
        return [0.1] * len(self.base_lrs)


@pytest.mark.parametrize("lock", [None, threading.Lock()])
def test_a_scheduler_that_cannot_run_ahead_is_not_told_and_may_go_on(lock: Any) -> None:
    scheduler = Odd(adam(), lock)
    assert means(scheduler, TOTAL) is None and scheduler.last_epoch == 0


def test_what_cannot_be_told() -> None:
    plateau = lrs.ReduceLROnPlateau(adam())
    assert means(None, TOTAL) is None and means(plateau, TOTAL) is None and means(lrs.LambdaLR(adam(), wsd), None) is None
    assert means(object(), TOTAL) is None


def test_the_means_of_knobs() -> None:
    """In the middle between its values; of a schedule that nobody knows, and of what has none, the peak."""
    optimizer = adam()
    schedule = Schedule(lrs.LambdaLR(optimizer, wsd), bind_all([LearningRate(0.1, groups="each")], optimizer), TOTAL)
    mean = sum(map(wsd, range(TOTAL))) / TOTAL
    assert schedule.means() == [pytest.approx(0.1 * mean), pytest.approx(0.02 * mean)] and 0.8 < mean < 0.9
    constant = adam()
    assert Schedule(None, bind_all([LearningRate(0.1, groups="each")], constant), TOTAL).means() == [0.1, 0.02]


def test_the_drop_in_tells_torch_s_own_means() -> None:
    optimizer, other = adam(), adam()
    scheduler = hdet.OneCycleAutoLR(optimizer, [0.1, 0.02], TOTAL, cycle_momentum=False)
    ahead = means(scheduler.ensemble.schedule.scheduler, TOTAL)
    assert ahead is not None and ahead == means(lrs.OneCycleLR(other, [0.1, 0.02], TOTAL, cycle_momentum=False), TOTAL)
    assert ahead[0] < 0.06  # of a peak of 0.1


def test_a_long_run_is_not_stepped_through_where_there_is_a_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step of somebody's own, which may write logs, is not called at all."""
    optimizer, total = adam(), 100_000
    scheduler = lrs.OneCycleLR(optimizer, [0.1, 0.02], total, cycle_momentum=False)
    whole = means(scheduler, total)

    def step(self: Any, epoch: Any = None) -> None:
        pytest.fail("stepped")

    step.__module__ = lrs.LRScheduler.__module__
    monkeypatch.setattr(lrs.LRScheduler, "step", step)
    assert whole == means(scheduler, total) == [pytest.approx(0.0508, rel=0.05), pytest.approx(0.0102, rel=0.05)]

    class Logging(lrs.CosineAnnealingLR):
        def step(self, epoch: Any = None) -> None:
            pytest.fail("logged")

    monkeypatch.undo()
    assert means(Logging.__new__(Logging), TOTAL) is None
