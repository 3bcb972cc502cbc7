"""The published controller (arXiv 2604.24708, Eq. 4 to 6): replicas with a lower training loss pull
the base value towards their own."""

from __future__ import annotations

import math

import hdet


class PublishedSoftmax(hdet.Controller):
    """sigma: ``temperature`` in the loss's unit; lambda: ``step_size``; beta: ``momentum``.
    Corrections multiply the schedule."""

    name = "published softmax"
    state_keys = ("velocities",)

    def __init__(
        self, temperature: float = 0.1, step_size: float = 0.5, momentum: float = 0.9
    ) -> None:
        super().__init__()
        self.temperature, self.step_size, self.momentum = temperature, step_size, momentum
        self.velocities: list[float] = []

    def start(self, run: hdet.Run) -> None:
        self.velocities = self.velocities or [0.0] * len(run.knobs)

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        present = [r for r, loss in enumerate(evidence.losses) if loss is not None]
        losses = [loss for loss in evidence.losses if loss is not None]
        decisions = []
        for k, multipliers in enumerate(evidence.multipliers):
            signal = 0.0
            if len(present) > 1:
                lowest = min(losses)
                weights = [math.exp((lowest - loss) / self.temperature) for loss in losses]  # Eq. 4
                total, rhos = sum(weights), [multipliers[r] for r in present]
                weighted = sum(w / total * rho for w, rho in zip(weights, rhos, strict=True))
                signal = weighted - sum(rhos) / len(rhos)  # Eq. 5
            velocity = self.momentum * self.velocities[k] + (1 - self.momentum) * signal  # Eq. 6
            self.velocities[k] = velocity
            decisions.append(hdet.Decision(factor=math.exp(self.step_size * velocity)))
        return decisions
