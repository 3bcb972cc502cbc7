"""Knobs that act inside optimizer.step(), stock and fused: values there, at rest, after errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from tests.harness import force

from .helpers import Net, adamw, backward, ensemble, given, seen_in_step

OPTIMIZERS = {"stock": torch.optim.AdamW, "fused": hdet.FusedAdamW}
both = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]


def weights(net: Net) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


def step(net: Net, optimizer: Any, read: Any = settings_of) -> Any:
    """What ``read(optimizer)`` gives inside of a step."""
    seen = seen_in_step(optimizer, read)
    backward(net)
    optimizer.step()
    return seen[0]


@both
def test_a_step_is_that_of_an_optimizer_that_was_given_the_replicas_values(kind: Any) -> None:
    net, twin = Net(), Net()
    optimizer, other = adamw(net, kind), adamw(twin, kind)
    rho = [1.3, 0.5, 1.4, 0.6, 1.9]
    knobs = [hdet.LearningRate(), hdet.WeightDecay(), hdet.Betas(), hdet.GroupValue("eps")]
    run = ensemble(net, knobs, optimizer=optimizer, controller=given(*rho), moments="average")
    assert list(run.multipliers) == ["lr", "weight_decay", "beta1", "beta2", "eps"]
    for group in other.param_groups:
        for name, i in (("lr", 0), ("weight_decay", 1), ("eps", 4)):
            group[name] *= rho[i]
        group["betas"] = (1 - (1 - 0.9) / rho[2], 1 - (1 - 0.999) / rho[3])
    for one, its in ((net, optimizer), (twin, other)):
        torch.manual_seed(1)  # of dropout
        for number in range(3):
            backward(one, number)
            its.step()
            its.zero_grad()
    assert torch.allclose(weights(net), weights(twin), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(weights(net), weights(Net()), atol=1e-3)


def product(kind: Any, *multipliers: float, **settings: Any) -> tuple[Net, Any, hdet.Ensemble]:
    """Under multipliers of rate and decay."""
    net = Net()
    optimizer = adamw(net, kind, **settings)
    knobs = [hdet.WeightDecay(0.5, product=True), hdet.LearningRate(0.3)]
    return net, optimizer, ensemble(net, knobs, optimizer=optimizer, controller=given(*multipliers))


@both
@pytest.mark.parametrize(("rate", "decay"), [(1.3, 0.5), (0.7, 1.5)])
def test_the_product_of_rate_and_decay_moves_by_the_decays_multiplier_alone(
    kind: Any, rate: float, decay: float
) -> None:
    net, optimizer, run = product(kind, rate, decay)
    inside = step(net, optimizer)[0]
    # a fused step multiplies the rate itself
    used = rate if kind is torch.optim.AdamW else 1.0
    assert inside["lr"] == pytest.approx(0.01 * used)
    assert inside["weight_decay"] == pytest.approx(0.1 * decay / rate)
    force(run, 3.0, 0.5)
    assert run.values() == pytest.approx({"lr": 0.03, "weight_decay": 0.1 * 0.5 / 3.0})
    inside = step(net, optimizer)[0]
    base = optimizer.param_groups[0]
    acts = inside["weight_decay"] * base["lr"] * rate
    assert acts == pytest.approx(0.1 * 0.01 * 0.5 * decay)
    assert (base["lr"], base["weight_decay"]) == pytest.approx((0.03, 0.1 * 0.5 / 3.0))


def test_decay_at_the_base_rate_is_not_divided_by_the_replicas_rate() -> None:
    net, optimizer, _ = product(hdet.FusedAdamW, 0.7, 1.5, decay_at="base")
    assert step(net, optimizer)[0]["weight_decay"] == pytest.approx(0.1 * 1.5)


FIRST = {"spread": 0.3, "groups": ["first"]}


@pytest.mark.parametrize(("rate", "corrections", "decays"), [
    ({"spread": 0.3, "groups": "each"}, (2.0, 4.0), [0.05, 0.025]), (FIRST, (2.0,), [0.05, 0.1]),
    ({**FIRST, "bounds": (0.0, 0.012)}, (9.0,), [0.1 / 1.2, 0.1]),
])  # fmt: skip
def test_each_groups_decay_follows_its_own_rate(
    rate: dict[str, Any], corrections: tuple[float, ...], decays: list[float]
) -> None:
    """As far as bounds let it, and not at all where no knob moves it."""
    net = Net()
    groups = [{**group, "weight_decay": 0.1} for group in adamw(net).param_groups]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    knobs = [hdet.LearningRate(**rate), hdet.WeightDecay(0.5, product=True)]
    run = ensemble(net, knobs, optimizer=optimizer)
    force(run, *corrections, 1.0)
    found = lambda: [group["weight_decay"] for group in optimizer.param_groups]
    assert found() == pytest.approx(decays)
    run.set_value("weight_decay", 0.04)
    assert found() == pytest.approx([0.04, 0.04 * decays[1] / decays[0]])


def rate_in_step(optimizer: Any) -> float:
    """Fused optimizers multiply it themselves."""
    rho = optimizer.multipliers[0][0] if hasattr(optimizer, "multipliers") else 1
    return optimizer.param_groups[0]["lr"] * rho


@both
@pytest.mark.parametrize("index", range(4))
def test_a_replica_steps_at_one_of_the_values_that_are_given(kind: Any, index: int) -> None:
    """At the peak of its schedule, which begins elsewhere; and at their ratio to it before."""
    net = Net()
    optimizer = adamw(net, kind, lr=0.005)
    values, lambdas = [0.01, 0.005, 0.001, 0.05], [lambda step: min(step + 1, 4) / 2] * 2
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas)
    knob = hdet.LearningRate(values=values, groups=["first"])
    run = ensemble(
        net, [knob], optimizer=optimizer, scheduler=scheduler, index=index, count=4, total_steps=9
    )
    used = []
    for _ in range(4):
        used.append(step(net, optimizer, rate_in_step))
        run.step(1.0)
    assert used[3] == pytest.approx(0.01 * run.multipliers["lr/first"])
    assert any(used[3] == pytest.approx(value) for value in values)
    assert used == pytest.approx([used[3] * part for part in (0.25, 0.5, 0.75, 1.0)])
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_values_are_those_of_a_peak_that_a_framework_tells_of() -> None:
    """It steps the scheduler itself, and the Ensemble knows of it only when it is made."""
    net = Net()
    optimizer, values = torch.optim.SGD(net.parameters(), lr=0.01), [0.04, 0.08]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step + 1, 4))
    knob = hdet.LearningRate(values=values)
    run = ensemble(net, [knob], optimizer=optimizer, count=2, total_steps=9)
    run.simulate([(scheduler, 1)])
    used = step(net, optimizer, rate_in_step)
    assert any(used == pytest.approx(value / 4) for value in values)


@both
@pytest.mark.parametrize(("rho", "factor", "base", "used"), [
    (1.5, 1.0, 0.01, 0.012), (0.5, 1.0, 0.01, 0.005), (0.5, 0.1, 0.004, 0.004),
    (1.5, 9.0, 0.012, 0.012),
])  # fmt: skip
def test_bounds_hold_base_values_and_replicas_values_of_rates(
    kind: Any, rho: float, factor: float, base: float, used: float
) -> None:
    net = Net()
    optimizer = adamw(net, kind, lr=0.01)
    knob = hdet.LearningRate(0.5, groups=["first"], bounds=(0.004, 0.012))
    run = ensemble(net, [knob], optimizer=optimizer, controller=given(rho))
    force(run, factor)
    assert step(net, optimizer, rate_in_step) == pytest.approx(used)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(base)


@both
def test_a_rate_that_falls_within_a_cycle_leaves_its_bound_again(kind: Any) -> None:
    """A multiplier is held back for as long as the bound is near, step by step."""
    net = Net()
    optimizer = adamw(net, kind, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    knob = hdet.LearningRate(0.5, groups=["first"], bounds=(0.0, 0.012))
    others = {"replicas": hdet.Replicas(0, 8, None), "sync": hdet.Sync(1000)}
    run = hdet.Ensemble(optimizer, schedule, knobs=[knob], controller=given(1.5), **others)
    used = seen_in_step(optimizer, rate_in_step)
    for _ in range(3):
        backward(net)
        optimizer.step()
        run.step()
    assert used == pytest.approx([0.012, 0.0075, 0.00375])


@pytest.mark.parametrize(("correction", "beta2"), [(1e6, 0.99999), (1e-6, 0.0)])
def test_betas_stay_below_one_whatever_the_correction(correction: float, beta2: float) -> None:
    run = ensemble(Net(), [hdet.Betas(0.5, which=[1])], moments="average")
    force(run, correction)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, beta2)


def test_any_number_of_the_groups_is_a_knob() -> None:
    """A memory of 2 steps becomes one of 2.5 inside of the step; another number is multiplied."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, dampening=0.2)
    knob = hdet.GroupValue("momentum", 0.25, valid_on_train_loss=True)
    run = ensemble(net, [knob], optimizer=optimizer, controller=given(1.25), moments="average")
    assert step(net, optimizer)[0]["momentum"] == pytest.approx(0.6)
    assert optimizer.param_groups[0]["momentum"] == 0.5 and run.values() == {"momentum": 0.5}
    (bound,) = hdet.GroupValue("dampening", bounds=(0.1, 0.5)).bind(optimizer)
    with bound.fanned_out(1.5):
        assert optimizer.param_groups[0]["dampening"] == pytest.approx(0.3)
