"""Parameters that are laid over a device mesh beside the same plain ones, models of torch's
parallel modules, and distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from hdet.tensors import dtensor as shards


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def distributed(tensor: Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def full(tensor: Any) -> Tensor:
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        is_bits = tensor.dtype == torch.int16  # which neither gloo nor NCCL knows
        wide = tensor.to(torch.int32) if is_bits else tensor.detach()
        return wide.full_tensor().to(tensor.dtype)


class Twins:
    """Equal parameters, laid over a mesh and plain, each with an optimizer. Gradients have the same
    bits."""

    def __init__(
        self,
        make: Callable[[list[Parameter]], Any],
        sizes: Sequence[int],
        placements: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        tolerance: float = 0.0,
    ) -> None:
        """`placements` of each of `shapes`; `tolerance` of checks that name none."""
        self.tolerance = tolerance
        self.mesh, self.placements = mesh_of(*sizes), placements
        self.shapes, self.dtype = shapes, dtype
        self.plain = [Parameter(tensor) for tensor in self._values(0)]
        self.laid = [Parameter(tensor) for tensor in self._laid(0)]
        self.a, self.b = make(self.laid), make(self.plain)

    def _values(self, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]

    def _laid(self, step: int) -> list[Tensor]:
        pairs = zip(self._values(step), self.placements, strict=True)
        return [distributed(tensor, self.mesh, *placements) for tensor, placements in pairs]

    def gradients(self, step: int) -> None:
        for params, values in ((self.plain, self._values), (self.laid, self._laid)):
            for param, gradient in zip(params, values(100 + step), strict=True):
                param.grad = gradient

    def both(self, do: Callable[[Any], Any]) -> None:
        do(self.a)
        do(self.b)

    def go(self, steps: range) -> None:
        for step in steps:
            self.gradients(step)
            self.both(lambda optimizer: optimizer.step())

    def check(self, tolerance: float | None = None) -> None:
        """Parameters and states; without a norm moments and counters are equal in any case."""
        tolerance = self.tolerance if tolerance is None else tolerance
        for one, other in zip(self.laid, self.plain, strict=True):
            close(full(one), other.detach(), tolerance)
            ours, theirs = self.a.state[one], self.b.state[other]
            assert ours.keys() == theirs.keys()
            for key in ours:
                lists = [x[key] if isinstance(x[key], list) else [x[key]] for x in (ours, theirs)]
                for held, expected in zip(*lists, strict=True):
                    assert held.dtype == expected.dtype
                    assert shards.is_plain(key) or shards.alike(held, one)
                    if tolerance == 0.0 or not key.startswith(("master", "remainder", "replica")):
                        assert torch.equal(full(held), expected)

    def check_masters(self, replicas: int) -> None:
        for param, other in zip(self.laid, self.plain, strict=True):
            for k in range(replicas):
                ours, expected = self.a.masters([param], k)[0], self.b.masters([other], k)[0]
                assert (ours is None) == (expected is None)
                if ours is not None:
                    close(full(shards.like(ours, param)), expected, self.tolerance)


def close(one: Tensor, other: Tensor, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# -- models ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width + 4), nn.Linear(width + 4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model_of(kind: str, dtype: torch.dtype = torch.float32, width: int = 6) -> nn.Module:
    model = nn.Sequential(Block(width), Block(width), nn.Linear(width, 1)).to(dtype)
    if kind == "fsdp":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    if kind == "hsdp":
        return fully_shard(model, mesh=mesh_of(2, dist.get_world_size() // 2))
    if kind in ("tp", "fsdp x tp"):
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        for block in model[:2]:
            parallelize_module(block, mesh["tp"], plan)
        last = RowwiseParallel(input_layouts=Shard(1), use_local_output=False)
        parallelize_module(model[2], mesh["tp"], last)
        return model if kind == "tp" else fully_shard(model, mesh=mesh["dp"])
    return model


def train(model: nn.Module, optimizer: Any, kind: str, steps: range, clip: float = 0.0) -> None:
    """The same batch on every rank: the mean over two ranks has the bits of each."""
    width = model[2].in_features if isinstance(model, nn.Sequential) else model.norm.weight.numel()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(3, 4, width, generator=generator).to(next(model.parameters()).dtype)
        if "tp" in kind:
            x = x.chunk(2, 1)[dist.get_rank() % 2]
        optimizer.zero_grad()
        out = model(x)
        (out.full_tensor() if isinstance(out, DTensor) else out).square().sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def weights(model: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """Copies of the parameters; with an optimizer, also of moments as they are saved."""
    states = {} if optimizer is None else optimizer.state_dict()["state"]
    moments = [
        state[key] for state in states.values() for key in state if "exp" in key or "mom" in key
    ]
    return [full(tensor).clone() for tensor in [*model.parameters(), *moments]]


def assert_all_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# -- checkpoints -----------------------------------------------------------------------------------


def save(folder: str, model: nn.Module, optimizer: Any) -> None:
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: Any) -> None:
    before = weights(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    assert_all_equal(before, weights(model))  # it has stepped at rate 0, to have a state
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
