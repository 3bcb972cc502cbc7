"""Groups of replicas train at 0.001, 0.0005, 0.0001 and 0.005; the base value moves to the best.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m examples.four_groups
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 -m examples.four_groups  # groups of two
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m examples.four_groups --fixed 0.005

From the root of the repository; a minute on two cores. Each group has batches and gradients of its
own, and all are averaged every ``--cycle`` steps. With ``--fixed`` all groups train at that rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR

import hdet

RATES = [0.001, 0.0005, 0.0001, 0.005]
INPUTS, CLASSES, WIDTH = 16, 8, 256


def student() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(INPUTS, WIDTH), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class Teacher:
    """Draws points, and a class for each by a network of its own."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self.weights = [
            torch.randn(rows, columns, generator=draw) * 2.3 / rows**0.5
            for rows, columns in ((INPUTS, 64), (64, 64), (64, CLASSES))
        ]

    def batch(self, draw: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        points = torch.randn(size, INPUTS, generator=draw)
        first, second, last = self.weights
        odds = torch.softmax(2 * (points @ first).tanh() @ second.tanh() @ last, 1)
        return points, torch.multinomial(odds, 1, generator=draw)[:, 0]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cycle", type=int, default=50, help="steps between averages")
    parser.add_argument("--rate", type=float, default=0.0001, help="base value to begin with")
    parser.add_argument("--fixed", type=float, help="all groups train at this rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> tuple[list[Any], float]:
    """On each rank of a process group. Returns hdet's records and the loss on new data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = world // len(RATES)
    groups = [list(range(first, first + size)) for first in range(0, world, size)]
    torch.manual_seed(args.seed)
    model: nn.Module = student()
    wrapped = model
    if size > 1:  # ranks of a group share their gradients
        own = [dist.new_group(ranks) for ranks in groups][rank // size]
        wrapped = DDP(model, process_group=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.fixed or args.rate)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, 5 * (1 - step / args.steps)))
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler,
        knobs=[hdet.LearningRate(0) if args.fixed else hdet.LearningRate(values=RATES)],
        controller=None if args.fixed else hdet.BestValueController(),
        replicas=hdet.Replicas.from_group(groups),
        sync=hdet.Sync(args.cycle, gradients="local", moments="keep"),
        total_steps=args.steps,
        seed=args.seed,
        log=show if rank == 0 else None,
    )
    teacher, draw = Teacher(), torch.Generator().manual_seed(1000 * args.seed + rank)
    for _ in range(args.steps):
        points, classes = teacher.batch(draw, 64)
        loss = cross_entropy(wrapped(points), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
    points, classes = teacher.batch(torch.Generator().manual_seed(1), 8192)
    with torch.no_grad():  # the last step has ended a cycle, so replicas are equal
        loss = cross_entropy(model(points), classes)
    return ensemble.history, float(loss)


def show(record: Any, step: int) -> None:
    """Each group's rate and loss in the cycle that has ended, and the base value of the next."""
    base = record["values"]["lr"]
    before = base / record["record"]["decisions"][0]["factor"]
    rates = [before * rho for rho in record["multipliers"]["lr"]]
    groups = [f"{rate:.6f} {loss:.3f}" for rate, loss in zip(rates, record["losses"], strict=True)]
    print(f"step {step:5d} | {' | '.join(groups)} | base {base:.6f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("rate and loss of each group in each cycle, and the base value after it")
    _, final = train(arguments())
    if dist.get_rank() == 0:
        print(f"loss on new data {final:.4f}")
    dist.destroy_process_group()
