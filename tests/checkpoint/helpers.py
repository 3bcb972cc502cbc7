"""Runs in each layout that a checkpoint has to carry, and the optimizers that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet import checkpoint, converge
from hdet.replicas import Replicas

from .. import harness
from ..adversary.common import bits


class Run(harness.Run):
    """With a controller that moves, and dropout from a generator that ``extra`` carries."""

    def __init__(self, net: nn.Module, replicas: Any, make: Any, stream: int, **settings: Any):
        given = {} if replicas is None else {"replicas": replicas}
        settings = {"controller": hdet.SoftmaxController(decay=None), **given, **settings}
        super().__init__(stream, net=net, ddp=False, optimizer=make, weight_decay=0.01, **settings)
        self.losses = self.dropped
        self.generator = torch.Generator().manual_seed(stream)
        self.extra: dict[str, Any] = {}

    def dropped(self, data: harness.Batch) -> torch.Tensor:
        x, y = data
        kept = torch.rand(x.shape, generator=self.generator) > 0.1
        return harness.losses_of(self.net, (x * kept, y))

    @property
    def state(self) -> checkpoint.RunState:
        self.extra |= {"generator": self.generator.get_state(), "index": self.index}
        return checkpoint.RunState(self.net, self.ensemble, self.extra)

    def resume(self, path: Path | str) -> Run:
        # DDP orders its buckets, and the sums of gradients, anew after its first backward pass.
        self.backward()
        self.optimizer.zero_grad()
        checkpoint.load(path, self.state)
        return self.resumed()

    def resumed(self) -> Run:
        """Once `extra` has been loaded."""
        self.generator.set_state(self.extra["generator"])
        self.index = self.extra["index"]
        return self

    def facts(self) -> dict[str, Any]:
        """All that must be equal bit for bit, as bytes and numbers."""
        return {
            "model": bits(dict(self.net.state_dict())),
            "optimizer": bits(self.optimizer.state_dict()["state"]),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "ensemble": self.ensemble.state_dict(),
        }


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


torch_adamw, fused_adamw, plain_sgd = torch.optim.AdamW, hdet.FusedAdamW, torch.optim.SGD
fused_split = partial(hdet.FusedAdamW, master_weights="split", moment_dtype=torch.bfloat16)
fused_fp32 = partial(hdet.FusedAdamW, master_weights="fp32")
schedule_free = partial(hdet.FusedScheduleFreeAdamW, betas=(0.8, 0.999))
fused_base = partial(hdet.FusedAdamW, decay_at="base")
fused_base_fp32 = partial(hdet.FusedAdamW, decay_at="base", master_weights="fp32")


class FusedEightBit(hdet.FusedAdamW):
    """Moments in 8 bits, also of tensors as small as those here."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, moment_dtype="8bit", **settings)

    def _layout(self, param: torch.Tensor) -> Any:
        return replace(super()._layout(param), moment_dtype=torch.uint8)


def torch_sgd(params: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Its decay is in the momentum, which so differs between replicas."""
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5, weight_decay=weight_decay)


Make = Callable[..., Any]


def hsdp(
    rank: int, world: int, make: Make = torch_adamw, *, bf16: bool = False, shard: int = 2,
    **settings: Any,
) -> Run:  # fmt: skip
    """FSDP2 on a mesh of replicas x shards."""
    shape, names = (world // shard, shard), ("dp_replicate", "dp_shard")
    mesh, net = init_device_mesh("cpu", shape, mesh_dim_names=names), mlp()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return Run(net, Replicas.from_mesh(mesh), make, rank, **settings)


hsdp_bf16 = partial(hsdp, bf16=True)


def local_fsdp(rank: int, world: int, make: Make = torch_adamw, **settings: Any) -> Run:
    """A one-dimensional FSDP mesh for each replica: nothing travels between replicas in a cycle."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net, own = mlp(), {"gradients": "local", "moments": "keep", **settings}
    fully_shard(net, mesh=mesh["dp_shard"])
    return Run(net, Replicas.from_mesh(mesh), make, rank, **own)


def local(rank: int, world: int, make: Make = torch_adamw, **settings: Any) -> Run:
    own = {"gradients": "local", "moments": "keep", **settings}
    return Run(mlp(), Replicas.from_group(), make, rank, **own)


outer = partial(local, converge=converge.Outer())
outer_fsdp = partial(local_fsdp, converge=converge.Outer())


def alone(make: Make = torch_adamw, net: nn.Module | None = None, **settings: Any) -> Run:
    """One replica, without torch.distributed."""
    return Run(mlp() if net is None else net, None, make, 0, **{"controller": None, **settings})


def ddp(rank: int, world: int, make: Make = torch_adamw, **settings: Any) -> Run:
    """In bfloat16 if the optimizer keeps master weights."""
    small = "master_weights" in getattr(make, "keywords", {})
    net = DistributedDataParallel(mlp(torch.bfloat16 if small else torch.float32))
    return Run(net, None, make, rank, **settings)


def one_fsdp(rank: int, world: int, make: Make = torch_adamw, **settings: Any) -> Run:
    """All ranks are one replica."""
    net = mlp()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    return Run(net, None, make, 0, **settings)


one_worker = {"converge": converge.Outer(), "controller": None, "spread": 0.0}
outer_equal, outer_shards = partial(ddp, **one_worker), partial(one_fsdp, **one_worker)
compressed = partial(ddp, converge=converge.Compressed("int8"))
exact_local = partial(ddp, converge=converge.ExactLocal())


def drop_in(rank: int, world: int, make: Make = torch_adamw) -> Run:
    """The schedule and its Ensemble in one."""
    run = ddp(rank, world, make, controller=None)
    run.ensemble.close()
    run.scheduler = hdet.OneCycleAutoLR(
        run.optimizer, 3e-3, 40, auto_lr_warmup_steps=0, model_sync_interval=5, rank=rank,
        world_size=world,
    )  # fmt: skip
    run.ensemble = run.scheduler.ensemble
    return run


def groups(rank: int, world: int, make: Make = torch_adamw, **settings: Any) -> Run:
    """Two replicas of world / 2 ranks each, data parallel inside and between."""
    half = world // 2
    replicas = Replicas.from_group([list(range(half)), list(range(half, world))])
    return Run(DistributedDataParallel(mlp()), replicas, make, rank, **settings)


class Shard(nn.Module):
    """A hidden layer cut over two ranks by hand: one name, other contents; norms on both."""

    def __init__(self, group: dist.ProcessGroup, place: int) -> None:
        super().__init__()
        up, _, down = mlp()
        part = slice(4 * place, 4 * place + 4)
        self.group, self.norm = group, nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight[part])
            self.up.bias.copy_(up.bias[part])
            self.down.weight.copy_(down.weight[:, part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.down(torch.tanh(self.up(self.norm(x))))
        total = partial.detach().clone()
        dist.all_reduce(total, group=self.group)
        return partial + (total - partial.detach())


def shards(rank: int, world: int, make: Make = torch_adamw, **settings: Any) -> Run:
    """tp 2 x dp 2: ranks {0, 1} and {2, 3} are replicas; DDP is over {0, 2} and {1, 3}."""
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = Replicas.from_group([[0, 1], [2, 3]])
    net = DistributedDataParallel(Shard(tp, rank % 2), process_group=replicas.peer_group)
    return Run(net, replicas, make, rank // 2, **settings)
