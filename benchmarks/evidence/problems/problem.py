"""What a problem is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
"""Tensors with the examples along their first dimension."""


@dataclass(frozen=True)
class Problem:
    """Everything but the optimizer. All functions are pure: equal arguments, equal results."""

    name: str
    steps: int
    """Optimizer steps of a run."""
    batch_size: int
    """Examples in a step, over all replicas; divisible by 8."""
    build: Callable[[int], nn.Module]
    """seed -> model"""
    groups: Callable[[nn.Module], list[dict[str, Any]]]
    """Named parameter groups with their weight decay."""
    batch: Callable[[int, int], Batch]
    """(seed, step) -> ``batch_size`` training examples."""
    spare: Callable[[int, int, int], Batch]
    """(seed, step, number) -> ``batch_size`` more examples of the kind that there are at this step,
    which no step trains on."""
    losses: Callable[[nn.Module, Batch], Tensor]
    """(examples,) training losses in nats."""
    validate: Callable[[nn.Module], float]
    """Mean held-out loss in nats, in eval mode, always of the same data."""


def drawn(kind: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A problem's `build`: a new model, whose first weights are a function of the seed."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return kind()

    return build


@torch.no_grad()
def mean_loss(
    model: nn.Module, losses: Callable[[nn.Module, Batch], Tensor], batches: Sequence[Batch]
) -> float:
    """Over the examples of all batches, in eval mode."""
    model.eval()
    found = torch.cat([losses(model, batch) for batch in batches]).mean().item()
    model.train()
    return found
