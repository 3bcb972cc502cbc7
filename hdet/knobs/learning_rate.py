"""The learning rate as a knob."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from ..core.spread import check_spread
from .bound import Bound, GroupKnob
from .param_groups import Bounds, Groups, check_groups, choose, scale_of

__all__ = ["LearningRate"]


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a knob (alpha = ``spread`` in [0, 1)).

    ``groups`` None: one knob ``"lr"`` scales all parameter groups together. ``"each"``: one knob per group, named
    ``"lr/<name or index>"``. A list of group names or indices: one knob for each of those, the other groups stay fixed.
    ``bounds``: (low, high) that no rate leaves, neither the schedule's corrected one nor a replica's.
    On a stock AdamW the weight decay acts at the replica's rate (lr * rho * decay), as its formula says; see `WeightDecay`.
    """

    spread: float = 1 / 9
    groups: Groups = None
    bounds: Bounds = None

    def __post_init__(self) -> None:
        check_spread(self.spread)
        check_groups(self.groups)
        scale_of(self.bounds)

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """The knobs of this optimizer's parameter groups.

        Raises:
            ValueError: a group that does not exist, or a rate outside of the bounds.
        """
        scale = scale_of(self.bounds)
        return [GroupKnob(name, self.spread, optimizer, "lr", indices, scale) for name, indices in choose(optimizer, self.groups, "lr")]
