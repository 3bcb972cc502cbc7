"""What a problem is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
"""Tensors with the examples along their first dimension."""
Losses = Callable[[nn.Module, Batch], Tensor]
"""(examples,) losses in nats."""


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
    losses: Losses
    held_out: Callable[[], list[Batch]]
    """Mini-batches that validate, always the same."""

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        """Mean held-out loss in nats, in eval mode; what is random is so in the same way."""
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            losses = [self.losses(model, batch) for batch in self.held_out()]
        model.train()
        return torch.cat(losses).mean().item()


def drawn(kind: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A problem's `build`: a new model, whose first weights are a function of the seed."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return kind()

    return build


def seeded(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
