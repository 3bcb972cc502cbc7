"""What is refused when an Ensemble is made, by name and with the way out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from hdet.knobs import BoundKnob, Meaning, of_model, of_optimizer
from hdet.knobs.cells import item_cell

from .helpers import LOCAL, Net, adamw, ensemble, groups_of


def probe_of(net: Net, **settings: Any) -> hdet.ProbeController:
    mean = lambda model, x: model(x).mean()
    return hdet.ProbeController(mean, [torch.ones(2, 4)] * 8, model=net, **settings)


X = partial(Scalar, "x")
eps = partial(GroupValue, "eps", valid_on_train_loss=True, moments_diverge=False)
VALID, DIVERGE = "valid_on_train_loss", "parts_moments"
LOSS = nn.CrossEntropyLoss(label_smoothing=0.1)
KNOBS: dict[str, tuple[Callable[[Net], Any], set[str]]] = {
    # name: (knob, what it says of itself)
    "silent": (lambda net: Silent(), set()), "lr": (lambda net: LearningRate(), {VALID}),
    "weight_decay": (lambda net: WeightDecay(), set()),
    "beta2": (lambda net: Betas(which=[1]), {VALID, DIVERGE}), "eps": (lambda net: eps(), {VALID}),
    "eps2": (lambda net: GroupValue("eps2"), {DIVERGE}),
    "valid eps2": (lambda net: GroupValue("eps2", valid_on_train_loss=True), {VALID, DIVERGE}),
    "clip_norm": (lambda net: ClipNorm(), {VALID, DIVERGE}),
    "silent of gradients": (lambda net: Silent(on_gradients=True), {DIVERGE, "on_gradients"}),
    "clip_norm of the loop": (lambda net: ClipNorm(1.0), {VALID, DIVERGE, "on_gradients"}),
    "mine": (lambda net: Scalar("mine", value=1.0), set()),
    "valid mine": (lambda net: Scalar("mine", value=1.0, valid_on_train_loss=True), {VALID}),
    "dropout": (lambda net: Dropout(net), set()),
    "label_smoothing": (lambda net: LabelSmoothing(0.1), set()),
    "label_smoothing of a loss": (lambda net: LabelSmoothing(LOSS), set()),
    "loss_weight/a": (lambda net: LossWeights({"a": 1.0}), set()),
    "temperature": (lambda net: Temperature(net), {VALID, "affects_eval_loss"}),
}  # fmt: skip
FORWARD = [
    "silent", "mine", "valid mine", "dropout", "label_smoothing", "label_smoothing of a loss",
    "loss_weight/a",
]  # fmt: skip


def said_by(*flags: str, absent: bool = False) -> Any:
    """All knobs of which the flags are said, or are not."""
    names = [name for name in KNOBS if absent is not ({*flags} <= KNOBS[name][1])]
    return pytest.mark.parametrize("name", names)


def knob_of(name: str) -> tuple[Net, Any, dict[str, Any]]:
    """A model, the knob, and other settings of an Ensemble that explores it."""
    net = Net()
    optimizer = adamw(net, hdet.FusedAdamW, max_grad_norm=1.0)
    for group in optimizer.param_groups:
        group["eps2"] = 0.5
    return net, KNOBS[name][0](net), {"optimizer": optimizer, **LOCAL}


def title(name: str) -> str:
    """The knob's own."""
    return name.removeprefix("valid ").split(" of ")[0]


class Silent:
    """A third party's, which forgets to say what it is: nothing is taken for granted."""

    def __init__(self, **flags: bool) -> None:
        self.flags = flags

    def bind(self, optimizer: torch.optim.Optimizer) -> list[BoundKnob]:
        cells = [item_cell({"x": 1.0}, "x")]
        return [BoundKnob("silent", 0.3, cells, meaning=Meaning("forward", **self.flags))]


@pytest.mark.parametrize("name", KNOBS)
def test_what_each_knob_says_of_itself(name: str) -> None:
    _, knob, settings = knob_of(name)
    for bound in knob.bind(settings["optimizer"]):
        known = (VALID, "affects_eval_loss", "on_gradients", DIVERGE)
        assert {flag for flag in known if getattr(bound.meaning, flag)} == KNOBS[name][1]


def test_every_knob_is_in_the_table() -> None:
    listed = {type(make(Net())).__name__ for make, _ in KNOBS.values()}
    assert {*of_model.__all__, *of_optimizer.__all__} <= listed


@pytest.mark.parametrize("name", [name for name in KNOBS if "silent" not in name])
def test_every_knob_takes_another_grid(name: str) -> None:
    _, knob, settings = knob_of(name)
    given = {"values": [0.1, 0.2], "multipliers": [1.0, 2.0], "ratio": 2.0}
    for grid, value in given.items():
        for bound in replace(knob, **{grid: value}).bind(settings["optimizer"]):
            assert getattr(bound.grid, grid) in (value, tuple(given["values"]), (1.0, 2.0))
            assert bound.grid.spread == 0
    with pytest.raises(ValueError, match="grids of one knob"):
        replace(knob, spread=0.01, ratio=2.0).bind(settings["optimizer"])


@said_by(VALID, absent=True)
def test_knobs_that_regularise_need_a_held_out_probe(name: str) -> None:
    softmax = hdet.SoftmaxController(decay=None)
    for make in (lambda net: softmax, probe_of):
        net, knob, settings = knob_of(name)
        controller = make(net)
        says = f"prefers less of the knob '{title(name)}'.*'{controller.name}'"
        with pytest.raises(ValueError, match=f"{says}.*held_out=True.*may_move"):
            ensemble(net, [knob], controller=controller, **settings)
        assert "step" not in settings["optimizer"].__dict__
    for make in (lambda net: probe_of(net, held_out=True), lambda net: None):
        net, knob, settings = knob_of(name)
        ensemble(net, [knob], controller=make(net), **settings)


@said_by(VALID)
def test_the_others_may_be_judged_by_training_losses(name: str) -> None:
    net, knob, settings = knob_of(name)
    run = ensemble(net, [knob], controller=hdet.SoftmaxController(decay=None), **settings)
    assert title(name) in run.multipliers


@pytest.mark.parametrize("name", FORWARD)
def test_with_shared_gradients_what_acts_in_the_forward_pass_makes_no_difference(name: str) -> None:
    net, knob, _ = knob_of(name)
    says = f"'{title(name)}' acts in the forward pass, but with gradients='shared'"
    with pytest.raises(ValueError, match=f"{says}.*gradients='local'"):
        ensemble(net, [knob], controller=probe_of(net, held_out=True))
    knobs = [Temperature(net), WeightDecay()]  # but a temperature is scored directly
    run = ensemble(net, knobs, controller=probe_of(net, held_out=True))
    assert list(run.multipliers) == ["temperature", "weight_decay"]


@said_by(DIVERGE)
def test_what_makes_moments_diverge_needs_a_choice_of_moments(name: str) -> None:
    says = f"but replicas that differ in '{title(name)}' differ in their moments"
    for moments in (None, "keep", "forget", "average", "reset"):
        net, knob, settings = knob_of(name)
        given = {"optimizer": settings["optimizer"], "moments": moments}
        if moments in ("average", "reset"):
            assert title(name) in ensemble(net, [knob], **given).multipliers
        else:
            with pytest.raises(ValueError, match=f"moments is {moments!r}, {says}"):
                ensemble(net, [knob], **given)


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


@pytest.mark.parametrize("knob", [
    WeightDecay(), Betas(), eps(), ClipNorm(), ClipNorm(1.0),
    X(value=1.0),
])  # fmt: skip
def test_co_resident_replicas_differ_in_rates_and_in_what_is_scored_directly_only(knob) -> None:
    net = Net()
    optimizer = adamw(net, hdet.FusedAdamW, max_grad_norm=1.0)
    replicas = hdet.CoresidentReplicas(net, 4)
    says = "co-resident replicas.*one process per replica|gradients='local'"
    with pytest.raises(ValueError, match=says):
        hdet.Ensemble(optimizer, knobs=[knob], replicas=replicas)


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


@pytest.mark.parametrize("max_lr", [0.0, -0.1, [0.1, -0.1]])
def test_the_drop_in_refuses_a_peak_that_is_not_above_zero(max_lr: Any) -> None:
    """Else it would train uphill."""
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in "ab"]
    optimizer = torch.optim.SGD(groups, lr=0.3)
    with pytest.raises(ValueError, match="max_lr must be above 0"):
        hdet.OneCycleAutoLR(optimizer, max_lr, 10)
    assert [set(group) & {"max_lr"} for group in optimizer.param_groups] == [set()] * 2


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
