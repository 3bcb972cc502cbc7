"""Knobs that act inside optimizer.step(): their values there, at rest, after errors, under corrections; stock and fused optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet

from .helpers import Given, Net, Pretend, Scripted, adamw, backward, ensemble, seen_in_step

OPTIMIZERS = {"stock": torch.optim.AdamW, "fused": hdet.FusedAdamW}
both = pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def weights(net: Net) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


@both
@pytest.mark.parametrize("index", range(4))
def test_decay_betas_and_eps_have_the_replicas_values_inside_the_step_only(kind: Any, index: int) -> None:
    net = Net()
    optimizer = adamw(net, kind)
    knobs = [hdet.WeightDecay(0.5), hdet.Betas(0.4), hdet.Eps(0.9)]
    run = ensemble(net, knobs, optimizer=optimizer, index=index, moments="average")
    before, rho = settings_of(optimizer), run.multipliers
    assert set(rho) == {"weight_decay", "beta1", "beta2", "eps"}
    assert [abs(rho[name] - 1) for name in ("weight_decay", "beta1", "eps")] == pytest.approx([0.5, 0.4, 0.9])
    seen = seen_in_step(optimizer, settings_of)
    backward(net)
    optimizer.step()
    first, last = seen[0]
    assert first["weight_decay"] == 0.1 * rho["weight_decay"] and last["weight_decay"] == 0.0
    for group in (first, last):
        assert group["eps"] == 1e-8 * rho["eps"]
        assert group["betas"] == pytest.approx((1 - 0.1 / rho["beta1"], 1 - 0.001 / rho["beta2"]), rel=1e-12)
        assert group["lr"] == before[0 if group is first else 1]["lr"]
    assert settings_of(optimizer) == before


@both
def test_a_step_is_that_of_an_optimizer_with_these_values(kind: Any) -> None:
    """Not only param_groups: the parameters after three steps are those of an optimizer that was given them."""
    net, twin = Net(), Net()
    optimizer = adamw(net, kind)
    run = ensemble(
        net, [hdet.LearningRate(0.3), hdet.WeightDecay(0.5), hdet.Betas(0.4), hdet.Eps(0.9)], optimizer=optimizer, moments="reset"
    )
    rho = run.multipliers
    other = adamw(twin, kind)
    for group in other.param_groups:
        group["lr"] *= rho["lr"]
        group["weight_decay"] *= rho["weight_decay"]
        group["eps"] *= rho["eps"]
        group["betas"] = (1 - (1 - 0.9) / rho["beta1"], 1 - (1 - 0.999) / rho["beta2"])
    torch.manual_seed(1)
    for step in range(3):
        backward(net, step)
        optimizer.step()
        run.step()
        optimizer.zero_grad()
    torch.manual_seed(1)
    for step in range(3):
        backward(twin, step)
        other.step()
        other.zero_grad()
    assert torch.allclose(weights(net), weights(twin), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(weights(net), weights(Net()), atol=1e-3)


@both
def test_an_error_inside_the_step_leaves_base_values(kind: Any) -> None:
    net = Net()
    optimizer = adamw(net, kind)
    ensemble(net, [hdet.WeightDecay(0.5), hdet.Betas(0.4)], optimizer=optimizer, moments="average")
    before = settings_of(optimizer)

    def closure() -> float:
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        optimizer.step(closure)
    assert settings_of(optimizer) == before


def test_decay_is_a_knob_of_each_group_that_has_one() -> None:
    net = Net()
    assert list(ensemble(net, [hdet.WeightDecay(groups="each")]).multipliers) == ["weight_decay/first"]
    assert list(ensemble(net, [hdet.WeightDecay(groups=["first"])]).multipliers) == ["weight_decay/first"]
    with pytest.raises(ValueError, match="'last', which has no weight_decay to explore"):
        ensemble(net, [hdet.WeightDecay(groups=["last"])])
    with pytest.raises(ValueError, match=r"'drop', but the optimizer has the groups \['first', 'last'\]"):
        ensemble(net, [hdet.WeightDecay(groups=["drop"])])
    with pytest.raises(ValueError, match="no parameter group has a weight_decay to explore"):
        ensemble(net, [hdet.WeightDecay()], optimizer=torch.optim.AdamW(net.parameters(), weight_decay=0.0))


# -- rate x decay ------------------------------------------------------------------------------------------------------------


@both
def test_the_product_of_rate_and_decay_moves_by_the_decays_multiplier_alone(kind: Any) -> None:
    for rate, decay in ((1.3, 0.5), (0.7, 1.5)):
        net = Net()
        optimizer = adamw(net, kind)
        run = ensemble(
            net, [hdet.WeightDecay(0.5, product=True), hdet.LearningRate(0.3)], optimizer=optimizer, controller=Given(rate, decay)
        )
        seen = seen_in_step(optimizer, settings_of)
        backward(net)
        optimizer.step()
        assert seen[0][0]["lr"] == pytest.approx(
            0.01 * (rate if kind is torch.optim.AdamW else 1.0)
        )  # a fused step multiplies the rate itself
        assert seen[0][0]["weight_decay"] == pytest.approx(0.1 * decay / rate)
        # as if a cycle had ended with these decisions
        run.engine.corrections = [3.0, 0.5]
        run.schedule.write(run.engine)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.1 * 0.5 / 3.0)
        assert run.values() == pytest.approx({"lr": 0.03, "weight_decay": 0.1 * 0.5 / 3.0})
        optimizer.step()
        assert seen[1][0]["weight_decay"] * optimizer.param_groups[0]["lr"] * rate == pytest.approx(0.1 * 0.01 * 0.5 * decay)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.1 * 0.5 / 3.0)


def test_a_replica_shrinks_weights_by_the_product_alone() -> None:
    """Gradients of zero: AdamW's step is the decay, whatever the rate's multiplier is."""
    for kind in OPTIMIZERS.values():
        left = []
        for rho in (0.7, 1.3):
            net = Net()
            optimizer = adamw(net, kind)
            knobs = [hdet.WeightDecay(0.5, product=True), hdet.LearningRate(0.3)]
            ensemble(net, knobs, optimizer=optimizer, controller=Given(rho, 1.5))
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
            before = net.first.weight.detach().clone()
            optimizer.step()
            left.append((net.first.weight.detach() / before).mean().item())
        assert left == pytest.approx([1 - 0.01 * 0.1 * 1.5] * 2, abs=1e-7)


def test_decay_at_the_base_rate_is_not_divided_by_the_replicas_rate() -> None:
    net = Net()
    optimizer = adamw(net, hdet.FusedAdamW, decay_at="base")
    knobs = [hdet.WeightDecay(0.5, product=True), hdet.LearningRate(0.3)]
    ensemble(net, knobs, optimizer=optimizer, controller=Given(0.7, 1.5))
    seen = seen_in_step(optimizer, settings_of)
    backward(net)
    optimizer.step()
    assert seen[0][0]["weight_decay"] == pytest.approx(0.1 * 1.5)


def test_each_groups_decay_follows_its_own_rate() -> None:
    net = Net()
    optimizer = torch.optim.AdamW([{**group, "weight_decay": 0.1} for group in adamw(net).param_groups], lr=0.01)
    run = ensemble(net, [hdet.LearningRate(0.3, groups="each"), hdet.WeightDecay(0.5, product=True)], optimizer=optimizer)
    run.engine.corrections = [2.0, 4.0, 1.0]
    run.schedule.write(run.engine)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [pytest.approx(0.05), pytest.approx(0.025)]


# -- bounds ------------------------------------------------------------------------------------------------------------------


@both
def test_bounds_hold_base_values_and_replicas_values_of_rates(kind: Any) -> None:
    for rho, factor, base, used in ((1.5, 1.0, 0.01, 0.012), (0.5, 1.0, 0.01, 0.005), (0.5, 0.1, 0.004, 0.004), (1.5, 9.0, 0.012, 0.012)):
        net = Net()
        optimizer = adamw(net, kind, lr=0.01)
        knob = hdet.LearningRate(0.5, groups=["first"], bounds=(0.004, 0.012))
        run = ensemble(net, [knob], optimizer=optimizer, controller=Given(rho))
        run.engine.corrections = [factor]
        run.schedule.write(run.engine)
        seen = seen_in_step(
            optimizer, lambda opt: opt.param_groups[0]["lr"] * (opt.multipliers[0][0] if hasattr(opt, "multipliers") else 1)
        )
        backward(net)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(base)
        assert seen[0] == pytest.approx(used)


@both
def test_a_rate_that_falls_within_a_cycle_leaves_its_bound_again(kind: Any) -> None:
    """A multiplier is held back for as long as the bound is near, step by step."""
    net = Net()
    optimizer = adamw(net, kind, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    knob = hdet.LearningRate(0.5, groups=["first"], bounds=(0.0, 0.012))
    run = hdet.Ensemble(optimizer, schedule, knobs=[knob], controller=Given(1.5), replicas=Pretend(), sync=hdet.Sync(1000))
    used = seen_in_step(optimizer, lambda opt: opt.param_groups[0]["lr"] * (opt.multipliers[0][0] if hasattr(opt, "multipliers") else 1))
    for _ in range(3):
        backward(net)
        optimizer.step()
        run.step()
    assert used == pytest.approx([0.012, 0.0075, 0.00375])


def test_betas_stay_below_one_whatever_the_correction() -> None:
    net = Net()
    run = ensemble(net, [hdet.Betas(0.5, which=[1])], moments="average")
    run.engine.corrections = [1e6]
    run.schedule.write(run.engine)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.99999)
    run.engine.corrections = [1e-6]
    run.schedule.write(run.engine)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.0)


@pytest.mark.parametrize(
    "knob",
    [lambda: hdet.LearningRate(bounds=(0.1, 1.0)), lambda: hdet.WeightDecay(bounds=(1.0, 2.0)), lambda: hdet.Eps(bounds=(0.0, 1e-9))],
)
def test_a_value_outside_of_its_bounds_is_refused(knob: Any) -> None:
    with pytest.raises(ValueError, match="outside of its bounds"):
        ensemble(Net(), [knob()])


# -- schedules, clipping, state ----------------------------------------------------------------------------------------------


def test_a_schedule_of_the_momentum_keeps_its_shape_under_a_correction() -> None:
    """OneCycleLR writes beta1; corrected values are never shown to it."""
    net, plain = Net(), Net()
    optimizer, other = adamw(net), adamw(plain)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one, 0.01, 20) for one in (optimizer, other)]
    run = hdet.Ensemble(optimizer, schedules[0], knobs=[hdet.Betas(0.0, which=[0])], sync=hdet.Sync(1000))
    run.engine.corrections = [2.0]
    for _ in range(8):
        for one, its in ((net, optimizer), (plain, other)):
            backward(one)
            its.step()
        run.step()
        schedules[1].step()
        scheduled = other.param_groups[0]["betas"][0]
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(1 - (1 - scheduled) / 2)
        assert optimizer.param_groups[0]["betas"][1] == 0.999


def test_clipping_inside_a_fused_step_takes_the_replicas_norm() -> None:
    net = Net()
    optimizer = adamw(net, hdet.FusedAdamW, max_grad_norm=0.5)
    run = ensemble(net, [hdet.ClipNorm(spread=0.4)], optimizer=optimizer, moments="reset")
    seen = seen_in_step(optimizer, lambda opt: opt.max_grad_norm)
    backward(net)
    optimizer.step()
    assert seen == [0.5 * run.multipliers["clip_norm"]] != [0.5]
    assert optimizer.max_grad_norm == run.value("clip_norm") == 0.5


@both
def test_states_hold_base_values_and_load(kind: Any) -> None:
    def make() -> tuple[Any, hdet.Ensemble]:
        net = Net()
        optimizer = adamw(net, kind)
        return optimizer, ensemble(
            net, [hdet.WeightDecay(0.5), hdet.Betas(0.4)], optimizer=optimizer, moments="average", controller=Scripted(2.0, 2.0, 2.0)
        )

    optimizer, run = make()
    run.engine.corrections = [2.0, 2.0, 0.5]
    run.schedule.write(run.engine)
    state, saved = run.state_dict(), optimizer.state_dict()
    assert state["scheduled"] == {"weight_decay": [0.1], "beta1": [0.9, 0.9], "beta2": [0.999, 0.999]}
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.2, 0.0]
    assert saved["param_groups"][0]["betas"] == pytest.approx((0.95, 0.998))
    for order in ((0, 1), (1, 0)):
        other, resumed = make()
        loads = [(other, saved), (resumed, state)]
        for part in order:
            loads[part][0].load_state_dict(loads[part][1])
        assert resumed.values() == run.values()
        assert settings_of(other) == settings_of(optimizer)
        resumed.step()
        assert settings_of(other) == settings_of(optimizer)


# -- any number of the groups ------------------------------------------------------------------------------------------------


def test_any_number_of_the_groups_is_a_knob() -> None:
    """SGD's momentum: a memory of 2 steps becomes one of 2.5 inside of the step, and never infinite; the base value at rest."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["momentum"]))
    run = hdet.Ensemble(
        optimizer,
        knobs=[hdet.GroupValue("momentum", 0.25, valid_on_train_loss=True)],
        controller=Given(1.25),
        replicas=Pretend(0, 2),
        sync=hdet.Sync(moments="average"),
    )
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["momentum"]))
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert seen[-1] == pytest.approx(0.6) and optimizer.param_groups[0]["momentum"] == 0.5
    assert run.values() == {"momentum": 0.5}


@pytest.mark.parametrize(
    ("key", "message"),
    [("lr", "use hdet.LearningRate"), ("betas", "use hdet.Betas"), ("weight_decay", "use hdet.WeightDecay"), ("", "key must be the name"), (3, "key must")],
)  # fmt: skip
def test_what_has_a_knob_of_its_own_is_not_a_value_of_the_groups(key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hdet.GroupValue(key)


@pytest.mark.parametrize(("key", "message"), [("rho", "have no 'rho'"), ("nesterov", "which is no number"), ("dampening", "begin above 0")])
def test_values_of_the_groups_that_cannot_be_multiplied_are_refused(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hdet.GroupValue(key).bind(torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.5))


def test_another_value_of_the_groups_is_multiplied() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1, dampening=0.2)
    (knob,) = hdet.GroupValue("dampening", bounds=(0.1, 0.5)).bind(optimizer)
    with knob.fanned_out(1.5):
        assert optimizer.param_groups[0]["dampening"] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="scale of 'dampening' must be"):
        hdet.GroupValue("dampening", scale="linear")


def test_a_value_of_a_module_is_a_scalar() -> None:
    net = Net()
    (knob,) = hdet.ModuleValue("temperature", lambda: net.temperature, lambda x: setattr(net, "temperature", x), 0.2).bind(
        torch.optim.SGD(net.parameters(), lr=0.1)
    )
    assert knob.name == "temperature" and knob.spread == 0.2 and knob.value() == 2.0
