"""A third party's controller that asks while it learns, and the measurement that answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hdet
from hdet.measure import Measurement
from hdet.tensors.eval_mode import eval_mode
from tests.harness import Batch, losses_of, taught


@dataclass(frozen=True)
class LossAt(hdet.Question):
    """The loss with all weights times ``scale``: the mean over replicas, of each on a batch of its own."""

    scale: float


class Scaled(Measurement):
    """Answers `LossAt`."""

    def __init__(self, model: nn.Module, losses: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
        self.model, self.losses = model, losses

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model]

    def watch(self, watched: Any) -> None:
        self._parameters, self._replicas = watched.sets[0], watched.replicas

    @contextmanager
    def answering(self) -> Iterator[Callable[[hdet.Question], Any]]:
        before = [p.detach().clone() for p in self._parameters]

        def put(scale: float) -> None:
            with torch.no_grad():
                for parameter, value in zip(self._parameters, before, strict=True):
                    parameter.copy_(value * scale)

        def answer(question: hdet.Question) -> float:
            if not isinstance(question, LossAt):
                raise ValueError(f"it answers LossAt, got {question!r}")
            put(question.scale)
            row = self.losses(self.model, taught(self._replicas.index)).double().mean().reshape(1)
            return float(self._replicas.sum_rows(*[row] * len(self._replicas.local)).mean())

        with eval_mode(self.model):
            try:
                yield answer
            finally:
                put(1.0)


class Asking(hdet.Controller):
    """Raises every value while larger weights are better, and lowers it else."""

    name = "asking"
    needs_replicas = False
    measures = ("scaled",)

    def __init__(self, model: nn.Module, freeze_after: float | None = None, losses: Any = losses_of) -> None:
        super().__init__(freeze_after)
        self.measurements: Mapping[str, Any] = {"scaled": Scaled(model, losses)}

    def decide(self, evidence: hdet.Evidence) -> Any:
        here = yield LossAt("scaled", 1.0)
        larger = yield LossAt("scaled", 1.02)
        slope = (larger - here) / 0.02
        return hdet.Learned([hdet.Decision(factor=1.1 if slope < 0 else 1 / 1.1, slope=slope) for _ in evidence.knobs])
