"""Knobs of the optimizer: what it reads from its parameter groups in each step, and the norm that
it clips to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.scale import Scale
from ..rules import RULES
from .bound import BoundKnob, Bounds, Explored, Meaning, scale_of
from .cells import attribute_cell
from .groups import GroupKnob, ProductKnob
from .of_model import Scalar

__all__ = ["Betas", "ClipNorm", "GroupValue", "LearningRate", "WeightDecay"]

Groups = str | Sequence[int | str] | None
"""None: all groups as one knob.

"each": one knob per group. A list of names or indices: one knob for each of those.
"""

_MULTIPLIED = (
    "it is multiplied, so begin above 0 (the default of many optimizers and trainers is 0: say it "
    "yourself)"
)


_COUPLED = (
    torch.optim.Adam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
)  # fmt: skip
"""torch's optimizers whose weight decay is part of the gradient, unless a group says otherwise."""


class _OfGroups(Explored):
    """What knobs of parameter groups share.

    Each has these arguments: ``spread``, alpha in [0, 1); ``groups``, see `LearningRate`;
    ``bounds``, (low, high), hard for the base value and for every replica's. They are checked when
    the knob is made, and raise ValueError; so does `bind` for an optimizer without the key, a group
    that does not exist, and a value that is outside of the bounds or that no factor can move.
    """

    spread: float
    groups: Groups
    bounds: Bounds

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.groups, str) and self.groups != "each":
            raise ValueError(
                "groups must be None, 'each' or a list of group names or indices, got "
                f"{self.groups!r}"
            )
        self._scale()

    def _scale(self) -> Scale:
        return scale_of(self.bounds)

    def _bind(
        self, optimizer: Optimizer, key: str, meaning: Meaning,
        kind: type[GroupKnob] = GroupKnob, name: str = "", entry: int | None = None,
    ) -> list[BoundKnob]:  # fmt: skip
        """A `GroupKnob` for all groups together, or for each; ``name``: of the knob, by default the
        key."""
        groups, name = optimizer.param_groups, name or key
        if all(key not in group for group in groups):  # FusedMuon has groups of two kinds
            numbers = (float, tuple, list, torch.Tensor)
            known = ", ".join(
                {name: None for g in groups for name, value in g.items()
                 if isinstance(value, numbers) and name not in ("params", "initial_lr")}
            )  # fmt: skip
            raise ValueError(
                f"{type(self).__name__}: the parameter groups of {type(optimizer).__name__} have "
                f"no {key!r}, only {known}"
            )
        usable = [i for i, group in enumerate(groups) if _can_move(group, key)]
        if not usable:
            raise ValueError(f"no parameter group has a {name} to explore: {_MULTIPLIED}")
        chosen = [(name, usable)]
        if self.groups is not None:
            labels = [str(group.get("name", i)) for i, group in enumerate(groups)]
            if self.groups != "each":
                usable = [_chosen(group, labels, usable, name) for group in self.groups]
            chosen = [(f"{name}/{labels[i]}", [i]) for i in usable]
        return [
            kind(label, self.grid, optimizer, key, indices, self._scale(), meaning, entry=entry)
            for label, indices in chosen
        ]


def _can_move(group: dict[str, Any], key: str) -> bool:
    """Is there a number above 0 to multiply? A schedule of rates may begin at 0."""
    if key in ("lr", "betas"):
        return key in group
    value: Any = group.get(key)
    is_number = isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
    return is_number and bool(value > 0)


def _chosen(group: int | str, labels: Sequence[str], usable: Sequence[int], name: str) -> int:
    """The index of a group that is named, and can be used."""
    index = group if isinstance(group, int) else labels.index(group) if group in labels else -1
    if not 0 <= index < len(labels):
        raise ValueError(f"groups names {group!r}, but the optimizer has the groups {labels}")
    if index not in usable:
        raise ValueError(f"groups names {group!r}, which has no {name} to explore: {_MULTIPLIED}")
    return index


@dataclass(frozen=True)
class LearningRate(_OfGroups):
    """The learning rate as a knob (alpha = ``spread`` in [0, 1)).

    ``groups`` None: one knob ``"lr"`` scales all parameter groups together. ``"each"``: one knob
    per group, named ``"lr/<name or index>"``. A list of group names or indices: one knob for each
    of those, the other groups stay fixed. ``bounds``: (low, high) that no rate leaves, neither the
    schedule's corrected one nor a replica's. On a stock AdamW the weight decay acts at the
    replica's rate (lr * rho * decay), as its formula says; see `WeightDecay`.

    Example::

        knobs = [hdet.LearningRate(spread=0.2)]
        ensemble = hdet.Ensemble(optimizer, scheduler, knobs=knobs)
    """

    spread: float = 1 / 9
    groups: Groups = None
    bounds: Bounds = None

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a group that does not exist, or a rate outside of the bounds."""
        return self._bind(optimizer, "lr", Meaning(valid_on_train_loss=True))


@dataclass(frozen=True)
class WeightDecay(_OfGroups):
    """Weight decay as a knob, of the groups that have one above 0; ``groups`` and ``bounds`` as for
    `LearningRate`. Names: ``"weight_decay"``.

    ``product``: what is explored is rate * decay, which is what AdamW shrinks a weight by in a
    step. (A knob of the decay alone is entangled with the rate, because each replica's rate moves
    both.) Where the rate is multiplied by rho_1, the decay is multiplied by rho_2 / rho_1.
    Corrections are treated alike, so a higher rate does not decay more. It needs a `LearningRate`
    in the same Ensemble. With ``decay_at="base"`` of a fused optimizer no replica's rate enters
    decay, and only corrections are divided.

    Training losses misjudge it: it needs a `ProbeController` with ``held_out=True``. Where decay is
    part of the gradient (torch's Adam without decoupled_weight_decay, SGD with momentum, RMSprop
    ...) replicas' moments differ, and ``moments`` is to be chosen.

    Example::

        knobs = [hdet.LearningRate(), hdet.WeightDecay(spread=0.3, product=True)]
        ensemble = hdet.Ensemble(optimizer, scheduler, knobs=knobs)
    """

    spread: float = 0.3
    groups: Groups = None
    product: bool = False
    bounds: Bounds = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.product and self.bounds is not None:
            raise ValueError(
                f"bounds is {self.bounds!r} with product=True, where the decay follows the rate: "
                "leave one of them out"
            )

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for a group that does not exist or has no decay, or one outside of the
        bounds."""
        kind = ProductKnob if self.product else GroupKnob
        knobs = self._bind(optimizer, "weight_decay", Meaning(), kind)
        for knob in knobs:
            enters = any(is_coupled(optimizer, i) for i in knob.indices)
            knob.meaning = Meaning(moments_diverge=enters)
        return knobs


def is_coupled(optimizer: Optimizer, index: int) -> bool:
    """Does decay enter the moments, as far as is known? For other libraries' optimizers it is not
    known, and most are decoupled."""
    group = optimizer.param_groups[index]
    if group.get("decoupled_weight_decay", False):
        return False
    if hasattr(optimizer, "rule"):
        rule = RULES[optimizer.rule]
        # schedule-free's decay is added behind the moments
        return rule.coupled and not rule.weights and rule.keeps_moments(group)
    if isinstance(optimizer, torch.optim.SGD):
        return bool(group["momentum"] != 0)
    return isinstance(optimizer, _COUPLED)


@dataclass(frozen=True)
class Betas(_OfGroups):
    """Adam's and Lion's betas, explored as ln(1 - beta): the knob multiplies 1 / (1 - beta), the
    steps that an average remembers.

    One knob for each of ``which`` (0: ``"beta1"``, 1: ``"beta2"``). A higher value is a longer
    memory: 0.9 times 2 is 0.95. Values stay within ``bounds``. Replicas with different betas have
    different moments, so ``moments`` is to be chosen also with shared gradients.

    Example::

        knobs, sync = [hdet.Betas(which=[1])], hdet.Sync(50, moments="average")
        ensemble = hdet.Ensemble(optimizer, knobs=knobs, sync=sync)
    """

    spread: float = 0.3
    which: Sequence[int] = (0, 1)
    groups: Groups = None
    bounds: Bounds = (0.0, 0.99999)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.which or not all(i in (0, 1) for i in self.which):
            raise ValueError(f"which must list 0 (beta1) or 1 (beta2) or both, got {self.which!r}")
        if self.values is not None and len(self.which) > 1:
            raise ValueError(
                f"values={self.values!r} are those of one beta: say which, such as which=[1] for "
                "beta2, and give another Betas for the other"
            )

    def _scale(self) -> Scale:
        return scale_of(self.bounds, "horizon")

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for an optimizer without betas, a group that does not exist, or a beta
        outside of the bounds."""
        meaning = Meaning(valid_on_train_loss=True, moments_diverge=True)
        return [
            knob
            for i in self.which
            for knob in self._bind(optimizer, "betas", meaning, name=f"beta{i + 1}", entry=i)
        ]


_NAMED = {
    "lr": "LearningRate",
    "weight_decay": "WeightDecay",
    "betas": "Betas",
    "max_grad_norm": "ClipNorm",
}
"""Entries that have a knob of their own, which knows what follows from exploring them."""
_MEMORIES = ("momentum", "alpha", "rho", "beta")
"""Factors below 1 of running averages."""


@dataclass(frozen=True)
class GroupValue(_OfGroups):
    """A number above 0 that the optimizer reads from its parameter groups in each step, such as
    SGD's ``momentum`` or Adam's ``eps``.

    Args:
        key: of the group; also the knob's name, ``"<key>/<group>"`` where ``groups`` lists groups
            or is "each".
        spread: alpha in [0, 1).
        groups: as for `LearningRate`.
        scale: "log", or "horizon" for the factor of a running average, which stays below 1: the
            knob multiplies 1 / (1 - value), as `Betas` does. None: "horizon" for momentum, alpha,
            rho and beta, else "log".
        bounds: as for `LearningRate`; None on the horizon scale: (0, 0.99999).
        valid_on_train_loss: may training losses decide? False asks for a `ProbeController` with
            ``held_out=True``.
        moments_diverge: do moments depend on it? Then ``moments`` is to be chosen, also with shared
            gradients.

    Example::

        knobs, sync = [hdet.GroupValue("eps")], hdet.Sync(50, moments="average")
        ensemble = hdet.Ensemble(optimizer, knobs=knobs, sync=sync)
    """

    key: str
    spread: float = 0.3
    groups: Groups = None
    scale: str | None = None
    bounds: Bounds = None
    valid_on_train_loss: bool = False
    moments_diverge: bool = True

    def __post_init__(self) -> None:
        if self.key in _NAMED:
            raise ValueError(
                f"key is {self.key!r}, which has a knob of its own: use hdet.{_NAMED[self.key]}"
            )
        if self.scale not in (None, "log", "horizon"):
            raise ValueError(f"scale must be None, 'log' or 'horizon', got {self.scale!r}")
        super().__post_init__()

    def _scale(self) -> Scale:
        kind = self.scale or ("horizon" if self.key in _MEMORIES else "log")
        return scale_of(
            (0.0, 0.99999) if self.bounds is None and kind == "horizon" else self.bounds, kind
        )

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError for groups without the key or that do not exist, and for a value that
        is no number, not above 0 or out of bounds."""
        meaning = Meaning(
            valid_on_train_loss=self.valid_on_train_loss, moments_diverge=self.moments_diverge
        )
        return self._bind(optimizer, self.key, meaning)


@dataclass(frozen=True)
class ClipNorm(Explored):
    """The norm that gradients are clipped to.

    ``value`` None: ``max_grad_norm`` of one of hdet's fused optimizers, which clips inside its
    step. A number: the loop clips by itself, ``clip_grad_norm_(parameters,
    ensemble.value("clip_norm"))`` inside ``with ensemble.explore():``. Replicas that clip
    differently have different moments, so ``moments`` is to be chosen also with shared gradients.

    Example::

        knobs, sync = [hdet.ClipNorm(1.0)], hdet.Sync(50, moments="average")
        ensemble = hdet.Ensemble(optimizer, knobs=knobs, sync=sync)
        with ensemble.explore():
            max_norm = ensemble.value("clip_norm")
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    """

    value: float | None = None
    spread: float = 0.3
    bounds: Bounds = None

    def __post_init__(self) -> None:
        super().__post_init__()
        scale_of(self.bounds)

    def bind(self, optimizer: Optimizer) -> list[BoundKnob]:
        """Raises ValueError without a norm above 0 to begin with."""
        if self.value is not None:
            knob = Scalar(
                "clip_norm", spread=self.spread, bounds=self.bounds, valid_on_train_loss=True,
                on_gradients=True, value=self.value, values=self.values,
                multipliers=self.multipliers, ratio=self.ratio,
            )  # fmt: skip
            return knob.bind(optimizer)
        norm = getattr(optimizer, "max_grad_norm", None)
        if norm is None or not 0 < norm < math.inf:
            raise ValueError(
                f"ClipNorm: {type(optimizer).__name__} has max_grad_norm {norm!r}: give a fused "
                "optimizer one above 0, or pass ClipNorm(value) and clip by "
                'ensemble.value("clip_norm")'
            )
        cells = [attribute_cell(optimizer, "max_grad_norm")]
        meaning = Meaning(valid_on_train_loss=True, moments_diverge=True)
        scale = scale_of(self.bounds)
        return [BoundKnob("clip_norm", self.grid, cells, scale, meaning, key="max_grad_norm")]
