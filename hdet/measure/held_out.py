"""Losses of held-out mini-batches, at the end of a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .measurement import Measurement
from .scoring import NO_LOSSES
from .trials import Trials

__all__ = ["HeldOut"]


class HeldOut(Measurement):
    """[replica]: the losses of the run's own weights, by so many mini-batches of the judge of ``trials`` as the plan names it with. Raises ValueError
    where no rank of a replica sees losses."""

    def __init__(self, trials: Trials) -> None:
        self._trials, self._number = trials, 0

    def on_cycle_start(self, settings: Any) -> None:
        self._number = settings

    def restart(self) -> None:
        self._number = 0

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor | None:
        """(1 + mini-batches,) float64: 1, to be added up over the ranks that see losses. None: weights were loaded after the cycle's beginning."""
        return self._trials.held_out(self._number) if self._number else None

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        if not all(row[0] for row in rows):
            raise ValueError(NO_LOSSES)
        return [[loss / seeing for loss in losses] for seeing, *losses in rows]
