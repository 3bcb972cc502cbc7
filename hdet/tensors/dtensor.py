"""Tensors that are laid over a device mesh (DTensor): the shard of this rank, and sums over all
shards.

torch.distributed.tensor is imported only where there is a DTensor, and so has been imported
already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: object) -> bool:
    """Is it a DTensor, whatever its placements?"""
    return hasattr(tensor, "to_local") and isinstance(tensor, Tensor)


def local(tensor: Tensor) -> Tensor:
    """The tensor itself; of a DTensor its shard on this rank, which shares its memory and may be
    empty.

    Asked again whenever it is needed: a shard may move.
    """
    if not is_sharded(tensor):
        return tensor
    given: Any = tensor
    shard: Any = given._local_tensor  # to_local() makes a view of a parameter's, in 5 us
    return shard.wait() if type(shard) is not Tensor and hasattr(shard, "wait") else shard


@torch.no_grad()
def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`local` of each, detached: for whoever reads and writes parameters behind autograd's back.

    Asked again whenever it is needed.
    """
    return [local(t).detach() for t in tensors]


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Of all gradients there are, or of their shards on this rank: 0-d float64; 0 without any.
    Does not wait for the device."""
    gradients = local_parts([p.grad for p in parameters if p.grad is not None])
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    dense = [g for g in values if g.numel()]
    if not dense:
        return torch.zeros((), dtype=torch.float64)
    norms = [norm.double().to(dense[0].device) for norm in torch._foreach_norm(dense)]
    return torch.stack(norms).norm()


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(map(local, tensors))


def like(shard: Tensor, tensor: Tensor) -> Tensor:
    """`shard` as part of a DTensor that is laid out as `tensor`, or the shard itself where `tensor`
    is plain. No communication."""
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    given: Any = tensor
    shard, mesh = shard.detach(), given.device_mesh
    if shard.device.type == mesh.device_type:
        return DTensor.from_local(
            shard, mesh, given.placements, run_check=False, shape=tensor.shape,
            stride=tensor.stride(),
        )  # fmt: skip
    # offloaded: from_local would move it to the mesh's device
    made = torch.empty_like(given, dtype=shard.dtype)
    local(made).copy_(shard)
    return made


def reshard(model: nn.Module) -> None:
    """Shards were written: FSDP2 may hold gathered parameters after a forward pass without a
    backward, and would go on with those."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            given: Any = module
            given.reshard()


def alike(tensor: Any, other: Any) -> bool:
    """Are both plain, or both laid over the same mesh with the same placements?"""
    if not is_sharded(tensor) or not is_sharded(other):
        return is_sharded(tensor) == is_sharded(other)
    pairs = ((tensor.placements, other.placements), (tensor.device_mesh, other.device_mesh))
    return all(mine is its or mine == its for mine, its in pairs)


def check_alike(tensor: Tensor, param: Tensor, name: str, remedy: str) -> None:
    """Raises ValueError unless `tensor` is laid out as the parameter."""
    if not alike(tensor, param):
        raise ValueError(
            f"{name} is {described(tensor)}, the parameter {described(param)}: {remedy}"
        )


def described(tensor: Any) -> str:
    if not is_sharded(tensor):
        return "a plain tensor"
    return f"a DTensor with {list(tensor.placements)} on {tensor.device_mesh}"


def local_state(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state of a parameter, as it lies on this rank: DTensors as shards, also in lists."""
    if not is_sharded(param):
        return dict(state)
    return {key: mapped(value, local) for key, value in state.items()}


def is_plain(key: str) -> bool:
    """Is this entry of a DTensor's state a plain tensor? Counters and a norm are, as torch's step;
    and the scales of this rank's own blocks of codes (hdet/kernels/numbers.py), which no
    other sharding has."""
    return key.endswith(("step", "global_norm", "_scale"))


def state_like(entries: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """What `local_state` undoes. What `is_plain` stays a plain tensor."""
    if not is_sharded(param):
        return dict(entries)
    return {
        key: value if is_plain(key) else mapped(value, lambda shard: like(shard, param))
        for key, value in entries.items()
    }


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A value of a state with its tensors changed, also in lists."""
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return change(value) if isinstance(value, Tensor) else value


def gradient_on(gradient: Tensor, param: Tensor, name: str) -> Tensor:
    """The shard of a gradient that belongs to the parameter's shard.

    A gradient that is still a sum to be taken (Partial, as sequence parallelism leaves those of
    norms) is reduced, as torch's optimizers do: one collective. Raises ValueError for any other
    difference.
    """
    if alike(gradient, param):
        return local(gradient)
    given, own = cast(Any, gradient), cast(Any, param)
    if is_sharded(given) and is_sharded(own) and given.device_mesh == own.device_mesh:
        pairs = zip(given.placements, own.placements, strict=True)
        if all(one == other or one.is_partial() for one, other in pairs):
            return local(given.redistribute(placements=own.placements))
    raise ValueError(
        f"{name} is {described(gradient)}, the parameter {described(param)}: a gradient must be "
        "laid out as its parameter; use gradient.redistribute(mesh, placements), or parallelize "
        "the model before its optimizer is made"
    )


class FullSums:
    """Adds up numbers that every rank has for its own shard of each of some tensors.

    Each element of a full tensor counts once: sums run over the mesh dimensions that shard it, not
    over those that replicate it. One all_reduce for each mesh and sharding dimension, whatever the
    number of tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Raises ValueError for a Partial tensor."""
        self._together: dict[tuple[Any, ...], list[int]] = {}
        for i, tensor in enumerate(tensors):
            if dims := sharding_dims(tensor, f"tensor {i}"):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                self._together.setdefault((mesh, *dims), []).append(i)
        self._places: list[Tensor] = []

    def __call__(self, values: Tensor) -> Tensor:
        """(n,) -> (n,), the same on all ranks of a mesh.

        The host does not wait for the device, from the second call on.
        """
        if not self._places:
            self._places = [
                torch.tensor(places, device=values.device) for places in self._together.values()
            ]
        for (mesh, *over), places in zip(self._together, self._places, strict=True):
            summed = values[places].to(mesh.device_type)  # shards may be offloaded
            for dim in over:
                dist.all_reduce(summed, group=mesh.get_group(dim))
            values = values.index_copy(0, places, summed.to(values.device))
        return values


def part_of(full: Tensor, tensor: Tensor) -> Tensor:
    """The part of `full`, which every rank has, that belongs to this rank's shard of `tensor`.

    No communication.
    """
    if not is_sharded(tensor):
        return full
    from torch.distributed.tensor import distribute_tensor

    given: Any = tensor
    return local(distribute_tensor(full, given.device_mesh, given.placements, src_data_rank=None))


def sharding_dims(tensor: Tensor, name: str) -> tuple[int, ...]:
    """The dimensions of its mesh over which a tensor is split; () for a plain one.

    Raises ValueError for a Partial one.
    """
    if not is_sharded(tensor):
        return ()
    placements = cast(Any, tensor).placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{name} is {described(tensor)}: a sum that has not been taken; use redistribute to "
            "Replicate() or Shard() first"
        )
    return tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
