"""What is known of each knob that hdet ships, and of a third party's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from hdet.knobs import BoundKnob, Meaning
from hdet.knobs.cells import item_cell

from .helpers import LOCAL, Net, adamw

eps = partial(GroupValue, "eps", valid_on_train_loss=True, moments_diverge=False)
VALID, DIVERGE, SCORED = "valid_on_train_loss", "parts_moments", "affects_eval_loss"
REDUCED = "on_gradients"
LOSS, TASKS = nn.CrossEntropyLoss(label_smoothing=0.1), {"a": 1.0}


class Silent:
    """A third party's, which forgets to say what it is: nothing is taken for granted."""

    def __init__(self, **flags: bool) -> None:
        self.flags = flags

    def bind(self, optimizer: torch.optim.Optimizer) -> list[BoundKnob]:
        cells = [item_cell({"x": 1.0}, "x")]
        return [BoundKnob("silent", 0.3, cells, meaning=Meaning("forward", **self.flags))]


@dataclass
class KnobInfo:
    """
    Attributes:
        make: the knob, of a model.
        acts: "step" or "forward".
        said: the flags of `Meaning` that it has.
        base, used: its value at rest, and that of a replica with the multiplier 1.25.
        cell: where it is, of (model, optimizer); None: what the Ensemble says.
    """

    make: Callable[[Net], Any]
    acts: str
    said: set[str]
    base: float = 1.0
    used: float = 1.25
    cell: Callable[[Any, Any], float] | None = None


def group(key: str) -> Callable[[Any, Any], float]:
    return lambda net, optimizer: optimizer.param_groups[0][key]


STEP, FORWARD = "step", "forward"
KNOBS = {
    "silent": KnobInfo(lambda net: Silent(), FORWARD, set()),
    "lr": KnobInfo(
        lambda net: LearningRate(), STEP, {VALID}, 0.01, 0.0125, group("lr")
    ),
    "weight_decay": KnobInfo(
        lambda net: WeightDecay(), STEP, set(), 0.1, 0.125, group("weight_decay")
    ),
    "beta2": KnobInfo(
        lambda net: Betas(which=[1]), STEP, {VALID, DIVERGE}, 0.999, 0.9992,
        lambda net, opt: opt.param_groups[0]["betas"][1],
    ),
    "eps": KnobInfo(lambda net: eps(), STEP, {VALID}, 1e-8, 1.25e-8, group("eps")),
    "eps2": KnobInfo(lambda net: GroupValue("eps2"), STEP, {DIVERGE}, 0.5, 0.625, group("eps2")),
    "valid eps2": KnobInfo(
        lambda net: GroupValue("eps2", valid_on_train_loss=True), STEP, {VALID, DIVERGE},
        0.5, 0.625, group("eps2"),
    ),
    "clip_norm": KnobInfo(
        lambda net: ClipNorm(), STEP, {VALID, DIVERGE}, cell=lambda net, opt: opt.max_grad_norm
    ),
    "silent of gradients": KnobInfo(
        lambda net: Silent(on_gradients=True), FORWARD, {DIVERGE, REDUCED}
    ),
    "clip_norm of the loop": KnobInfo(
        lambda net: ClipNorm(1.0), FORWARD, {VALID, DIVERGE, REDUCED}
    ),
    "mine": KnobInfo(lambda net: Scalar("mine", value=1.0), FORWARD, set()),
    "valid mine": KnobInfo(
        lambda net: Scalar("mine", value=1.0, valid_on_train_loss=True), FORWARD, {VALID}
    ),
    "dropout": KnobInfo(
        lambda net: Dropout(net), FORWARD, set(), 0.2, 0.25, lambda net, opt: net.drop.p
    ),
    "label_smoothing": KnobInfo(lambda net: LabelSmoothing(0.1), FORWARD, set(), 0.1, 0.125),
    "label_smoothing of a loss": KnobInfo(
        lambda net: LabelSmoothing(LOSS), FORWARD, set(), 0.1, 0.125,
        lambda net, opt: LOSS.label_smoothing,
    ),
    "loss_weight/a": KnobInfo(
        lambda net: LossWeights(TASKS), FORWARD, set(), cell=lambda net, opt: TASKS["a"]
    ),
    "temperature": KnobInfo(
        lambda net: Temperature(net), FORWARD, {VALID, SCORED}, 2.0, 2.5,
        lambda net, opt: net.temperature,
    ),
}  # fmt: skip


def knob_of(name: str) -> tuple[Net, Any, dict[str, Any]]:
    """A model, the knob, and other settings of an Ensemble that explores it."""
    net = Net()
    fused = {"kind": hdet.FusedAdamW, "max_grad_norm": 1.0}
    optimizer = adamw(net, **({} if name == "lr" else fused))  # a fused one keeps the rate's
    for one in optimizer.param_groups:
        one["eps2"] = 0.5
    return net, KNOBS[name].make(net), {"optimizer": optimizer, **LOCAL}


def title(name: str) -> str:
    """The knob's own."""
    return name.removeprefix("valid ").split(" of ")[0]


def probe_of(net: Net, **settings: Any) -> hdet.ProbeController:
    mean = lambda model, x: model(x).mean()
    return hdet.ProbeController(mean, [torch.ones(2, 4)] * 8, model=net, **settings)
