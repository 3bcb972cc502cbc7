"""One toy problem and one training loop, on which every controller is run: a small regression, in one process with one or four replicas."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hdet
from tests.harness import policies

Batch = tuple[torch.Tensor, torch.Tensor]


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(seed: int, examples: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 8, generator=generator)
    noise = 0.1 * torch.randn(examples, 1, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + 0.3 * x[:, 2:3] + noise


def losses_of(model: nn.Module, data: Batch) -> torch.Tensor:
    """(examples,)"""
    return (model(data[0]) - data[1]).square().mean(-1)


def loss_of(model: nn.Module, data: Batch) -> torch.Tensor:
    return losses_of(model, data).mean()


def probe(model: nn.Module, **settings: Any) -> hdet.ProbeController:
    return hdet.ProbeController(loss_of, lambda cycle: [batch(10**7 + 100 * cycle + i) for i in range(8)], model=model, **settings)


class Run:
    """A run of ``steps`` under the controller that ``make(model)`` gives; None: without one. ``history`` as JSON has it, and the ``losses``."""

    def __init__(
        self,
        make: Callable[[nn.Module], hdet.Controller | None],
        *,
        replicas: int = 4,
        steps: int = 200,
        interval: int = 10,
        lr: float = 1e-3,
        spread: float = 0.3,
        constant: bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.history, self.losses, self.steps = build(), [], [], steps  # type: ignore[var-annotated]
        self.controller = make(self.model)
        self.optimizer = hdet.FusedAdamW(self.model.parameters(), lr=lr)
        scheduler = None if constant else torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=steps)
        self.replicas = hdet.CoresidentReplicas(self.model, num_replicas=replicas) if replicas > 1 else None
        self.ensemble = hdet.Ensemble(
            self.optimizer, scheduler, knobs=[hdet.LearningRate(spread)], replicas=self.replicas, total_steps=steps, controller=self.controller, log=lambda record, _: self.history.append(json.loads(json.dumps(record))), **policies(every=interval, **settings),
        )  # fmt: skip
        self.done = 0

    def train(self, steps: int | None = None) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(self.steps - self.done if steps is None else steps):
                self._step()
        return self

    def _step(self) -> None:
        data = [batch(1000 * self.done + k) for k in range(1 if self.replicas is None else self.replicas.count)]
        for k, own in enumerate(data):
            if self.replicas is None:
                self._backward(own, 1)
            else:
                with self.replicas.use(k):
                    self._backward(own, len(data))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self.ensemble.step(closure=lambda: losses_of(self.model, data[0]))

    def _backward(self, data: Batch, parts: int) -> None:
        loss = loss_of(self.model, data)
        self.ensemble.observe(loss)
        self.losses.append(loss.item())
        (loss / parts).backward()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def loss(self) -> float:
        """On data of its own."""
        with torch.no_grad():
            return float(loss_of(self.model, batch(99, 512)))
