"""What the documents leave to the reader: toys for a user's own model, data and functions, by the
names that the blocks call them."""

from __future__ import annotations

import datetime
import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hdet
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(8, 4, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def loss_fn(
    model: Callable[..., Any],
    batch: tuple[torch.Tensor, torch.Tensor],
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), (1 - label_smoothing) * batch[1])


def losses_of(model: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().flatten(1).mean(1)


class Names(dict[str, Any]):
    """The names of a block: its own, and toys that are made when it first asks for them."""

    def __missing__(self, name: str) -> Any:
        if name not in TOYS:
            raise KeyError(name)  # a builtin, or a NameError
        self[name] = TOYS[name](self)
        return self[name]


def _ensemble(names: Names) -> hdet.Ensemble:
    return hdet.Ensemble(
        names["optimizer"], names["scheduler"], knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(5)
    )


def _wrapped(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model


def _one_step(names: Names) -> Callable[..., torch.Tensor]:
    def train(step: int = 0) -> torch.Tensor:
        loss = loss_fn(names["ddp_model"], names["loader"][step % len(names["loader"])])
        loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        return loss

    return train


def _train_one_step(names: Names) -> Callable[[], None]:
    return lambda: names["ensemble"].step(names["train"]())


def _megatron(names: Names) -> Any:
    """The names of Megatron-Core's ProcessGroupCollection, for plain data parallelism over the
    world."""
    groups = SimpleNamespace(dp=dist.new_group(), expt_dp=dist.new_group())
    return SimpleNamespace(use_mpu_process_groups=lambda: groups)


TOYS: dict[str, Callable[[Names], Any]] = {
    "torch": lambda names: torch,
    "nn": lambda names: nn,
    "F": lambda names: F,
    "dist": lambda names: dist,
    "os": lambda names: os,
    "datetime": lambda names: datetime,
    "hdet": lambda names: hdet,
    "checkpoint": lambda names: hdet.checkpoint,
    "init_device_mesh": lambda names: init_device_mesh,
    "DistributedDataParallel": lambda names: nn.parallel.DistributedDataParallel,
    "fully_shard": lambda names: importlib.import_module("torch.distributed.fsdp").fully_shard,
    "model": lambda names: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)),
    "ddp_model": lambda names: _wrapped(names["model"]),
    "optimizer": lambda names: torch.optim.AdamW(names["model"].parameters(), lr=1e-3),
    "scheduler": lambda names: torch.optim.lr_scheduler.OneCycleLR(
        names["optimizer"], 1e-3, total_steps=2000
    ),
    "ensemble": _ensemble,
    "device": lambda names: torch.device("cpu"),
    "loader": lambda names: batches(60, dist.get_rank() if dist.is_initialized() else 0),
    "probe_batches": lambda names: batches(8, 1000),
    "held_out_batches": lambda names: batches(8, 2000),
    "batches": lambda names: batches(8, 1000),
    "loss_fn": lambda names: loss_fn,
    "losses_of": lambda names: losses_of,
    "loss": lambda names: torch.tensor(1.0),
    "tokens": lambda names: 64,
    "rank": lambda names: dist.get_rank() if dist.is_initialized() else 0,
    "steps": lambda names: 12,
    "folder": lambda names: tempfile.mkdtemp(),
    "train": _one_step,
    "train_one_step": _train_one_step,
    "ProcessGroupCollection": _megatron,
    "copy_masters_to_model": lambda names: lambda: None,
    "my_scheduler": lambda names: SimpleNamespace(
        step=lambda epoch: names["optimizer"].param_groups[0].update(lr=1e-3 / (1 + epoch))
    ),
    "epoch": lambda names: 1,
    "augment": lambda names: SimpleNamespace(alpha=0.4),
    "writer": lambda names: SimpleNamespace(add_scalar=None, add_text=None),
    "run": lambda names: SimpleNamespace(log=None, define_metric=lambda *args, **settings: None),
    "wandb": lambda names: SimpleNamespace(log=lambda record, step: None),
    "generator": lambda names: torch.Generator(),
    "scaler": lambda names: torch.amp.GradScaler("cpu", enabled=False),
}


def run(source: str, where: str, **given: Any) -> Names:
    """The names of a block that has run in a folder of its own, ``given`` in the place of toys."""
    torch.manual_seed(0)
    names, before = Names(given, __name__="__main__"), (Path.cwd(), dict(os.environ))
    shared = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(shared)  # what ranks write is one folder
        names["folder"] = shared[0]
    os.chdir(shared[0])
    try:
        exec(compile(source, where, "exec"), names)  # noqa: S102 - it runs the documents
    finally:
        os.chdir(before[0])
        os.environ.clear()
        os.environ.update(before[1])
    return names


def run_on_rank(rank: int, world: int, source: str, where: str) -> None:
    run(source, where)


def run_by_torchrun(source: str, where: str) -> None:
    run(source, where)
    dist.destroy_process_group()
