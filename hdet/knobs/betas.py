"""The memory of the optimizer's running averages, and the number below its root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ..core.spread import check_spread
from .bound import Bound, GroupKnob
from .param_groups import Bounds, Groups, check_groups, choose, require_key, scale_of

__all__ = ["Betas", "Eps"]


@dataclass(frozen=True)
class Betas:
    """Adam's and Lion's betas, explored as ln(1 - beta): the knob multiplies 1 / (1 - beta), the steps that an average remembers.

    One knob for each of ``which`` (0: ``"beta1"``, 1: ``"beta2"``). A higher value is a longer memory: 0.9 times 2 is 0.95. Values stay
    within ``bounds``. Replicas with different betas have different moments, so ``moments`` is to be chosen also with shared gradients.
    """

    spread: float = 0.3
    which: Sequence[int] = (0, 1)
    groups: Groups = None
    bounds: Bounds = (0.0, 0.99999)

    def __post_init__(self) -> None:
        check_spread(self.spread)
        check_groups(self.groups)
        scale_of(self.bounds, "horizon")
        if isinstance(self.which, str) or not self.which or not all(i in (0, 1) for i in self.which):
            raise ValueError(f"which must list 0 (beta1) or 1 (beta2) or both, got {self.which!r}")

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for an optimizer without betas, a group that does not exist, or a beta outside of the bounds."""
        require_key(optimizer, "betas", "Betas")
        return [
            GroupKnob(name, self.spread, optimizer, "betas", indices, scale_of(self.bounds, "horizon"), entry=i, moments_diverge=True)
            for i in self.which
            for name, indices in choose(optimizer, self.groups, f"beta{i + 1}")
        ]


@dataclass(frozen=True)
class Eps:
    """Adam's eps, on a log scale. Moments do not depend on it. Names: ``"eps"``."""

    spread: float = 0.5
    groups: Groups = None
    bounds: Bounds = None

    def __post_init__(self) -> None:
        check_spread(self.spread)
        check_groups(self.groups)
        scale_of(self.bounds)

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for an optimizer without eps, a group that does not exist, or an eps that is 0 or outside of the bounds."""
        require_key(optimizer, "eps", "Eps")
        chosen = choose(optimizer, self.groups, "eps", lambda group: float(group["eps"]) > 0, "it is multiplied, so begin above 0")
        return [GroupKnob(name, self.spread, optimizer, "eps", indices, scale_of(self.bounds)) for name, indices in chosen]
