"""The free part of the search: how far the run's own first steps move the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .arms import Searched
from .displacement import Displacement, are_pretrained
from .rule import STEPS, Arm, Trial, arm_factor

__all__ = ["OwnSteps"]

UNCERTAINTY = 2.0
"""A warm-up's small steps go further, in proportion to their rates, than a trial's. By this factor
a displacement may be overestimated (95 % of 699 runs: by 2.7 at most)."""
FARTHEST = 64.0
"""A displacement that says no more than "much too far". It stands for weights that are not finite,
too; then there is another look at a lower rate."""


class OwnSteps:
    """Counts the first `STEPS` steps of a run. They cost nothing."""

    cost = 0.0

    def __init__(self, run: Searched, displacement: Displacement) -> None:
        self._run, self._displacement = run, displacement
        self._position = 0
        self._sum: Any = 0.0  # of rates, as parts of their peak; perhaps a tensor on the device
        self._ratios: list[Any] = []

    def after_step(self) -> Trial | None:
        """After the last of them: as a trial with one arm."""
        self._position += 1
        number, peak = max(self._run.peaks(), key=lambda pair: pair[1])
        if peak > 0:
            self._sum = self._sum + self._run.optimizer.param_groups[number]["lr"] / peak
        if self._position < STEPS:
            return None
        self._ratios = self._displacement.ratios()
        row = self._run.replicas.sum_rows(self._displacement.row(self._ratios))
        moved, done = self._displacement.read(row.sum(0).tolist()), float(self._sum)
        distance = None
        if moved.median is not None and done > 0:
            whole = sum(arm_factor(position) for position in range(1, STEPS + 1))
            distance = min(moved.median * whole / done, FARTHEST)
        arms = (Arm(self._run.rate, displacement=distance),)
        return Trial(arms[0].rate, arms, pretrained=are_pretrained(moved), uncertainty=UNCERTAINTY)

    def is_beyond_measure(self, trial: Trial) -> bool:
        """Is the rate so high that the new one has to be looked at again?"""
        return trial.arms[0].displacement == FARTHEST

    def layers(self) -> Mapping[str, float]:
        """`AutoLR.layers`."""
        return self._displacement.by_layer(self._ratios)

    def check(self, what: str) -> None:
        """Nothing is ever in the place of the run."""

    def close(self) -> None:
        """Nothing is held."""
