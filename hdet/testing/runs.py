"""A loop that contracts train, and processes with a group."""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..converge.sync import Sync
from ..ensemble import Ensemble
from ..knobs import LearningRate
from ..replicas.coresident import CoresidentReplicas

__all__ = ["Loop", "run_on_ranks"]


class Loop:
    """A user's loop on a toy: one replica a process, or ``together`` of them in this one."""

    def __init__(
        self, optimizer: Callable[..., Any], sync: Sync, together: int = 1, controller: Any = None
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        is_shared = dist.is_initialized() and sync.gradients == "shared"
        self.model = nn.parallel.DistributedDataParallel(self.net) if is_shared else self.net
        self.replicas = CoresidentReplicas(self.net, together) if together > 1 else None
        self.optimizer, self.together, self.index = optimizer(self.net.parameters()), together, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.02, total_steps=60, cycle_momentum=False
        )
        self.controller = controller and controller(self.net)
        self.ensemble = Ensemble(
            self.optimizer, scheduler, knobs=[LearningRate(0.3)], replicas=self.replicas, sync=sync,
            controller=self.controller,
        )  # fmt: skip
        self.before = self.weights()  # the last ``ensemble.step``

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()

    def step(
        self, count: int = 1, losses: Sequence[float | None] | None = None, is_lost: bool = False
    ) -> torch.Tensor:
        """``losses`` are reported in the place of those of the replicas; None: nothing is."""
        for _ in range(count):
            self.optimizer.zero_grad()
            for k in range(self.together):
                draw = torch.Generator().manual_seed(100 * self.index + self.rank + k)
                x = torch.randn(8, 6, generator=draw)
                with nullcontext() if self.replicas is None else self.replicas.use(k):
                    loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    told = loss.detach() if losses is None else losses[k]
                    if told is not None:
                        self.ensemble.observe(told)
            self.optimizer.step()
            if is_lost:
                next(self.net.parameters()).data.fill_(torch.nan)
            self.before = self.weights()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a replica is left out
                self.ensemble.step()
            self.index += 1
        return self.weights()

    def saved(self) -> dict[str, Any]:
        parts = (self.net, self.optimizer, self.ensemble)
        return copy.deepcopy({"states": [of.state_dict() for of in parts], "index": self.index})

    def load(self, saved: dict[str, Any]) -> Loop:
        parts: Any = (self.net, self.optimizer, self.ensemble)
        for part, state in zip(parts, copy.deepcopy(saved["states"]), strict=True):
            part.load_state_dict(state)
        self.index = saved["index"]
        return self


def run_on_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(*args)`` in new processes with a gloo group and the environment of torchrun;
    results by rank. All must pickle."""
    is_there = "forkserver" in multiprocessing.get_all_start_methods()
    start: Any = multiprocessing.get_context("forkserver" if is_there else "spawn")
    if is_there:  # which imports once for all
        start.set_forkserver_preload(["torch.distributed", "torch._dynamo", "hdet.testing.runs"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, start) as pool:
        calls = [pool.submit(_on_rank, folder, r, world, function, args) for r in range(world)]
        return [call.result() for call in calls]


def _on_rank(folder: str, rank: int, world: int, function: Callable[..., Any], args: Any) -> Any:
    torch.set_num_threads(1)
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
    }  # fmt: skip
    os.environ |= {name: str(value) for name, value in place.items()}
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = function(*args)
    dist.barrier()  # nobody leaves while others still read
    return result
