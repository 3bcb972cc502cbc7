"""Warm noisy start: the replicas begin a little apart (Eq. 9)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from .replicas import Replicas

__all__ = ["warm_noise_"]


@torch.no_grad()
def warm_noise_(parameters: Iterable[torch.Tensor], nu: float = 0.01, seed: int = 0, replicas: Replicas | None = None) -> None:
    """Eq. 9, per tensor and in place: theta_r <- theta_0 + eps_r, eps ~ N(0, nu^2 ||theta_0||^2 / d), d = elements of the tensor.

    So the noise has nu times the tensor's own norm. It is a function of (seed, replica, place of the tensor in the list):
    torch's generators are not touched, and a run repeated with the same seed gets the same noise on any device.
    Call it after wrapping the model in DDP, which copies rank 0's weights to everyone.

    Raises:
        ValueError: ``nu`` negative or not finite; a tensor that is not floating point. Nothing is changed then.
    """
    if isinstance(parameters, torch.Tensor):
        raise TypeError("parameters must be a list of tensors, got one tensor: its rows would be taken for parameters; pass [tensor]")
    if not (isinstance(nu, (int, float)) and math.isfinite(nu) and nu >= 0):
        raise ValueError(f"nu must be a number >= 0, got {nu!r}: it is the noise's norm relative to each tensor's (the paper's is 0.01)")
    tensors = list(parameters)
    for i, tensor in enumerate(tensors):
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise ValueError(
                f"parameter {i} is a {tensor.dtype} tensor of layout {tensor.layout}: noise needs dense floating-point tensors"
            )
    replica = (Replicas.default() if replicas is None else replicas).index
    for i, tensor in enumerate(tensors):
        if not tensor.numel() or nu == 0:
            continue
        key = hashlib.sha256(f"warm_noise/{seed}/{replica}/{i}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device)
        scale = nu * tensor.float().norm() / math.sqrt(tensor.numel())  # stays on the device
        tensor.copy_(tensor + noise * scale)
