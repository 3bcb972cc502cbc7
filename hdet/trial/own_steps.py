"""The free part of the search: how far the run's own first steps move the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .displacement import Displacement, Ratios
from .rule import FARTHEST, STEPS, Arm, Trial, arm_factor
from .searched import Searched

__all__ = ["OwnSteps"]

UNCERTAINTY = 2.0
"""A warm-up's small steps go further, in proportion to their rates, than a trial's. By this factor
a displacement may be overestimated (95 % of 699 runs: by 2.7 at most)."""


class OwnSteps:
    """Counts the first `STEPS` steps of a run. They cost nothing."""

    cost = 0.0

    def __init__(self, run: Searched, displacement: Displacement) -> None:
        self._run, self._displacement = run, displacement
        self._position = 0
        self._sum: Any = 0.0  # of rates, as parts of their peak; perhaps a tensor on the device
        self._ratios: Ratios = []

    def after_step(self, closure: object = None) -> Trial | None:
        """Returns what was measured after the last of them: a trial with one arm."""
        self._position += 1
        number, peak = max(self._run.peaks(), key=lambda pair: pair[1])
        if peak > 0:
            self._sum = self._sum + self._run.optimizer.param_groups[number]["lr"] / peak
        if self._position < STEPS:
            return None
        self._ratios = self._displacement.ratios()
        [moved] = self._displacement.over_ranks(self._run.replicas, self._ratios)
        distance, done = None, float(self._sum)
        if moved.median is not None and done > 0:
            whole = sum(arm_factor(position) for position in range(1, STEPS + 1))
            distance = min(moved.median * whole / done, FARTHEST)
        arm = Arm(self._run.rate, displacement=distance)
        return Trial(arm.rate, (arm,), pretrained=moved.pretrained, uncertainty=UNCERTAINTY)

    def layers(self) -> Mapping[str, float]:
        """`AutoLR.layers`."""
        return self._displacement.by_layer(self._ratios)
