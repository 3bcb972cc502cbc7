"""Runs in each layout that a checkpoint has to carry, built alike on every rank; steps with data of their own number."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.harness import policies

TOTAL, INTERVAL = 40, 5


def data(step: int, stream: int, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + stream))


class Run:
    """A training run with a scheduler, a controller that moves, and dropout from a generator that ``extra`` carries."""

    def __init__(self, net: nn.Module, replicas: Replicas | None, make: Callable[..., Any], stream: int, **settings: Any) -> None:
        self.net, self.stream, self.index = net, stream, 0
        self.optimizer = make([p for p in net.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, TOTAL, cycle_momentum=False)
        self.ensemble = hdet.Ensemble(
            self.optimizer,
            self.scheduler,
            knobs=[hdet.LearningRate(0.3)],
            replicas=replicas,
            **policies(every=INTERVAL, **{"controller": hdet.SoftmaxController(decay=None), **settings}),
        )
        self.generator = torch.Generator().manual_seed(stream)
        self.extra: dict[str, Any] = {}

    @property
    def state(self) -> checkpoint.RunState:
        self.extra |= {"generator": self.generator.get_state(), "index": self.index}
        return checkpoint.RunState(self.net, self.ensemble, self.extra)

    def resume(self, path: Path | str) -> Run:
        # DDP orders its buckets anew after its first backward pass; the order in which more than two ranks' gradients are added follows.
        self.loss().backward()
        self.optimizer.zero_grad()
        state = self.state
        checkpoint.load(path, state)
        self.generator.set_state(self.extra["generator"])
        self.index = self.extra["index"]
        return self

    def loss(self) -> torch.Tensor:
        x = data(self.index, self.stream)
        keep = torch.rand(x.shape, generator=self.generator) > 0.1
        return (self.net(x * keep) - x.sum(1, keepdim=True)).square().mean()

    def step(self) -> None:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ensemble.step(loss)
        self.index += 1

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.step()
        return self

    def facts(self) -> dict[str, Any]:
        """All that must be equal bit for bit, as bytes and numbers."""
        states = self.optimizer.state_dict()["state"]
        return {
            "model": {name: bits(t) for name, t in self.net.state_dict().items()},
            "optimizer": {(i, key): bits(value) for i, entries in states.items() for key, value in entries.items()},
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "ensemble": self.ensemble.state_dict(),
        }


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        own = value.to_local() if hasattr(value, "to_local") else value
        return own.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [bits(v) for v in value] if isinstance(value, list) else value


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


# -- optimizers --------------------------------------------------------------------------------------------------------------


def torch_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)


def torch_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=3e-3, momentum=0.9, dampening=0.5)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=3e-3)


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return hdet.FusedAdamW(params, lr=3e-3, weight_decay=0.01)


def fused_split(params: Any) -> torch.optim.Optimizer:
    return hdet.FusedAdamW(params, lr=3e-3, weight_decay=0.01, master_weights="split", moment_dtype=torch.bfloat16)


def fused_base(params: Any) -> torch.optim.Optimizer:
    return hdet.FusedAdamW(params, lr=3e-3, weight_decay=0.01, decay_at="base")


def fused_base_fp32(params: Any) -> torch.optim.Optimizer:
    return hdet.FusedAdamW(params, lr=3e-3, weight_decay=0.01, decay_at="base", master_weights="fp32")


def fused_fp32(params: Any) -> torch.optim.Optimizer:
    return hdet.FusedAdamW(params, lr=3e-3, weight_decay=0.01, master_weights="fp32")


# -- layouts -----------------------------------------------------------------------------------------------------------------


def hsdp(rank: int, world: int, make: Callable[..., Any] = torch_adamw, *, bf16: bool = False, shard: int = 2, **settings: Any) -> Run:
    """FSDP2 on a mesh of replicas x shards."""
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = mlp()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return Run(net, Replicas.from_mesh(mesh), make, rank, **settings)


def hsdp_bf16(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    return hsdp(rank, world, make, bf16=True, **settings)


def local_fsdp(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    """A one-dimensional FSDP mesh for each replica: nothing travels between replicas in a cycle."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = mlp()
    fully_shard(net, mesh=mesh["dp_shard"])
    return Run(net, Replicas.from_mesh(mesh), make, rank, gradients="local", **{"moments": "keep", **settings})


def local_keep(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    return Run(mlp(), Replicas.from_group(), make, rank, gradients="local", **{"moments": "keep", **settings})


def local_average(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    return local_keep(rank, world, make, moments="average", **settings)


def local_reset(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    return local_keep(rank, world, make, moments="reset", **settings)


def table(ranks: list[list[int]]) -> Replicas:
    """Replicas by their ranks, [replica][member]; every rank makes all groups."""
    me = dist.get_rank()
    peers = [dist.new_group(list(column)) for column in zip(*ranks, strict=True)]
    index, member = next((r, m) for r, row in enumerate(ranks) for m, rank in enumerate(row) if rank == me)
    return Replicas(index, len(ranks), peers[member], ranks=ranks, member=member, world_group=dist.group.WORLD)


def alone(make: Callable[..., Any] = torch_adamw, net: nn.Module | None = None, **settings: Any) -> Run:
    """One replica, without torch.distributed."""
    return Run(mlp() if net is None else net, None, make, 0, **{"controller": None, **settings})


def streaming(rank: int, world: int, make: Callable[..., Any] = torch_adamw) -> Run:
    return ddp(rank, world, make, converge=converge.Streaming(2))


def overlapped(rank: int, world: int, make: Callable[..., Any] = torch_adamw) -> Run:
    return ddp(rank, world, make, converge=converge.Overlapped(2))


def compressed(rank: int, world: int, make: Callable[..., Any] = torch_adamw) -> Run:
    return ddp(rank, world, make, converge=converge.Compressed("int8"))


def exact_local(rank: int, world: int, make: Callable[..., Any]) -> Run:
    return ddp(rank, world, make, converge=converge.ExactLocal())


def ddp(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    small = make in (fused_split, fused_fp32, fused_base_fp32)
    net = DistributedDataParallel(mlp(torch.bfloat16 if small else torch.float32))
    return (BfloatRun if small else Run)(net, None, make, rank, **settings)


class BfloatRun(Run):
    def loss(self) -> torch.Tensor:
        x = data(self.index, self.stream).bfloat16()
        keep = torch.rand(x.shape, generator=self.generator) > 0.1
        return (self.net(x * keep) - x.sum(1, keepdim=True)).float().square().mean()


def groups(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    """Two replicas of world / 2 ranks each, data parallel inside and between."""
    half = world // 2
    replicas = table([list(range(half)), list(range(half, world))])
    return Run(DistributedDataParallel(mlp()), replicas, make, rank, **settings)


class Shard(nn.Module):
    """A hidden layer cut over two ranks by hand: tensors of one name and other contents; norms on both."""

    def __init__(self, group: dist.ProcessGroup, place: int) -> None:
        super().__init__()
        whole = mlp()
        self.group = group
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 3)
        self.down = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(whole[0].weight[3 * place : 3 * place + 3])
            self.up.bias.copy_(whole[0].bias[3 * place : 3 * place + 3])
            self.down.weight.copy_(whole[2].weight[:, 3 * place : 3 * place + 3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.down(torch.tanh(self.up(self.norm(x))))
        total = partial.detach().clone()
        dist.all_reduce(total, group=self.group)
        return partial + (total - partial.detach())


def shards(rank: int, world: int, make: Callable[..., Any] = torch_adamw, **settings: Any) -> Run:
    """tp 2 x dp 2: ranks {0, 1} and {2, 3} are replicas; gradients are reduced over {0, 2} and {1, 3} by DDP."""
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = table([[0, 1], [2, 3]])
    net = DistributedDataParallel(Shard(tp, rank % 2), process_group=replicas.peer_group)
    return Run(net, replicas, make, rank // 2, **settings)
