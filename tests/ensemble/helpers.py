"""A small least-squares problem that every rank can build alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.core.clock import Clock
from hdet.measure.measurement import Watched
from tests.harness import policies


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(key: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(key))
    return x, x.sum(1, keepdim=True)


def loss_of(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    dtype = next(net.parameters()).dtype
    return nn.functional.mse_loss(net(data[0].to(dtype)), data[1].to(dtype))


def probe(net: nn.Module, **settings: Any) -> hdet.ProbeController:
    return hdet.ProbeController(loss_of, lambda cycle: [batch(10_000 + 8 * cycle + i) for i in range(8)], model=net, **settings)


def watched(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Watched:
    """A run of one replica, as a measurement sees it that is driven by hand."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    own = list(net.parameters())
    return Watched(
        optimizer, [own], [lambda: [None] * len(own)], hdet.LearningRate().bind(optimizer), Clock(10), hdet.Replicas.single(),
        lambda: [[1.0]], False, lambda name: [],
    )  # fmt: skip


class Run:
    """One replica's training loop: DDP, AdamW, OneCycle, Ensemble."""

    def __init__(self, rank: int, *, spread: float = 0.3, total: int = 40, interval: int = 5, lr: float = 3e-3, **settings: Any) -> None:
        self.rank, self.index = rank, 0
        self.net = model().to(settings.pop("dtype", torch.float32))
        self.wrapped = DistributedDataParallel(self.net) if torch.distributed.is_initialized() else self.net
        self.optimizer = settings.pop("optimizer", torch.optim.AdamW)(
            self.net.parameters(), lr=lr, weight_decay=settings.pop("weight_decay", 0.0)
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total, cycle_momentum=False)
        controller = settings.pop("controller", None)
        self.ensemble = hdet.Ensemble(
            self.optimizer,
            self.scheduler,
            knobs=[hdet.LearningRate(spread)],
            controller=probe(self.wrapped) if controller == "probe" else controller(self.net) if callable(controller) else controller,
            **policies(every=interval, **settings),
        )

    def step(self, *, report: float | None = None) -> torch.Tensor:
        loss = loss_of(self.wrapped, batch(100 * self.index + self.rank))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ensemble.step(loss if report is None else report)
        self.index += 1
        return loss.detach()

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.step()
        return self

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()


class CoresidentRun:
    """The same loop for K replicas in one process: micro-batch k of a step is the batch of rank k."""

    def __init__(self, count: int, *, spread: float = 0.3, total: int = 40, interval: int = 5, lr: float = 3e-3, **settings: Any) -> None:
        self.index = 0
        self.net = model().to(settings.pop("dtype", torch.float32))
        self.replicas = hdet.CoresidentReplicas(self.net, count)
        make = settings.pop("optimizer", hdet.FusedAdamW)
        self.optimizer = make(self.net.parameters(), lr=lr, weight_decay=settings.pop("weight_decay", 0.0))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total, cycle_momentum=False)
        controller = settings.pop("controller", None)
        self.ensemble = hdet.Ensemble(
            self.optimizer,
            self.scheduler,
            knobs=[hdet.LearningRate(spread)],
            replicas=self.replicas,
            controller=probe(self.net) if controller == "probe" else controller(self.net) if callable(controller) else controller,
            **policies(every=interval, **settings),
        )

    def backward(self, report: dict[int, float] | None = None) -> None:
        for k in range(self.replicas.count):
            with self.replicas.use(k):
                loss = loss_of(self.net, batch(100 * self.index + k))
                self.ensemble.observe((report or {}).get(k, loss))
            (loss / self.replicas.count).backward()

    def step(self, report: dict[int, float] | None = None) -> None:
        self.backward(report)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ensemble.step()
        self.index += 1

    def steps(self, count: int) -> CoresidentRun:
        for _ in range(count):
            self.step()
        return self

    def weights(self) -> list[torch.Tensor]:
        """Of each replica."""
        found = []
        for k in range(self.replicas.count):
            with self.replicas.use(k):
                found.append(torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone())
        return found
