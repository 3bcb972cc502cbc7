"""Optimizers in pairs: equal parameters, each its own memory, and gradients that both get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

SHAPES = [(300, 70), (70,), (0,), (16384 * 2 + 5,), (3, 5, 7), (), (64, 64)]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in SHAPES
    ]


def groups(params: list[Parameter]) -> list[dict[str, Any]]:
    """Three groups, one without decay."""
    return [
        {"params": params[:3]},
        {"params": params[3:5], "weight_decay": 0.0},
        {"params": params[5:], "lr": 2e-3, "betas": (0.8, 0.97)},
    ]


def set_gradients(params: list[Parameter], turn: int, dtype: torch.dtype | None = None) -> None:
    """The same numbers for the same turn, written where the gradients are, if they are."""
    generator = torch.Generator(device="cuda").manual_seed(1000 + turn)
    for param in params:
        new = torch.randn(param.shape, generator=generator, device="cuda").to(
            param.dtype if dtype is None else dtype
        )
        if param.grad is None:
            param.grad = new
        else:
            param.grad.copy_(new)


def same_bits(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(ours, theirs, strict=True))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).contiguous().view(torch.uint8)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        *params,
        *(
            value
            for param in params
            for _, value in sorted(optimizer.state[param].items())
            if isinstance(value, Tensor)
        ),
    ]
