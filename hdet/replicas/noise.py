"""Warm noisy start: the replicas begin a little apart (Eq. 9)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ..core.validate import within
from ..tensors import dtensor as shards
from .topology import Replicas

__all__ = ["warm_noise_"]

Named = tuple[str, torch.Tensor]


@torch.no_grad()
def warm_noise_(
    parameters: Iterable[torch.Tensor | Named],
    nu: float = 0.01,
    seed: int = 0,
    replicas: Replicas | None = None,
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
            noise. Shards that are no DTensors count as whole tensors: name them by their rank.

    Each rank draws the noise of the full tensor, one after the other, on the CPU, and keeps its
    part. One small all_reduce for each mesh and sharding dimension adds up the norms of what is
    split; every rank of it must call this.

    Raises:
        ValueError: ``nu`` negative or not finite; a tensor that is not floating point, or Partial.
            Nothing is changed then.
    """
    within(
        nu, "nu", "[0, inf)", "it is the noise's norm relative to each tensor's, 0.01 in the paper"
    )
    named = [
        (str(i), entry) if isinstance(entry, torch.Tensor) else entry
        for i, entry in enumerate(parameters)
    ]
    _check(named)
    if nu == 0 or not named:
        return
    replica = (Replicas.default() if replicas is None else replicas).index
    norms = _norms([tensor for _, tensor in named])
    for (name, tensor), norm in zip(named, norms, strict=True):
        own = shards.local(tensor)
        if not own.numel():
            continue
        key = hashlib.sha256(f"warm_noise/{seed}/{replica}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        full = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        noise = shards.part_of(full, tensor).to(own.device)
        scale = nu * norm / math.sqrt(tensor.numel())  # stays on the device
        own.copy_(own + noise * scale)
        if own is not tensor:
            torch.autograd.graph.increment_version(tensor)  # a DTensor's version is not its shard's


def _check(named: Sequence[Named]) -> None:
    names = Counter(name for name, _ in named)
    for name, tensor in named:
        if names[name] > 1:
            raise ValueError(
                f"two parameters have the name {name}: each needs its own, or they get the same "
                "noise"
            )
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is a {tensor.dtype} tensor of layout {tensor.layout}: noise "
                "needs dense floating-point tensors"
            )
        shards.sharding_dims(tensor, f"parameter {name}")


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the full tensors, 0-d float32 on the device of each."""
    norms = [shards.local(tensor).float().norm() for tensor in tensors]
    # Squares of float32 are exact in float64: of what is not split the norm stays as it is.
    squares = torch.stack([norm.double().square().to(norms[0].device) for norm in norms])
    sums = shards.FullSums(tensors)(squares).sqrt().float()
    return [own.to(norm.device) for own, norm in zip(sums, norms, strict=True)]
