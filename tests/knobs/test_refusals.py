"""What is refused when an Ensemble is made, by name and with the way out."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet import (
    Betas,
    ClipNorm,
    Dropout,
    GroupValue,
    LabelSmoothing,
    LearningRate,
    LossWeights,
    Scalar,
    Temperature,
    WeightDecay,
)

from .helpers import LOCAL, Net, adamw, ensemble, groups_of
from .table import eps, probe_of

X = partial(Scalar, "x")


def test_moments_are_a_choice_only_where_they_differ() -> None:
    with pytest.raises(ValueError, match="with gradients='shared' they are equal on all replicas"):
        ensemble(Net(), [LearningRate(), eps(), WeightDecay()], moments="average")


@pytest.mark.parametrize(("make", "coupled"), [
    (torch.optim.Adam, True), (torch.optim.AdamW, False), (torch.optim.RMSprop, True),
    (torch.optim.NAdam, True), (torch.optim.SGD, False),
    (partial(torch.optim.SGD, momentum=0.9), True),
    (partial(torch.optim.Adam, decoupled_weight_decay=True), False), (hdet.FusedAdam, True),
    (hdet.FusedAdamW, False), (hdet.FusedLion, False), (partial(hdet.FusedSGD, momentum=0.9), True),
    (partial(hdet.FusedSGD, lr=0.1), False), (hdet.FusedScheduleFreeAdamW, False),
])  # fmt: skip
def test_decay_that_is_part_of_the_gradient_makes_moments_diverge(make: Any, coupled: bool) -> None:
    net = Net()
    if coupled:
        with pytest.raises(ValueError, match="'weight_decay' differ in their moments"):
            ensemble(net, [WeightDecay()], optimizer=make(groups_of(net)))
    given = {"moments": "average"} if coupled else {}
    assert ensemble(net, [WeightDecay()], optimizer=make(groups_of(net)), **given).multipliers


def several(count: int) -> list[Any]:
    return [Scalar(f"k{i}", value=1.0, valid_on_train_loss=True) for i in range(count)]


def test_more_knobs_than_replicas_can_tell_apart_are_refused_for_controllers_that_regress() -> None:
    net = Net()
    regresses, given = {"controller": probe_of(net)}, {"count": 4, **LOCAL}
    ensemble(net, several(3), **regresses, **given)
    says = r"4 replicas can tell at most 3 knobs apart, got 4 \(k0, k1, k2, k3\): use more replica"
    with pytest.raises(ValueError, match=says):
        ensemble(net, several(4), **regresses, **given)
    ensemble(net, several(4), controller=hdet.SoftmaxController(decay=None), **given)
    knobs = [LearningRate(0.2), eps(0.0)]  # nor can one without a spread be told
    with pytest.raises(ValueError, match="the knob 'eps' has spread 0.*leave it out"):
        ensemble(net, knobs, **regresses)
    ensemble(net, knobs, controller=hdet.SoftmaxController(decay=None))
    ensemble(net, [LearningRate(0.0)], **regresses)


@pytest.mark.parametrize(("knobs", "count", "asked", "found"), [
    (1, 8, None, "permutation"), (2, 8, None, "orthogonal"), (2, 8, "permutation", "permutation"),
    (1, 8, "orthogonal", "orthogonal"), (4, 4, None, "permutation"),
    (2, 6, None, "permutation"),
    (4, 4, "orthogonal", "design is 'orthogonal', but there are 4 replicas for 4 knobs: it needs"),
    (2, 6, "orthogonal", "design is 'orthogonal', but there are 6 replicas.*a power of two"),
    (1, 8, "latin", "design must be 'permutation', 'orthogonal' or None, got 'latin'"),
])  # fmt: skip
def test_which_design_is_taken(knobs: int, count: int, asked: str | None, found: str) -> None:
    given = {"count": count, **LOCAL, **({"design": asked} if asked else {})}
    if "design" in found:
        with pytest.raises(ValueError, match=found):
            ensemble(Net(), several(knobs), **given)
    else:
        assert ensemble(Net(), several(knobs), **given)._engine.design == found


@pytest.mark.parametrize("grid", [{"ratio": 2}, {"multipliers": [0.5, 1]}])
def test_what_is_no_spread_is_tried_beside_other_knobs(grid: Any) -> None:
    """The orthogonal design, which two knobs have else, would leave all replicas at 1."""
    made = ensemble(Net(), [LearningRate(**grid), eps(0.3)], count=8, **LOCAL)._engine
    assert made.design == "permutation"
    assert all(len(set(row)) > 1 for row in made.multipliers())


@pytest.mark.parametrize("max_lr", [0.0, -0.1, [0.1, -0.1]])
def test_the_drop_in_refuses_a_peak_that_is_not_above_zero(max_lr: Any) -> None:
    """Else it would train uphill."""
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in "ab"]
    optimizer = torch.optim.SGD(groups, lr=0.3)
    with pytest.raises(ValueError, match="max_lr must be above 0"):
        hdet.OneCycleAutoLR(optimizer, max_lr, 10)
    assert [set(group) & {"max_lr"} for group in optimizer.param_groups] == [set()] * 2


def test_the_drop_in_refuses_knobs() -> None:
    with pytest.raises(TypeError, match=r"has one knob.* use hdet.Ensemble\(optimizer, OneCycleLR"):
        hdet.OneCycleAutoLR(torch.optim.SGD(Net().parameters(), 0.1), 0.1, 10, knobs=[LOW])


def test_the_drop_in_keeps_permutations() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in "ab"], lr=0.1)
    schedule = hdet.OneCycleAutoLR(
        optimizer, 0.1, 10, enable_auto_lr=True, auto_lr_warmup_steps=1,
        ensemble_lr_spread_ratio=0.1, replicas=hdet.Replicas(0, 8, None),
    )  # fmt: skip
    assert len(schedule.ensemble.knobs) == 2 and schedule.ensemble._engine.design == "permutation"


@pytest.mark.parametrize(("knob", "message"), [
    (X, "needs get and set"),
    (lambda: X(get=lambda: 1.0), "needs get and set"),
    (lambda: X(value=1.0, scale="cubic"), "scale must be"),
    (lambda: X(value=1.0, scale="linear"), "unit of 'x' is None"),
    (lambda: X(value=1.0, scale="horizon"), "scale must be 'log' or 'linear'"),
    (lambda: GroupValue("x", scale="linear"), "scale must be None, 'log' or 'horizon'"),
    (lambda: X(value=1.0, unit=2.0), "the log scale has none"),
    (lambda: X(value=1.0, bounds=(2.0, 1.0)), "low < high"),
    (lambda: X(value=1.0, bounds=3.0), "bounds must be"),
    (lambda: X(value=1.0, spread=1.0), "spread must be a number"),
    (lambda: LearningRate(values=[1e-3]), r"values must be a list .* got \[0.001\]"),
    (lambda: LearningRate(values=1e-3), "values must be a list .* got 0.001"),
    (lambda: Dropout(Net(), values=[0.1, 0.1]), "two of them different"),
    (lambda: eps(multipliers=[1.0, 0.0]), "multipliers must be a list of positive numbers"),
    (lambda: ClipNorm(ratio=1.0), r"ratio must be a number in \(1, inf\), got 1.0"),
    (lambda: LearningRate(0.2, ratio=5), "spread=0.2, ratio=5 are 2 grids of one knob"),
    (lambda: Betas(values=[0.9, 0.8], multipliers=[1, 2]), "are 2 grids of one knob"),
    (lambda: Betas(values=[0.9, 0.8]), "values=.* are those of one beta: say which"),
    (lambda: WeightDecay(product=True, bounds=(0.0, 1.0)), "bounds is .* with product=True"),
    (lambda: Betas(which=[2]), "which must list 0"),
    (lambda: GroupValue("lr"), "use hdet.LearningRate"),
    (lambda: GroupValue("betas"), "use hdet.Betas"),
    (lambda: eps(groups="all"), "groups must be None, 'each'"),
])  # fmt: skip
def test_arguments_that_make_no_knob(knob: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        knob()


DROPPED, TRAINED = Net(), Net()
TRAINED.temperature = nn.Parameter(torch.ones(()))  # type: ignore[assignment]


@pytest.mark.parametrize(("knobs", "message"), [
    ([X(value=0.0)], "x is 0, and scale='log' multiplies"),
    ([X(value=float("inf"))], "x is inf: begin with a finite number"),
    ([X(value=float("nan"), scale="linear", unit=1.0)], "x is nan: begin with a finite number"),
    ([Temperature(nn.Linear(1, 1), attribute="forward")], "forward is .*: begin with a finite"),
    ([Temperature(nn.BatchNorm1d(2), attribute="running_var")],
        r"running_var is tensor.*: begin with a finite number"),
    ([ClipNorm()], "AdamW has max_grad_norm None"),
    ([LearningRate(bounds=(0.1, 1.0))], "outside of its bounds"),
    ([WeightDecay(bounds=(1.0, 2.0))], "outside of its bounds"),
    ([eps(bounds=(0.0, 1e-9))], "outside of its bounds"),
    ([X(value=0.5, bounds=(0.6, 1.0))], "x is 0.5, outside of its bounds"),
    ([WeightDecay(groups=["last"])], "'last', which has no weight_decay to explore"),
    ([WeightDecay(groups=["drop"])],
        r"'drop', but the optimizer has the groups \['first', 'last'\]"),
    ([WeightDecay(product=True)], "no knob moves the rate of its groups: add a LearningRate"),
    ([LearningRate(groups=["last"]), WeightDecay(product=True)], "no knob moves the rate"),
    ([LabelSmoothing(nn.MSELoss())],
        "target must be an nn.CrossEntropyLoss or a number, got MSELoss"),
    ([LossWeights({"a": 1.0}, tasks=["b"])], "tasks names 'b'"),
    ([Temperature(nn.Linear(1, 1))], "no module of Linear has an attribute 'temperature'"),
    ([LabelSmoothing(0.1, scale="linear")], "unit of 'label_smoothing' is None"),
    ([X(value=1.0), X(value=2.0)], "different names"),
    ([Temperature(TRAINED)], "is a parameter, which the optimizer"),
    ([Dropout(DROPPED), Dropout(DROPPED, name="again")],
        "'dropout' and 'again' share one Dropout"),
])  # fmt: skip
def test_knobs_that_cannot_be_bound(knobs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble(Net(), knobs, **LOCAL)


@pytest.mark.parametrize(("knob", "message"), [
    (Betas(), "SGD have no 'betas', only lr, "),
    (eps(), "SGD have no 'eps', only lr, "),
    (GroupValue("rho"), "have no 'rho'"), (GroupValue("nesterov"), "begin above 0"),
    (GroupValue("dampening"), "begin above 0"),
    (WeightDecay(), "no parameter group has a weight_decay to.*begin above 0 .*trainers is 0"),
])  # fmt: skip
def test_an_optimizer_without_the_hyperparameter_is_named(knob: Any, message: str) -> None:
    net = Net()
    with pytest.raises(ValueError, match=message):
        ensemble(net, [knob], optimizer=torch.optim.SGD(net.parameters(), 0.1, 0.5))


RATE = partial(LearningRate, groups=["first"])
LOW, ODD = RATE(values=[0.01, 0.02]), RATE(values=[0.01, 0.02, 0.03])


@pytest.mark.parametrize(("knob", "settings", "message"), [
    (ODD, {}, "'lr/first' has 3 values or multipliers for 8 replicas: each .* a divisor of 8, or"),
    (ODD, {"count": 1}, "for 1 replica: .* start a multiple of 3 replicas"),
    (LearningRate(values=[0.01, 0.02]), {}, "stands at 0.01, 0.02 in .*multipliers=.*'each'"),
    (RATE(values=[0.01, 0]), {}, r"values \[0.01, 0\], and 0 cannot be reached from .* 0.01"),
    (RATE(values=[0.01, 0.02], bounds=(0.0, 0.015)), {}, "0.02 cannot be .*within bounds"),
    (X(value=0.1, scale="linear", unit=0.1, values=[0.0, 0.1]), LOCAL, "a unit below the base"),
    (LOW, {"search": True}, "a search will move its base value.*multipliers="),
    (LOW, {"design": "orthogonal"}, "'orthogonal', which knows spreads only: give 'lr/first' a sp"),
    (RATE(ratio=2), {"converge": hdet.converge.ExactLocal(), **LOCAL}, "'lr/first' needs a spread"),
    (LOW, {"controller": True}, "'ProbeController' takes the slope .* use BestValueController"),
])  # fmt: skip
def test_grids_that_do_not_fit_the_run(knob: Any, settings: Any, message: str) -> None:
    net = Net()
    made = {"search": hdet.AutoLR, "controller": probe_of}
    given = {key: made[key](net) if key in made else value for key, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        ensemble(net, [knob], **given)


def test_a_decay_that_leaves_the_schedule_is_for_rates() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.param_groups[0]["min_eps"] = 1e-12
    says = "decay='floor' takes the place of a rate's schedule.*'eps'"
    with pytest.raises(ValueError, match=says):
        controller = hdet.SoftmaxController(decay="floor")
        ensemble(net, [eps()], optimizer=optimizer, controller=controller, total_steps=100)


@pytest.mark.parametrize(("knob", "count", "message"), [
    (LearningRate(groups="each"), 4, ""), (LearningRate(groups="each"), 3, ""),
    (WeightDecay(), 4, "ExactLocal.*'weight_decay'"),
    (LearningRate(bounds=(0.0, 1.0)), 4, "ExactLocal.*'lr'"),
])  # fmt: skip
def test_the_exact_local_mean_is_of_rates_alone(knob, count, message) -> None:
    net, way = Net(), hdet.converge.ExactLocal()
    optimizer = adamw(net, hdet.FusedAdamW, decay_at="base")
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        ensemble(net, [knob], optimizer=optimizer, count=count, converge=way)
