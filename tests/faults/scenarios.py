"""What happens to the ranks: a small DDP training whose Nth step, average or checkpoint meets a fault."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
import hdet.converge
from tests.harness import policies

from .harness import World

INTERVAL = 4


class Training:
    """DDP and an Ensemble over a small regression.

    ``local``: replicas step with their own gradients, outside of DDP. ``jump``: at that step the schedule multiplies the rate so.
    """

    def __init__(
        self, rank: int, *, local: bool = False, lr: float = 0.05, width: int = 8, jump: tuple[int, float] | None = None, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.local, self.count = rank, local, 0
        self.model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.wrapped: nn.Module = self.model if local else DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        mode = {"every": INTERVAL} | ({"gradients": "local", "moments": "average"} if local else {})
        schedule = jump and torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: jump[1] if step >= jump[0] else 1.0)
        self.records: list[dict[str, Any]] = []
        self.ensemble = hdet.Ensemble(
            self.optimizer, schedule, log=lambda record, step: self.records.append(record), **policies(**{**mode, **settings})
        )

    def train(self, poison: float = 1.0) -> torch.Tensor:
        """Forward, backward, optimizer.step(). The loss; ``poison`` is a factor of it."""
        draw = torch.Generator().manual_seed(1000 * self.count + self.rank)
        x = torch.randn(16, 4, generator=draw)
        loss = poison * (self.wrapped(x) - x.sum(1, keepdim=True).sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.count += 1
        return loss.detach()

    def step(self) -> None:
        self.ensemble.step(self.train())

    def cycle(self) -> dict[str, Any]:
        for _ in range(INTERVAL):
            self.step()
        return self.records[-1]

    def numbers(self) -> list[float]:
        """All parameters."""
        return [x for p in self.model.parameters() for x in p.detach().flatten().tolist()]

    def state(self) -> list[float]:
        """All of the optimizer's tensors."""
        return [x for values in self.optimizer.state.values() for x in values["momentum_buffer"].flatten().tolist()]

    def refuses(self) -> str:
        """What a broken Ensemble says to whoever goes on regardless."""
        said = []
        for attempt in (self.ensemble.step, self.ensemble.state_dict, self.ensemble.converge):
            try:
                attempt()
                said.append("goes on")
            except RuntimeError as error:
                said.append(str(error))
        return " | ".join(said)


def killed_in_a_cycle(world: World, *, local: bool = False, victim: int = 1, at: int = 6) -> list[float]:
    """Between two averages: under DDP the others notice in their next backward pass, with local gradients at the next average."""
    training = Training(world.rank, local=local)
    world.afterwards = training.refuses
    with training.ensemble.guard():
        for step in range(12):
            if step == at and world.rank == victim:
                world.die()
            training.step()
    return training.numbers()


def killed_in_an_average(world: World, *, victim: int = 1, nth: int = 1, pairs: bool = False) -> list[float]:
    """At the nth collective of the second cycle's end: 1 gathers the losses, 2 averages. The victim's is never begun.

    ``pairs``: replicas of two ranks each.
    """
    replicas = hdet.Replicas.from_group([[0, 1], [2, 3]]) if pairs else None
    training = Training(world.rank, local=True, replicas=replicas)
    world.afterwards = training.refuses
    for _ in range(2 * INTERVAL - 1):
        training.step()
    if world.rank == victim:
        _die_in(world, nth)
    training.step()
    return training.numbers()


def killed_at_the_start(world: World, *, victim: int = 1) -> None:
    training = Training(world.rank)
    world.afterwards = training.refuses
    if world.rank == victim:
        _die_in(world, 1)
    training.step()


def killed_in_a_fragment(world: World, *, victim: int = 1) -> list[float]:
    """Streaming averages a part in the middle of a cycle."""
    training = Training(world.rank, local=True, converge=hdet.converge.Streaming(2))
    world.afterwards = training.refuses
    training.cycle()
    if world.rank == victim:
        _die_in(world, 1)
    training.cycle()
    return training.numbers()


def _die_in(world: World, nth: int) -> None:
    """In this process the nth all_reduce from now on kills."""
    all_reduce, left = dist.all_reduce, [nth]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            world.die()
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted


def late(world: World, *, straggler: int = 1, local: bool = True) -> list[float]:
    """One rank comes to the middle of a cycle when all others have given up, a second and a half ago."""
    training = Training(world.rank, local=local)
    world.afterwards = training.refuses
    with training.ensemble.guard():
        for step in range(12):
            if step == 6 and world.rank == straggler:
                world.fault()
                world.wait_for_the_others()
                time.sleep(1.5)
            training.step()
    return training.numbers()
