"""What is freed at once, without the garbage collector, which on a GPU comes too late."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def _without_collector() -> Iterator[None]:
    # torch's first optimizer of a process imports torch._dynamo, which is left with a cycle
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_alive(train: Callable[[], dict[str, Any]]) -> list[str]:
    """The names of those objects that outlive ``train``, which makes and returns them by name."""
    with _without_collector():
        refs = {name: weakref.ref(made) for name, made in train().items()}
        return [name for name, ref in refs.items() if ref() is not None]


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, and all that the optimizer keeps, also in lists."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for i, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            values = value if isinstance(value, list) else [value]
            found |= {f"{key} {i}.{k}": one for k, one in enumerate(values) if torch.is_tensor(one)}
    return found
