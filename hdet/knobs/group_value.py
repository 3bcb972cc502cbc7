"""Any number of the parameter groups as a knob."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from ..core.scale import Scale
from ..core.spread import check_spread
from .bound import Bound, GroupKnob
from .param_groups import Bounds, Groups, check_groups, choose, require_key, scale_of

__all__ = ["GroupValue"]

OWN = {"lr": "LearningRate", "weight_decay": "WeightDecay", "betas": "Betas", "eps": "Eps", "max_grad_norm": "ClipNorm"}
"""Entries that have a knob of their own, which knows what follows from exploring them."""
MEMORIES = ("momentum", "alpha", "rho", "beta")
"""Factors below 1 of running averages."""


@dataclass(frozen=True)
class GroupValue:
    """A number above 0 that the optimizer reads from its parameter groups in each step, such as SGD's ``momentum`` or RMSprop's ``alpha``.

    Args:
        key: of the group; also the knob's name, ``"<key>/<group>"`` where ``groups`` lists groups or is "each".
        spread: alpha in [0, 1).
        groups: as for `LearningRate`.
        scale: "log", or "horizon" for the factor of a running average, which stays below 1: the knob multiplies 1 / (1 - value), as `Betas`
            does. None: "horizon" for momentum, alpha, rho and beta, else "log".
        bounds: as for `LearningRate`; None on the horizon scale: (0, 0.99999).
        valid_on_train_loss: may training losses judge it? False asks for a `ProbeController` with ``held_out=True``.
        moments_diverge: do moments depend on it? Then ``moments`` is to be chosen, also with shared gradients.
    """

    key: str
    spread: float = 0.3
    groups: Groups = None
    scale: str | None = None
    bounds: Bounds = None
    valid_on_train_loss: bool = False
    moments_diverge: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise ValueError(f"key must be the name of an entry of the parameter groups, got {self.key!r}")
        if self.key in OWN:
            raise ValueError(f"key is {self.key!r}, which has a knob of its own: use hdet.{OWN[self.key]}")
        check_spread(self.spread)
        check_groups(self.groups)
        if self.scale not in (None, "log", "horizon"):
            raise ValueError(f"scale of {self.key!r} must be 'log', 'horizon' or None, got {self.scale!r}")
        self._scale()

    def _scale(self) -> Scale:
        kind = self.scale or ("horizon" if self.key in MEMORIES else "log")
        return scale_of((0.0, 0.99999) if self.bounds is None and kind == "horizon" else self.bounds, kind)

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for groups without the key, a group that does not exist, and a value that is no number, not above 0 or outside of the
        bounds."""
        require_key(optimizer, self.key, "GroupValue")
        for group in optimizer.param_groups:
            if isinstance(group[self.key], bool) or not isinstance(group[self.key], (int, float)):
                raise ValueError(f"GroupValue: the parameter groups' {self.key!r} is {group[self.key]!r}, which is no number")
        chosen = choose(optimizer, self.groups, self.key, lambda group: float(group[self.key]) > 0, "it is multiplied, so begin above 0")
        return [
            GroupKnob(
                name, self.spread, optimizer, self.key, indices, self._scale(), valid_on_train_loss=self.valid_on_train_loss, moments_diverge=self.moments_diverge
            )
            for name, indices in chosen
        ]  # fmt: skip
