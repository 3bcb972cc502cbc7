"""Scalars of the objective and of the model: label smoothing, loss weights, temperature."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .bound import Bound
from .cells import AttributeCell, ItemCell
from .param_groups import Bounds
from .scalar import Scalar, scalar_knob

__all__ = ["LabelSmoothing", "LossWeights", "Temperature"]


@dataclass(frozen=True)
class LabelSmoothing:
    """Label smoothing: of an nn.CrossEntropyLoss (its ``label_smoothing``), or a number to begin with, read by
    ``ensemble.value("label_smoothing")`` where the loss is computed.

    Training losses always vote for less, because the loss itself changes: it needs a `ProbeController` with ``held_out=True`` whose
    ``loss_fn`` has no smoothing, and ``gradients="local"``.
    """

    target: nn.CrossEntropyLoss | float
    spread: float = 0.3
    scale: str = "log"
    unit: float | None = None
    bounds: Bounds = (0.0, 0.9)

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for a smoothing of 0 on a log scale, or outside of the bounds."""
        if isinstance(self.target, (int, float)):
            return Scalar(
                "label_smoothing", spread=self.spread, scale=self.scale, unit=self.unit, bounds=self.bounds, value=self.target
            ).bind(optimizer)  # fmt: skip
        if not hasattr(self.target, "label_smoothing"):
            raise ValueError(f"target must be an nn.CrossEntropyLoss or a number, got {type(self.target).__name__}")
        cells = [AttributeCell(self.target, "label_smoothing")]
        return [scalar_knob("label_smoothing", self.spread, cells, self.scale, self.unit, self.bounds, valid_on_train_loss=False)]


@dataclass(frozen=True)
class LossWeights:
    """Weights of the tasks of one objective: a dict from task to number, which the loss reads. One knob for each of ``tasks`` (default:
    all), named ``"loss_weight/<task>"``.

    Only the weights' ratios matter to Adam, so leave one task out of ``tasks``. A `ProbeController` with ``held_out=True`` says what the
    weights are for: its ``loss_fn`` is the objective that counts. ``gradients="local"`` is needed.
    """

    weights: MutableMapping[Any, float]
    spread: float = 0.3
    tasks: Iterable[Any] | None = None
    bounds: Bounds = None

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for a task that has no weight, or one that is not above 0."""
        if not isinstance(self.weights, MutableMapping) or not self.weights:
            raise ValueError(f"weights must be a dict from task to number, which the loss reads, got {self.weights!r}")
        tasks = list(self.weights if self.tasks is None else self.tasks)
        for task in tasks:
            if task not in self.weights:
                raise ValueError(f"tasks names {task!r}, which is none of {list(self.weights)}")
        return [
            scalar_knob(f"loss_weight/{task}", self.spread, [ItemCell(self.weights, task)], bounds=self.bounds, valid_on_train_loss=False)
            for task in tasks
        ]


@dataclass(frozen=True)
class Temperature:
    """A temperature of the model, such as attention's: the number or 0-d tensor ``attribute`` of all modules of ``model`` that have it.

    The loss depends on it at any weights, in eval mode too, so replicas are scored at their own values, training losses are honest, and it
    can be explored with shared gradients.
    """

    model: nn.Module
    spread: float = 0.3
    attribute: str = "temperature"
    bounds: Bounds = None

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for a model without such an attribute, one that is trained, or one that is not above 0."""
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {type(self.model).__name__}")
        found = [module for module in self.model.modules() if hasattr(module, self.attribute)]
        if not found:
            raise ValueError(f"no module of {type(self.model).__name__} has an attribute {self.attribute!r}: name it, or use hdet.Scalar")
        for value in (getattr(module, self.attribute) for module in found):
            if isinstance(value, nn.Parameter):
                raise ValueError(f"{self.attribute!r} is a parameter, which the optimizer trains: a knob is a number or a buffer")
            if not (isinstance(value, torch.Tensor) and value.dim() == 0 or isinstance(value, (int, float))):
                raise ValueError(
                    f"{self.attribute!r} of a module is {value!r}, but a knob is a number or a 0-d tensor: name another attribute"
                )
        cells = [AttributeCell(module, self.attribute) for module in found]
        return [scalar_knob(self.attribute, self.spread, cells, bounds=self.bounds, valid_on_train_loss=True, affects_eval_loss=True)]
