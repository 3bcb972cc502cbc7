"""Ways to an optimizer's step: through the Ensemble's wrapper, and past it."""

from __future__ import annotations

import functools
import types
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


def train(net: nn.Module, optimizer: Any, ensemble: hdet.Ensemble, step: Callable[[], Any]) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3)).square().mean().backward()
    step()
    ensemble.step()


def through_a_profiler(optimizer: Any) -> Callable[[], Any]:
    """As a library may do that times steps: it wraps what it finds, and says nothing of it."""
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    optimizer.step = step
    return step


WAYS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "captured": lambda optimizer: optimizer.step,
    "partial": lambda optimizer: functools.partial(optimizer.step),
    "compiled": lambda optimizer: torch.compile(optimizer.step, backend="eager"),
    "profiler": through_a_profiler,
}


@pytest.mark.parametrize("kind", [torch.optim.SGD, hdet.FusedAdamW])
@pytest.mark.parametrize("way", ["captured", "partial", "compiled", "of the class"])
def test_a_step_that_was_captured_before_the_ensemble_is_refused(way: str, kind: Any) -> None:
    if way == "compiled" and kind is not torch.optim.SGD:
        pytest.skip("kernels are not compiled")
    net, optimizer = net_and_optimizer(kind)
    step = (
        functools.partial(kind.step, optimizer) if way == "of the class" else WAYS[way](optimizer)
    )
    ensemble = hdet.Ensemble(optimizer, replicas=TwoReplicas(), sync=hdet.Sync(3))
    with pytest.raises(RuntimeError, match=PAST):
        train(net, optimizer, ensemble, step)
    train(net, optimizer, ensemble, optimizer.step)  # looked up again
    assert ensemble.engine.step == 1
    ensemble.close()
    net(torch.ones(2, 3)).sum().backward()
    step()  # nobody is driving


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_captured_after_the_ensemble_is_counted(way: str) -> None:
    net, optimizer = net_and_optimizer()
    ensemble = hdet.Ensemble(
        optimizer, replicas=TwoReplicas(), sync=hdet.Sync(3), knobs=[hdet.LearningRate(0.5)]
    )
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
    step = WAYS[way](optimizer)
    for _ in range(2):
        train(net, optimizer, ensemble, step)
    assert ensemble.engine.step == 2 and set(seen) == {0.1 * ensemble.multipliers["lr"]} != {0.1}


def test_what_is_no_training_step_is_let_pass() -> None:
    """A step of rate 0, by which checkpoint libraries make a state; one that raises; one that a closure is given to; a subclass's super()."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net, optimizer = net_and_optimizer(Twice, momentum=0.9)
    step = optimizer.step
    ensemble = hdet.Ensemble(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    net(torch.ones(2, 3)).sum().backward()
    step()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    assert ensemble.engine.step == 0

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    def fails() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(fails)
    ensemble.step(optimizer.step(closure))
    ensemble.step(optimizer.step(closure))
    assert ensemble.engine.step == 2


def test_a_scaler_and_a_scheduler_that_wraps_the_step_are_let_pass() -> None:
    net, optimizer = net_and_optimizer()
    ensemble = hdet.Ensemble(optimizer)
    with ensemble.rescheduling():
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        ensemble.step()
        with ensemble.rescheduling():
            scheduler.step()
    assert ensemble.engine.step == 3


class AcceleratesOptimizer:
    """What accelerate does with a scaler: the step that it finds when it is built is put back after each of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.original, self.scaler = (
            optimizer,
            optimizer.step,
            torch.amp.GradScaler("cpu", init_scale=4.0),
        )
        original = self.original

        def patched(_: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        self.patched = types.MethodType(patched, optimizer)

    def step(self) -> None:
        self.optimizer.step = self.patched
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = self.original


@pytest.mark.parametrize("first", ["ensemble", "accelerate"])
def test_a_wrapper_that_puts_the_step_back_which_it_found(first: str) -> None:
    net, optimizer = net_and_optimizer()
    made: dict[str, Any] = {}
    build = {
        "ensemble": lambda: hdet.Ensemble(optimizer),
        "accelerate": lambda: AcceleratesOptimizer(optimizer),
    }
    for name in sorted(build, key=lambda name: name != first):
        made[name] = build[name]()

    def backward() -> None:
        optimizer.zero_grad()
        made["accelerate"].scaler.scale(net(torch.ones(2, 3)).square().mean()).backward()

    backward()
    if first == "accelerate":
        with pytest.raises(RuntimeError, match=PAST):
            made["accelerate"].step()
        return
    for _ in range(3):
        made["accelerate"].step()
        made["ensemble"].step()
        backward()
    assert made["ensemble"].engine.step == 3
    made["ensemble"].close()
    made["accelerate"].step()


# -- one after the other -----------------------------------------------------------------------------------------------------


def depth(optimizer: Any) -> int:
    count, step = 0, optimizer.step
    while hasattr(step, "__wrapped__"):
        count, step = count + 1, step.__wrapped__
    return count


def test_close_takes_the_wrapper_off() -> None:
    _, optimizer = net_and_optimizer()
    before, own = depth(optimizer), through_a_profiler(optimizer)
    ensemble = hdet.Ensemble(optimizer)
    assert optimizer.step is not own
    ensemble.close()
    assert optimizer.step is own
    del optimizer.step
    hdet.Ensemble(optimizer).close()
    assert "step" not in vars(optimizer) and depth(optimizer) == before


def make_ensemble(optimizer: Any) -> Callable[[], None]:
    return hdet.Ensemble(optimizer).close


def make_drop_in(optimizer: Any) -> Callable[[], None]:
    return hdet.OneCycleAutoLR(optimizer, 0.1, 1000, cycle_momentum=False).close


def make_with_a_scheduler_on_top(optimizer: Any) -> Callable[[], None]:
    close = hdet.Ensemble(optimizer).close
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return close


@pytest.mark.parametrize("make", [make_ensemble, make_drop_in, make_with_a_scheduler_on_top])
def test_an_optimizer_outlives_any_number_of_ensembles(
    make: Callable[[Any], Callable[[], None]],
) -> None:
    net, optimizer = net_and_optimizer()
    deepest = 0
    for _ in range(50):
        make(optimizer)()
        deepest = max(deepest, depth(optimizer))
    assert deepest <= 4
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble = hdet.Ensemble(optimizer)
    train(net, optimizer, ensemble, optimizer.step)
    assert ensemble.engine.step == 1


def test_a_step_that_was_captured_under_one_ensemble_serves_the_next() -> None:
    net, optimizer = net_and_optimizer()
    first = hdet.Ensemble(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1000)  # holds on to the wrapper
    step = optimizer.step
    first.close()
    second = hdet.Ensemble(optimizer)
    for way in (step, optimizer.step):
        train(net, optimizer, second, way)
    assert second.engine.step == 2 and first.engine.step == 0
