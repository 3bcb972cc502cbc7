"""Population-based training (Jaderberg et al. 2017): replicas train apart at perturbed values; all adopt the winner, and its values."""

from __future__ import annotations

import random

import hdet


class Population(hdet.Controller):
    """Every ``ready`` cycles all replicas take weights and values of the one with the lowest loss; then each multiplies every knob by one of
    ``factors``, the first replica by 1. Between, nothing is averaged. Give it local gradients, or replicas differ by their values alone."""

    name = "population"
    state_keys = ("cycles",)

    def __init__(self, ready: int = 2, factors: tuple[float, ...] = (0.8, 1.0, 1.25), seed: int = 0) -> None:
        super().__init__()
        self.ready, self.factors, self.seed = ready, factors, seed
        self.cycles = 0.0

    def start(self, run: hdet.Run) -> None:
        self.knobs, self.replicas = len(run.knobs), run.replicas

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        rng = random.Random(self.seed * 1_000_003 + int(self.cycles) // self.ready)  # of its own, the same on every rank
        rows = [[1.0] + [rng.choice(self.factors) for _ in range(self.replicas - 1)] for _ in range(self.knobs)]
        return hdet.Plan(multipliers=rows, end=hdet.Keep())

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        self.cycles += 1
        ranked = sorted((loss, r) for r, loss in enumerate(evidence.losses) if loss is not None)
        if int(self.cycles) % self.ready or not ranked:
            return hdet.Learned([hdet.Decision() for _ in evidence.knobs])
        best = ranked[0][1]
        decisions = [hdet.Decision(factor=row[best], note=f"replica {best} is adopted") for row in evidence.multipliers]
        return hdet.Learned(decisions, hdet.Adopt(best))
