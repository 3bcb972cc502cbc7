"""To which part of its peak a scheduler falls is asked of it before the run: AutoLR goes by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

import hdet
from tests.harness import model

TOTAL = 400

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, TOTAL),
    "cosine to a tenth": lambda o: lr.CosineAnnealingLR(o, TOTAL, eta_min=3e-4),
    "steps": lambda o: lr.MultiStepLR(o, [200, 300]),
    "constant": lambda o: lr.ConstantLR(o, 0.1, 20),
    "linear": lambda o: lr.LinearLR(o, 1.0, 0.0, TOTAL),
    "exponential": lambda o: lr.ExponentialLR(o, 0.999),
    "polynomial": lambda o: lr.PolynomialLR(o, TOTAL, 2.0),
    "one cycle": lambda o: lr.OneCycleLR(o, 3e-3, total_steps=TOTAL),
    "a function": lambda o: lr.LambdaLR(o, lambda step: min((step + 1) / 20, (20 / (step + 1)) ** 0.5)),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 100),
    "restarts that end high": lambda o: lr.CosineAnnealingWarmRestarts(o, 300),
    "a warm-up, then a cosine": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 20), lr.CosineAnnealingLR(o, TOTAL - 20)], [20]),
    "a warm-up, then functions": lambda o: lr.SequentialLR(
        o, [lr.LambdaLR(o, lambda step: (step + 1) / 20), lr.LambdaLR(o, lambda step: 1 - step / 760)], [20]
    ),
    "a product": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 20), lr.ExponentialLR(o, 0.999)]),
}


def optimizer() -> torch.optim.Optimizer:
    first, *others = model().parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.1}], lr=3e-3)


def stepped(scheduler: Any) -> float:
    """Of its highest rate, by going there."""
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(TOTAL):
            rates.append(scheduler.optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates[-1] / max(rates)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_asked_without_being_stepped(name: str) -> None:
    scheduler = SCHEDULERS[name](optimizer())
    before = scheduler.state_dict()
    ensemble = hdet.Ensemble(scheduler.optimizer, scheduler, total_steps=TOTAL)
    assert str(scheduler.state_dict()) == str(before)
    (found,) = ensemble.run.falls_to
    assert found == pytest.approx(stepped(SCHEDULERS[name](optimizer())), abs=0.03)


def test_one_that_the_user_steps_or_that_a_framework_holds_is_asked_too() -> None:
    class Container:
        def __init__(self, scheduler: Any) -> None:
            self.schedulers = [scheduler]

        def step(self) -> None:
            self.schedulers[0].step()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    for hold in (Container, lambda scheduler: None):
        scheduler = lr.CosineAnnealingLR(optimizer(), TOTAL, eta_min=3e-4)
        (found,) = hdet.Ensemble(scheduler.optimizer, hold(scheduler), total_steps=TOTAL).run.falls_to
        assert found == pytest.approx(0.1, abs=0.01)
    drop_in = hdet.OneCycleAutoLR(optimizer(), 3e-3, TOTAL)
    assert max(drop_in.ensemble.run.falls_to) < 1e-3  # type: ignore[type-var]


@pytest.mark.parametrize(
    "scheduler", [None, lambda o: lr.MultiplicativeLR(o, lambda step: 0.99), lambda o: lr.LambdaLR(o, [0.9, 0.8].__getitem__)]
)
def test_where_nobody_can_be_asked_it_is_not_known(scheduler: Any) -> None:
    own = optimizer()
    made = scheduler and scheduler(own)
    assert hdet.Ensemble(own, made, total_steps=TOTAL).run.falls_to == [None]
    constant = lr.ConstantLR(optimizer(), 1.0)
    assert hdet.Ensemble(constant.optimizer, constant).run.falls_to == [None]  # the length of the run is not known


def test_a_schedule_that_leaves_its_ends_in_the_groups_is_known_by_them() -> None:
    own = optimizer()
    for group in own.param_groups:
        group.update(max_lr=group["lr"], min_lr=0.25 * group["lr"])
    assert hdet.Ensemble(own, None, total_steps=TOTAL).run.falls_to == [0.25]


def test_what_no_scheduler_moves_is_not_known() -> None:
    adamw = torch.optim.AdamW(model().parameters(), lr=3e-3)
    scheduler = lr.CosineAnnealingLR(adamw, TOTAL)
    knobs = [hdet.LearningRate(), hdet.WeightDecay()]
    rate, decay = hdet.Ensemble(scheduler.optimizer, scheduler, total_steps=TOTAL, knobs=knobs).run.falls_to
    assert rate is not None and decay is None
