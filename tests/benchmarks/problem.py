"""A problem for the tests of benchmarks.evidence that trains in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.evidence.problems import Problem


def tiny(steps: int = 20, batch_size: int = 8, *, noise: bool = False) -> Problem:
    """Linear regression on four inputs; ``noise``: of a fifth, which the model does not see."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(4, 1)

    def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(batch_size, 4 + noise, generator=torch.Generator().manual_seed(1000 * seed + step))
        return x[:, :4], x.sum(1, keepdim=True)

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1)

    @torch.no_grad()
    def validate(model: nn.Module) -> float:
        return float(losses(model, batch(99, 0)).mean())

    return Problem(
        name="tiny", steps=steps, batch_size=batch_size, build=build, batch=batch, spare=lambda seed, step, number: batch(seed, steps + number), losses=losses, validate=validate,
        groups=lambda model: [{"name": "all", "params": list(model.parameters()), "weight_decay": 0.0}],
    )  # fmt: skip
