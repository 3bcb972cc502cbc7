"""Pooling over cycles, for rules whose evidence of one cycle is too weak to act upon."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..evidence import Evidence
from ..schema import FLAG, POSITIVE, Kind, ListOf
from ..validate import within
from .peak import PeakController

__all__ = ["PooledController"]


class PooledController(PeakController):
    """A `PeakController` that adds up its evidence with forgetting: what it knew before a cycle enters with the weight `fade`.

    Args:
        step: the largest move of ln(correction) in one cycle.
        dead: standard errors that count as noise; a vote within them moves nothing.
        scale: standard errors beyond ``dead`` at which a move reaches tanh(1), 76 % of ``step``.
        memory: phi in [0, 1), the weight of the cycle before: 1 / (1 - phi) cycles are remembered.
        reach: moves of ln(correction) that age the evidence by 1 / e beside: a slope is that of the value at which it was found.
        begin, end, bound, freeze_after: see `PeakController` and `Controller`.
    """

    state_keys: Mapping[str, Kind] = {**PeakController.state_keys, "counted": FLAG, "last": ListOf(POSITIVE, "seen")}

    def __init__(
        self,
        step: float = 0.3,
        dead: float = 2.0,
        scale: float = 2.0,
        memory: float = 0.9,
        reach: float = 0.5,
        begin: float = 0.95,
        end: float = 0.9,
        bound: float = 1e3,
        freeze_after: float | None = None,
    ) -> None:
        within(memory, "memory", "[0, 1)")
        within(reach, "reach", "(0, inf)")
        super().__init__(step, dead, scale, begin, end, bound, freeze_after)
        self.memory, self.reach = memory, reach

    def begin_run(self, knobs: int) -> None:
        super().begin_run(knobs)
        self.counted = False  # did votes count in the last cycle?
        self.last = [1.0] * knobs  # corrections then

    def fade(self, evidence: Evidence) -> float:
        """The weight of what was known before this cycle; 0 where the peak begins: of the rise before it nothing is to be learned."""
        counts = any(self.counts(k) for k in range(len(self.last)))
        travelled = max(abs(math.log(now / then)) for now, then in zip(evidence.corrections, self.last, strict=True))
        weight = 0.0 if counts and not self.counted else self.memory * math.exp(-travelled / self.reach)
        self.counted, self.last = counts, list(evidence.corrections)
        return weight
