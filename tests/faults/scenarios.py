"""What happens to the ranks: a small training whose Nth step, average or save meets a fault."""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet import checkpoint
from hdet.checkpoint import saving

from ..harness import Batch, Run, batch, losses_of
from .harness import World

INTERVAL = 4


def wave(key: int) -> Batch:
    """Of the sum of four numbers."""
    x, _ = batch(key, examples=16)
    x[:, 4:] = 0
    return x, x.sum(1, keepdim=True).sin()


class Training(Run):
    """``local``: gradients of their own, outside of DDP. ``jump``: (step, factor of the rate)"""

    def __init__(
        self, rank: int, *, local: bool = False, lr: float = 0.05, width: int = 8, jump: Any = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
        own = {"gradients": "local", "moments": "average"} if local else {}
        given = {"every": INTERVAL, "optimizer": partial(torch.optim.SGD, momentum=0.9), **settings}
        scheduler = None
        if jump is not None:
            factor = lambda step: jump[1] if step >= jump[0] else 1.0
            scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)
        given.update(net=net, ddp=not local, scheduler=scheduler, lr=lr, data=wave)
        super().__init__(rank, **{**own, **given})
        self.poison = 1.0
        self.losses = lambda data: self.poison * losses_of(self.wrapped, data)

    def set_rate(self, rate: float) -> None:
        """As a schedule of this rank's own would."""
        with self.ensemble.rescheduling():
            self.optimizer.param_groups[0]["lr"] = rate

    def train(self, poison: float = 1.0) -> torch.Tensor:
        """Forward, backward, optimizer.step(). The loss; ``poison`` is a factor of it."""
        self.poison = poison
        loss = self.backward()
        self.poison = 1.0
        self.optimizer.step()
        self.index += 1
        return loss

    def cycle(self) -> dict[str, Any]:
        return self.steps(INTERVAL).records[-1]

    def numbers(self) -> list[float]:
        """All parameters."""
        return self.weights().tolist()

    def state(self) -> list[float]:
        """All of the optimizer's tensors."""
        found = [x for values in self.optimizer.state.values() for x in values.values()]
        tensors = filter(torch.is_tensor, found)
        return [x for tensor in tensors for x in tensor.flatten().tolist()]


def killed_in_a_cycle(world: World, *, local: bool = False, victim: int = 1) -> None:
    """Between two averages: noticed in a backward pass under DDP, else in the next average."""
    training = Training(world.rank, local=local)
    world.ensemble = training.ensemble
    with training.ensemble.guard():
        training.steps(6)
        if world.rank == victim:
            world.die()
        training.steps(6)


def killed_in_a_collective(
    world: World, *, after: int, nth: int = 1, victim: int = 1, pairs: bool = False,
    **settings: Any,
) -> None:  # fmt: skip
    """In the nth all_reduce after so many steps. ``pairs``: replicas of two ranks each."""
    replicas = hdet.Replicas.from_group([[0, 1], [2, 3]]) if pairs else None
    training = Training(world.rank, replicas=replicas, **settings)
    world.ensemble = training.ensemble
    training.steps(after)
    if world.rank == victim:
        all_reduce, calls = dist.all_reduce, count(1)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == nth:
                world.die()
            return all_reduce(*args, **kwargs)

        dist.all_reduce = counted
    training.steps(INTERVAL)


def killed_in_a_save(world: World) -> None:
    """The second one, in the middle of a file, half of which is on disk."""
    training = Training(world.rank)
    world.ensemble = training.ensemble
    state, folder = checkpoint.RunState(training.net, training.ensemble), world.folder / "run"
    write_files = saving.write_files

    def write_half(folder: Path, *args: Any) -> None:
        write_files(folder, *args)
        file = next(folder.glob(f"rank-{world.rank:05d}-*"))
        os.truncate(file, file.stat().st_size // 2)
        world.die()

    training.steps(5)
    checkpoint.save(folder, state)
    torch.save(training.numbers(), world.folder / f"{world.rank}.pt")
    training.steps(1)
    if world.rank == 1:
        saving.write_files = write_half
    checkpoint.save(folder, state)


def go_on_from(rank: int, world: int, folder: Path) -> tuple[list[float], list[str]]:
    """What another start finds, and what its own next save leaves."""
    training = Training(rank)
    state = checkpoint.RunState(training.net, training.ensemble)
    training.index = checkpoint.load(folder, state, missing=0)
    found = training.numbers()
    training.steps(1)
    checkpoint.save(folder, state)
    return found, sorted(os.listdir(folder))


def late(world: World, *, local: bool = True) -> None:
    """Rank 1 comes to the middle of a cycle when all others have given up."""
    training = Training(world.rank, local=local)
    world.ensemble = training.ensemble
    with training.ensemble.guard():
        training.steps(6)
        if world.rank == 1:
            world.mark_fault()
            world.wait_for_the_others()
        training.steps(6)
