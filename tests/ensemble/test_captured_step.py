"""Ways to an optimizer's step: through the Ensemble's wrapper, and past it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import TwoReplicas

PAST = r"went past the Ensemble.*make the Ensemble first"


def net_and_optimizer(kind: Any = torch.optim.SGD, **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    return net, kind(net.parameters(), lr=0.1, **settings)


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(2, 3)).square().mean()


def train(net: nn.Module, optimizer: Any, ensemble: hdet.Ensemble, step: Callable[[], Any]) -> None:
    optimizer.zero_grad()
    loss_of(net).backward()
    step()
    ensemble.step()


def through_a_profiler(optimizer: Any) -> Callable[[], Any]:
    """As a library may do that times steps: it wraps what it finds, and says nothing of it."""
    inner = optimizer.step
    optimizer.step = lambda *args, **kwargs: inner(*args, **kwargs)
    return optimizer.step


WAYS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "captured": lambda optimizer: optimizer.step,
    "partial": lambda optimizer: functools.partial(optimizer.step),
    "compiled": lambda optimizer: torch.compile(optimizer.step, backend="eager"),
    "profiler": through_a_profiler,
}


@pytest.mark.parametrize(("way", "kind"), [
    *((way, torch.optim.SGD) for way in ("captured", "partial", "compiled", "of the class")),
    *((way, hdet.FusedAdamW) for way in ("captured", "partial", "of the class")),
])  # fmt: skip
def test_a_step_that_was_captured_before_the_ensemble_is_refused(way: str, kind: Any) -> None:
    net, optimizer = net_and_optimizer(kind)
    make = WAYS.get(way, lambda optimizer: functools.partial(kind.step, optimizer))
    step = make(optimizer)
    ensemble = hdet.Ensemble(optimizer, replicas=TwoReplicas(), sync=hdet.Sync(3))
    with pytest.raises(RuntimeError, match=PAST):
        train(net, optimizer, ensemble, step)
    train(net, optimizer, ensemble, optimizer.step)  # looked up again
    assert ensemble.steps_done == 1
    ensemble.close()
    loss_of(net).backward()
    step()  # nobody is driving


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_captured_after_the_ensemble_is_counted(way: str) -> None:
    net, optimizer = net_and_optimizer()
    knobs = [hdet.LearningRate(0.5)]
    ensemble = hdet.Ensemble(optimizer, replicas=TwoReplicas(), sync=hdet.Sync(3), knobs=knobs)
    seen: set[float] = set()
    optimizer.register_step_pre_hook(lambda opt, *_: seen.add(opt.param_groups[0]["lr"]))
    step = WAYS[way](optimizer)
    for _ in range(2):
        train(net, optimizer, ensemble, step)
    assert ensemble.steps_done == 2 and seen == {0.1 * ensemble.multipliers["lr"]} != {0.1}


class Twice(torch.optim.SGD):
    """A subclass whose step calls super()."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_is_no_training_step_is_let_pass() -> None:
    """A step of rate 0, by which libraries make a state; one that raises; one with a closure."""
    net, optimizer = net_and_optimizer(Twice, momentum=0.9)
    step = optimizer.step
    ensemble = hdet.Ensemble(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    loss_of(net).backward()
    step()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    assert ensemble.steps_done == 0

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    def fails() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(fails)
    ensemble.step(optimizer.step(closure))
    ensemble.step(optimizer.step(closure))
    assert ensemble.steps_done == 2


def depth(optimizer: Any) -> int:
    count, step = 0, optimizer.step
    while hasattr(step, "__wrapped__"):
        count, step = count + 1, step.__wrapped__
    return count


def with_a_scheduler_on_top(optimizer: Any) -> hdet.Ensemble:
    ensemble = hdet.Ensemble(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return ensemble


def drop_in(optimizer: Any) -> hdet.Ensemble:
    return hdet.OneCycleAutoLR(optimizer, 0.1, 1000, cycle_momentum=False).ensemble


@pytest.mark.parametrize("make", [hdet.Ensemble, drop_in, with_a_scheduler_on_top])
def test_an_optimizer_outlives_any_number_of_ensembles(make: Callable[[Any], Any]) -> None:
    net, optimizer = net_and_optimizer()
    for _ in range(50):
        make(optimizer).close()
        assert depth(optimizer) <= 4
    own = through_a_profiler(optimizer)
    hdet.Ensemble(optimizer).close()
    assert optimizer.step is own
    loss_of(net).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble = hdet.Ensemble(optimizer)
    with pytest.raises(ValueError, match="already driven"):
        make(optimizer)
    train(net, optimizer, ensemble, optimizer.step)
    assert ensemble.steps_done == 1
