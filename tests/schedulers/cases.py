"""What is run twice, once with torch's OneCycleLR and once with hdet's OneCycleAutoLR: optimizers,
arguments, and one training step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import hdet
from tests.adversary.common import bits as exact
from tests.harness import Scripted

Params = list[dict[str, Any]]


def with_tensors(params: Params) -> Params:
    return [{**group, "lr": torch.tensor(0.5)} for group in params]


def sgd(params: Params) -> Optimizer:
    return SGD(params, lr=0.5, momentum=0.9)


def sgd_tensor_lr(params: Params) -> Optimizer:
    return sgd(with_tensors(params))


def sgd_shared_tensor_lr(params: Params) -> Optimizer:
    """torch puts this one tensor into every group."""
    return SGD(params, lr=torch.tensor(0.5), momentum=0.9)


def adamw(params: Params) -> Optimizer:
    return AdamW(params, lr=0.5, weight_decay=0.1)


def fused(params: Params) -> Optimizer:
    return hdet.FusedAdamW(params, lr=0.5, weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    optimizer: Callable[[Params], Optimizer]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return self.name

    @property
    def steps(self) -> int:
        a = self.arguments
        return a.get("total_steps") or a["epochs"] * a["steps_per_epoch"]


def _case(name: str, optimizer: Callable[[Params], Optimizer] = sgd, **arguments: Any) -> Case:
    length = {} if "epochs" in arguments else {"total_steps": 20}
    return Case(name, optimizer, {"max_lr": 0.05, **length, **arguments})


EACH = {"base_momentum": [0.8, 0.7], "max_momentum": [0.9, 0.95]}
CASES = [
    _case("cosine, momentum cycled"),
    _case("linear, three phases", three_phase=True, anneal_strategy="linear", pct_start=0.4),
    _case("max_lr, momenta per group", max_lr=[0.01, 0.1], **EACH),
    _case("betas cycled, AdamW, linear", adamw, max_lr=[0.01, 0.02], anneal_strategy="linear"),
    _case("betas per group, AdamW, three phases", adamw, three_phase=True, **EACH),
    _case("betas cycled, FusedAdamW", fused, max_lr=0.01),
    _case("momentum left alone", cycle_momentum=False),
    _case("tensor lr, tensor max_lr", sgd_tensor_lr, max_lr=torch.tensor(0.05)),
    _case("one tensor lr for all groups", sgd_shared_tensor_lr),
    _case("epochs and steps_per_epoch", epochs=4, steps_per_epoch=5),
    _case("total_steps wins over epochs", total_steps=12, epochs=99, steps_per_epoch=99),
    _case("pct_start 0.0, as torch takes it", pct_start=0.0),
    _case("peak in the last step", pct_start=0.99, total_steps=10, anneal_strategy="linear"),
    _case("large factors", div_factor=100.0, final_div_factor=1e6),
    _case("two steps", total_steps=2, pct_start=0.9),
]  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.second = nn.Parameter(torch.randn(4, 1, generator=generator))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.first).tanh() @ self.second


class Toy:
    """A small network with two parameter groups, under DDP where there is a process group, its
    optimizer and fixed data of this ``rank``; two of them with the same case are bitwise the
    same."""

    def __init__(self, optimizer: Callable[[Params], Optimizer], rank: int = 0) -> None:
        generator = torch.Generator().manual_seed(4 + rank)
        self.inputs, self.targets = (torch.randn(8, n, generator=generator) for n in (5, 1))
        self.net = Net()
        self.model = DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.optimizer = optimizer([{"params": [self.net.first]}, {"params": [self.net.second]}])

    def step(self) -> torch.Tensor:
        """Forward, backward, optimizer step; the scheduler is the caller's."""
        self.optimizer.zero_grad()
        loss = (self.model(self.inputs) - self.targets).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def parameters(self) -> list[torch.Tensor]:
        return [self.net.first.detach(), self.net.second.detach()]

    def take(self, other: Toy) -> None:
        """The parameters of another."""
        for own, theirs in zip(self.parameters(), other.parameters(), strict=True):
            own.copy_(theirs)


def pair(build: Any, case: Case, rank: int = 0, **more: Any) -> tuple[Toy, Any]:
    """(toy, scheduler) of a case, with torch's class or with ours."""
    toy = Toy(case.optimizer, rank)
    ours = {"model_sync_interval": 4} if build is hdet.OneCycleAutoLR else {}
    return toy, build(toy.optimizer, **{**copy.deepcopy(case.arguments), **ours, **more})


class Played(Scripted, hdet.SoftmaxController):
    """One to which a `OneCycleAutoLR` gives a knob for each parameter group."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.decay = None


def played(rho: float, factors: Sequence[float] = (), cycle: int = 1) -> Scripted:
    """A controller that plays a replica with the multiplier rho, and asks for factors of its knobs
    at the end of one cycle."""
    return Played([1.0] * cycle + [factors or 1.0], [rho] * (len(factors) or 2))


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


HYPERPARAMETERS = (
    "lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
    "weight_decay",
)  # fmt: skip


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Every group's scalar settings, tensors as (type, bytes): equal means bitwise equal and of the
    same kind."""
    return [
        {key: exact(group[key]) for key in HYPERPARAMETERS if key in group}
        for group in optimizer.param_groups
    ]
