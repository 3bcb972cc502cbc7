"""A training loop small enough to see through, for the tests of the published code's defects; and a
count of what it communicates.

Gradients are the same on every rank without any communication (they are computed from the step's
number alone), as DDP would leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hdet


def parameter(size: int = 6, fill: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((size,), fill, dtype=dtype).requires_grad_()


def shared_gradient(step: int, like: torch.Tensor) -> torch.Tensor:
    """The same numbers on every rank; torch's global generator is not used."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def optimizer_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            p.grad = shared_gradient(100 * step + i, p)
    optimizer.step()


def drop_in(
    params: Iterable[torch.Tensor] | list[dict[str, Any]],
    total: int = 40,
    interval: int = 5,
    **arguments: Any,
) -> hdet.OneCycleAutoLR:
    """AdamW under the published class's name; the optimizer is `.optimizer` of what is returned."""
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.0)
    return hdet.OneCycleAutoLR(optimizer, 0.05, total, model_sync_interval=interval, **arguments)


SPREAD = {"ensemble_lr_spread_ratio": 0.3}
ACTS = {**SPREAD, "enable_auto_lr": True, "auto_lr_warmup_steps": 0}
"""Of a `drop_in` whose controller acts from its first cycle on."""


def train(
    scheduler: hdet.OneCycleAutoLR,
    steps: int,
    loss: Callable[[int], Any] = lambda step: None,
    start: int = 0,
) -> None:
    for step in range(start, start + steps):
        optimizer_step(scheduler.optimizer, step)
        scheduler.step(loss(step))


class Watch(TorchDispatchMode):
    """Counts collectives and reads of a tensor's value by the host (each would wait for the device
    on CUDA)."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.host_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.collectives.append(func.name())
        reads = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        self.host_reads += func in reads
        return func(*args, **(kwargs or {}))
