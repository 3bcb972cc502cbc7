"""Have the examples of the run's own steps been seen before?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from ..tensors.dtensor import local_parts
from .measurement import Measurement, Watched
from .seen import Seen, part_of_data

__all__ = ["Repeats"]

STRIDE = 8
"""One of so many steps is looked at: fewer than the first trial has, whose steps are among them even where an epoch is in the same order again."""
ENOUGH = 256
"""Examples, at least, from which is told which part of them has been seen before."""


class Repeats(Measurement):
    """[replica]: the part of the data that a step of the run takes, as far as examples of ``seen`` come again; 0, if none does, and until `ENOUGH` have been
    looked at. The model's inputs are looked at as the loop calls it, so nothing is computed twice."""

    def __init__(self, model: nn.Module, seen: Seen) -> None:
        self._model, self._seen = model, seen
        self._looking, self._steps = ExitStack(), 0
        self._counted: list[list[float]] = []
        """[replica]: what `Seen.share` gives, added up."""

    def watch(self, watched: Watched) -> None:
        self._device = local_parts(watched.sets[0][:1])[0].device

    def reset(self) -> None:
        self.release()
        if self._steps % STRIDE == 0:
            self._looking.enter_context(self._seen.looking_at(self._model, training=True))

    def sample(self, position: int, length: int, schedule_step: int) -> None:
        self._steps += 1
        self.reset()

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor:
        """(5,) float64: 1, and what `Seen.share` gives, to be added up over ranks."""
        self.release()
        return torch.tensor([1.0, *self._seen.share()], dtype=torch.float64, device=self._device)

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        before = self._counted or [[0.0] * 4] * len(rows)
        counted = [[one + more for one, more in zip(had, row[1:], strict=True)] for had, row in zip(before, rows, strict=True)]
        if any(examples < ENOUGH for _, examples, *_ in counted):
            self._counted = counted
            return [[0.0] for _ in rows]
        self._counted = []
        return [[ranks * part_of_data(*found)] for (ranks, *_), found in zip(rows, counted, strict=True)]

    def release(self) -> None:
        self._looking.close()

    restart = release
