"""Warm noisy start: the replicas begin a little apart (Eq. 9)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .core.validate import within
from .replicas import Replicas
from .tensors import dtensor as shards

__all__ = ["Slice", "warm_noise_"]

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Slice:
    """Which part of a full tensor a plain tensor is, where a model is split by hand (a DTensor says
    so itself)."""

    shape: Sequence[int]
    """of the full tensor"""
    start: Sequence[int]
    """of the part in it, for each dimension"""
    group: dist.ProcessGroup
    """whose ranks hold all parts, each once: it adds up the squares of the full tensor's norm"""

    def cut(self, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        for dim, (start, length) in enumerate(zip(self.start, like.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full

    def check(self, part: torch.Tensor, name: str) -> None:
        sizes = [tuple(self.shape), tuple(self.start), tuple(part.shape)]
        if len({len(size) for size in sizes}) != 1 or any(
            not 0 <= start <= whole - length for whole, start, length in zip(*sizes, strict=True)
        ):
            raise ValueError(
                f"{name} of shape {sizes[2]} is no slice from {sizes[1]} of a tensor of shape "
                f"{sizes[0]}"
            )


@torch.no_grad()
def warm_noise_(
    parameters: Iterable[torch.Tensor | Named],
    nu: float = 0.01,
    seed: int = 0,
    replicas: Replicas | None = None,
    slices: Mapping[torch.Tensor, Slice] | None = None,
) -> None:
    """Eq. 9, per tensor and in place: theta_r <- theta_0 + eps_r, eps ~ N(0, nu^2 ||theta_0||^2 /
    d), d = elements of the tensor.

    So the noise has nu times the tensor's own norm. It is a function of (seed, replica, tensor,
    element of the full tensor): torch's generators are not touched, and a run repeated with the
    same seed gets the same noise on any device and however the tensor is split: the ranks of a
    replica get the slices that belong to their shards, and the same noise where they hold the same
    tensor. Call it after wrapping the model (DDP copies rank 0's weights to everyone), before the
    first step.

    Args:
        parameters: tensors, known by their place in the list, or pairs (name, tensor) as of
            ``model.named_parameters()``, known by their name. Use names where ranks of one replica
            hold different lists (pipeline stages, experts), so that equal places do not get equal
            noise. DTensors need nothing else.
        slices: what part of a full tensor a plain tensor is. Whatever is not listed is whole on
            this rank.

    Each rank draws the noise of the full tensor, one after the other, on the CPU, and keeps its
    part. One small all_reduce for each mesh, group or sharding dimension adds up the norms of what
    is split; every rank of it must call this.

    Raises:
        ValueError: ``nu`` negative or not finite; a tensor that is not floating point, or Partial;
            a slice that does not fit. Nothing is changed then.
    """
    if isinstance(parameters, torch.Tensor):
        raise TypeError(
            "parameters must be a list of tensors, got one tensor: its rows would be taken for "
            "parameters; pass [tensor]"
        )
    within(
        nu,
        "nu",
        "[0, inf)",
        "it is the noise's norm relative to each tensor's (the paper's is 0.01)",
    )
    named = [
        (str(i), entry) if isinstance(entry, torch.Tensor) else entry
        for i, entry in enumerate(parameters)
    ]
    names, tensors, slices = (
        [name for name, _ in named],
        [tensor for _, tensor in named],
        slices or {},
    )
    _check(named, slices)
    if nu == 0:
        return
    replica = (Replicas.default() if replicas is None else replicas).index
    norms = _norms(tensors, slices)
    for name, tensor, norm in zip(names, tensors, norms, strict=True):
        shape = torch.Size(slices[tensor].shape) if tensor in slices else tensor.shape
        own = shards.local(tensor)
        if not own.numel():
            continue
        key = hashlib.sha256(f"warm_noise/{seed}/{replica}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        full = torch.randn(shape, generator=generator, dtype=torch.float32)
        noise = (
            slices[tensor].cut(full, own) if tensor in slices else shards.part_of(full, tensor)
        ).to(own.device)
        scale = nu * norm / math.sqrt(shape.numel())  # stays on the device
        own.copy_(own + noise * scale)
        if own is not tensor:
            torch.autograd.graph.increment_version(tensor)  # a DTensor's version is not its shard's


def _check(named: Sequence[Named], slices: Mapping[torch.Tensor, Slice]) -> None:
    for name, tensor in named:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is a {tensor.dtype} tensor of layout {tensor.layout}: noise "
                "needs dense floating-point tensors"
            )
        shards.sharding_dims(tensor, f"parameter {name}")
        if tensor in slices:
            if shards.is_sharded(tensor):
                raise ValueError(
                    f"parameter {name} is a DTensor, which knows what part it is: leave it out of "
                    "slices"
                )
            slices[tensor].check(tensor, f"parameter {name}")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(
            f"two parameters have the name {twice[0]}: each needs its own, or they get the same "
            "noise"
        )


def _norms(
    tensors: Sequence[torch.Tensor], slices: Mapping[torch.Tensor, Slice]
) -> list[torch.Tensor]:
    """Of the full tensors, 0-d float32 on the device of each."""
    norms = [shards.local(tensor).float().norm() for tensor in tensors]
    split = [
        i
        for i, tensor in enumerate(tensors)
        if tensor in slices or shards.sharding_dims(tensor, "")
    ]
    by_device: dict[torch.device, list[int]] = {}
    for i in split:
        by_device.setdefault(norms[i].device, []).append(i)
    for places in by_device.values():
        groups = [slices[tensors[i]].group if tensors[i] in slices else None for i in places]
        sums = shards.FullSums([tensors[i] for i in places], groups)(
            torch.stack([norms[i].double().square() for i in places])
        )
        for i, norm in zip(places, sums.sqrt().float(), strict=True):
            norms[i] = norm
    return norms
