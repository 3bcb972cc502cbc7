"""Cosines of gradients and the way since the cycle began (Baydin et al. 2018, arXiv 1703.04782).

One replica and one rate are enough. GREEDY: a cycle that has reached its noise floor says "lower"
even where the rate is right for the run. Use it to leave a rate that is far off."""

from __future__ import annotations

import math
from typing import Any

import torch

import hdet
from hdet.controllers import Measurement, Watched


class Cosines(Measurement):
    """[replica][sample]: in the second half of a cycle, the gradient's cosine with the way."""

    def watch(self, watched: Watched) -> None:
        self.parameters, self.length = watched.sets[0], watched.clock.sync_interval
        self.hook = watched.optimizer.register_step_pre_hook(self.before_step)
        self.reset()

    def reset(self) -> None:
        self.done, self.origin, self.products = 0, [], []

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        if not self.origin:
            self.origin = [p.detach().clone() for p in self.parameters]
        elif self.done >= self.length // 2:
            self.products.append(self.product())
        self.done += 1

    def product(self) -> torch.Tensor:
        """(3,) float64: <g, d>, <g, g>, <d, d>, whose sums over a replica's shards are the
        whole."""
        total = torch.zeros(3, dtype=torch.float64, device=self.origin[0].device)
        for p, origin in zip(self.parameters, self.origin, strict=True):
            if p.grad is not None:
                g, d = p.grad.flatten().double(), (p - origin).flatten().double()
                total += torch.stack([g @ d, g @ g, d @ d])
        return total

    def measure(self, cycle: int, slot: int = 0) -> torch.Tensor | None:
        return torch.cat(self.products) if self.products else None

    def split(self, rows: Any) -> list[list[float]]:
        triples = ([r[i : i + 3] for i in range(0, len(r), 3)] for r in rows)
        return [[gd / math.sqrt(gg * dd or math.inf) for gd, gg, dd in row] for row in triples]

    def release(self) -> None:
        self.hook.remove()


class Hypergradient(hdet.Controller):
    """ln(correction) moves by -0.3 * tanh((|t| - 2) / 4), t from the scatter of a cycle's
    cosines."""

    name, needs_replicas = "hypergradient", False

    def __init__(self, freeze_after: float | None = None) -> None:
        super().__init__(freeze_after)
        self.measurements = {"cosines": Cosines()}

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        rows = [row for row in evidence.measured.get("cosines", ()) if row is not None]
        means = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        if len(means) < 2 or evidence.scheduled[0] < 0.95 * evidence.peak[0]:
            return [hdet.Decision() for _ in evidence.knobs]
        slope = math.fsum(means) / len(means)
        squares = math.fsum((x - slope) ** 2 for x in means)
        error = math.sqrt(squares / (len(means) - 1) / len(means)) or 1e-30
        t = max(-1e3, min(slope / error, 1e3))
        move = math.copysign(0.3 * math.tanh(max(abs(t) - 2, 0.0) / 4), -t)
        return [hdet.Decision(factor=math.exp(move), slope=slope, error=error, t=t)]
