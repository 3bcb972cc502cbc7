"""Knobs of the model and its loss, which act inside ``explore()``: any scalar, dropout, label
smoothing, loss weights, temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from ..core.scale import Scale
from .bound import BoundKnob, Bounds, Explored, Meaning, scale_of
from .cells import Cell, attribute_cell, call_cell, item_cell

__all__ = ["Dropout", "LabelSmoothing", "LossWeights", "Scalar", "Temperature"]


_REGULARISES = Meaning(acts="forward")
"""The training loss votes for less of it."""


def _forward_knob(
    knob: Any, name: str, cells: Sequence[Cell], meaning: Meaning = _REGULARISES
) -> BoundKnob:
    """Acts inside ``explore()``. Raises as `BoundKnob`.

    ``knob`` has bounds, and, where it may be linear, scale and unit.
    """
    scale = _scale(name, getattr(knob, "scale", "log"), getattr(knob, "unit", None), knob.bounds)
    return BoundKnob(name, knob.grid, cells, scale, meaning)


def _scale(name: str, kind: str, unit: float | None, bounds: Bounds) -> Scale:
    if kind not in ("log", "linear"):
        raise ValueError(f"scale must be 'log' or 'linear', got {kind!r} for {name!r}")
    if (unit is None) == (kind == "linear"):
        raise ValueError(
            f"unit of {name!r} is {unit!r} with scale={kind!r}: the linear scale needs one (what "
            "a factor of e amounts to, in the value's own unit), the log scale has none"
        )
    return scale_of(bounds, kind, 1.0 if unit is None else unit)


def _held(value: float) -> Cell:
    """A value that nobody else keeps."""
    return item_cell({"value": float(value)}, "value")


@dataclass(frozen=True)
class Scalar(Explored):
    """A scalar that the forward pass, the loss or the loop reads, explored inside ``with
    ensemble.explore():``.

    Args:
        name: in records and states; unique in an Ensemble.
        get, set: read and write it, as a float. ``set`` is called for new values only; ``get`` a
            few times a step, so it should not wait for a device. Neither: the knob keeps the value
            itself, beginning with ``value``, and the loop reads ``ensemble.value(name)``.
        spread: alpha in [0, 1).
        scale: "log" (value * rho, for values above 0) or "linear" (value + unit * (rho - 1); a
            correction c adds unit * ln c).
        unit: of the linear scale, in the value's own unit: what a factor of e amounts to. Needed
            there.
        bounds: (low, high), hard for the base value and for every replica's.
        valid_on_train_loss: may training losses decide? False, the safe answer, asks for a
            `ProbeController` with ``held_out=True``: training losses always vote for less of a
            regulariser, of augmentation, or of a task's weight.
        affects_eval_loss: the loss at given weights depends on it also in eval mode (a
            temperature), so a probe scores each replica at its own value.
        on_gradients: it acts on the gradients between backward and step (clipping), not in the
            forward pass.

    With ``gradients="shared"`` a scalar with neither ``affects_eval_loss`` nor ``on_gradients`` is
    refused: all replicas step with the same gradient, whatever their own forward passes were.

    >>> model.temperature = 1.0
    >>> knob = hdet.Scalar(
    ...     "temperature", lambda: model.temperature, lambda x: setattr(model, "temperature", x),
    ...     bounds=(0.1, 10.0), valid_on_train_loss=True, affects_eval_loss=True,
    ... )

    Example::

        sync = hdet.Sync(50, gradients="local", moments="keep")
        ensemble = hdet.Ensemble(
            optimizer, knobs=[hdet.Scalar("mixup", value=0.2)], sync=sync
        )
        with ensemble.explore():
            alpha = ensemble.value("mixup")
    """

    name: str
    get: Callable[[], float] | None = None
    set: Callable[[float], object] | None = None
    spread: float = 0.3
    scale: str = "log"
    unit: float | None = None
    bounds: Bounds = None
    valid_on_train_loss: bool = False
    affects_eval_loss: bool = False
    on_gradients: bool = False
    value: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _scale(self.name, self.scale, self.unit, self.bounds)
        if len({self.get is None, self.set is None, self.value is not None}) > 1:
            raise ValueError(
                f"{self.name!r} needs get and set, or neither of them and a value that the knob "
                "keeps itself"
            )

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a value outside of the bounds, or one that is not above 0 on a log
        scale."""
        if self.value is not None:
            cell = _held(self.value)
        else:
            assert self.get is not None and self.set is not None
            cell = call_cell(self.get, self.set)
        meaning = Meaning(
            "forward", self.valid_on_train_loss, self.affects_eval_loss, self.on_gradients
        )
        return [_forward_knob(self, self.name, [cell], meaning)]


@dataclass(frozen=True)
class Dropout(Explored):
    """The dropout rates of a model, moved together by one knob named ``name``.

    ``modules`` None: of everything of torch's that has one above 0 (nn.Dropout in all dimensions,
    alpha dropout, nn.MultiheadAttention, recurrent modules); else of the modules with these names,
    also others with a number ``p``. On a log scale rates are multiplied; ``scale="linear"`` adds
    unit * (rho - 1) and can reach 0. A functional dropout in a forward of your own is a `Scalar`.

    Training losses always vote for less: it needs a `ProbeController` with ``held_out=True``, and
    ``gradients="local"``.

    Example::

        sync = hdet.Sync(50, gradients="local", moments="keep")
        ensemble = hdet.Ensemble(optimizer, knobs=[hdet.Dropout(model)], sync=sync)
        with ensemble.explore():
            loss = loss_fn(model, batches[0])
    """

    model: nn.Module
    spread: float = 0.3
    modules: Sequence[str] | None = None
    scale: str = "log"
    unit: float | None = None
    bounds: Bounds = (0.0, 0.9)
    name: str = "dropout"

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a module that does not exist or has no rate, or a model without
        dropout."""
        by_name = dict(self.model.named_modules())
        kind = type(self.model).__name__
        for name in self.modules or ():
            if name not in by_name or _rate_of(by_name[name]) is None:
                raise ValueError(
                    f"modules names {name!r}, which is no module with a dropout rate of this {kind}"
                )
        if self.modules is None:
            chosen = [m for m in by_name.values() if isinstance(m, (_DropoutNd, *_INSIDE))]
            if self.scale != "linear":
                chosen = [m for m in chosen if _rate_of(m)]
        else:
            chosen = [by_name[name] for name in self.modules]
        if not chosen:
            raise ValueError(
                f"{kind} has no dropout above 0: set one, name other modules, or use scale='linear'"
            )
        cells = [attribute_cell(module, _rate_name(module)) for module in chosen]
        return [_forward_knob(self, self.name, cells)]


_INSIDE = (nn.MultiheadAttention, nn.RNNBase)
"""Modules of torch that drop something out, beside those that do nothing else."""


def _rate_name(module: nn.Module) -> str:
    return "dropout" if isinstance(module, _INSIDE) else "p"


def _rate_of(module: nn.Module) -> float | None:
    rate = getattr(module, _rate_name(module), None)
    return rate if isinstance(rate, (int, float)) else None


@dataclass(frozen=True)
class LabelSmoothing(Explored):
    """Label smoothing: of an nn.CrossEntropyLoss (its ``label_smoothing``), or a number to begin
    with, read by ``ensemble.value("label_smoothing")`` where the loss is computed.

    Training losses always vote for less, because the loss itself changes: it needs a
    `ProbeController` with ``held_out=True`` whose ``loss_fn`` has no smoothing, and
    ``gradients="local"``.

    Example::

        sync = hdet.Sync(50, gradients="local", moments="keep")
        loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
        knobs = [hdet.LabelSmoothing(loss_fn)]
        ensemble = hdet.Ensemble(optimizer, knobs=knobs, sync=sync)
    """

    target: nn.CrossEntropyLoss | float
    spread: float = 0.3
    scale: str = "log"
    unit: float | None = None
    bounds: Bounds = (0.0, 0.9)

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a smoothing of 0 on a log scale, or outside of the bounds."""
        target = self.target
        if isinstance(target, (int, float)):
            cell = _held(target)
        elif hasattr(target, "label_smoothing"):
            cell = attribute_cell(target, "label_smoothing")
        else:
            raise ValueError(
                f"target must be an nn.CrossEntropyLoss or a number, got {type(target).__name__}"
            )
        return [_forward_knob(self, "label_smoothing", [cell])]


@dataclass(frozen=True)
class LossWeights(Explored):
    """Weights of the tasks of one objective: a dict from task to number, which the loss reads.

    One knob for each of ``tasks`` (default: all), named ``"loss_weight/<task>"``.

    Only the weights' ratios matter to Adam, so leave one task out of ``tasks``. A `ProbeController`
    with ``held_out=True`` says what the weights are for: its ``loss_fn`` is the objective that
    counts. ``gradients="local"`` is needed.

    Example::

        weights = {"boxes": 1.0, "classes": 0.5}
        sync = hdet.Sync(50, gradients="local", moments="keep")
        knobs = [hdet.LossWeights(weights, tasks=["classes"])]
        ensemble = hdet.Ensemble(optimizer, knobs=knobs, sync=sync)
    """

    weights: MutableMapping[Any, float]
    spread: float = 0.3
    tasks: Iterable[Any] | None = None
    bounds: Bounds = None

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a task that has no weight, or one that is not above 0."""
        tasks = list(self.weights if self.tasks is None else self.tasks)
        for task in tasks:
            if task not in self.weights:
                raise ValueError(f"tasks names {task!r}, which is none of {list(self.weights)}")
        return [
            _forward_knob(self, f"loss_weight/{task}", [item_cell(self.weights, task)])
            for task in tasks
        ]


@dataclass(frozen=True)
class Temperature(Explored):
    """A temperature of the model, such as attention's: the number or 0-d tensor ``attribute`` of
    all modules of ``model`` that have it.

    The loss depends on it at any weights, in eval mode too. So replicas are scored at their own
    values, training losses can decide, and it can be explored with shared gradients.

    Example::

        model[2].temperature = 0.07
        ensemble = hdet.Ensemble(optimizer, knobs=[hdet.Temperature(model)])
        assert ensemble.values() == {"temperature": 0.07}
    """

    model: nn.Module
    spread: float = 0.3
    attribute: str = "temperature"
    bounds: Bounds = None

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a model without such an attribute, one that is trained, or one that
        is not above 0."""
        found = [module for module in self.model.modules() if hasattr(module, self.attribute)]
        if not found:
            raise ValueError(
                f"no module of {type(self.model).__name__} has an attribute {self.attribute!r}: "
                "name it, or use hdet.Scalar"
            )
        if any(isinstance(getattr(module, self.attribute), nn.Parameter) for module in found):
            raise ValueError(
                f"{self.attribute!r} is a parameter, which the optimizer trains: a knob is a "
                "number or a buffer"
            )
        cells = [attribute_cell(module, self.attribute) for module in found]
        meaning = Meaning("forward", valid_on_train_loss=True, affects_eval_loss=True)
        return [_forward_knob(self, self.attribute, cells, meaning)]
