"""One replica of several without a process group: enough to see what values it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hdet
from tests.harness import Scripted, policies


class Given(Scripted):
    """All replicas have its multipliers, by knob (rates come first); judged by held-out data."""

    def may_move(self, knob: Any) -> bool:
        return True


def given(*multipliers: float) -> Given:
    return Given(multipliers=multipliers)


class Net(nn.Module):
    """A regression with everything a knob may move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)
        self.temperature = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.first(x) / self.temperature)))


def groups_of(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(net.first.parameters()), "name": "first", "weight_decay": 0.1},
        {"params": list(net.last.parameters()), "name": "last", "weight_decay": 0.0, "lr": 0.02},
    ]


def adamw(net: Net, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    return kind(groups_of(net), **{"lr": 0.01, **settings})


def ensemble(
    net: Net, knobs: Any, *, optimizer: Any = None, index: int = 0, count: int = 8, **settings: Any
) -> hdet.Ensemble:
    """One of 8 that takes itself for all of them: what it averages is its own."""
    optimizer, replicas = optimizer or adamw(net), hdet.Replicas(index, count, None)
    given = policies(**{"every": 1000, **settings})
    return hdet.Ensemble(optimizer, knobs=knobs, replicas=replicas, **given)


def backward(net: Net, seed: int = 0) -> torch.Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return loss.detach()


def seen_in_step(optimizer: Any, read: Any) -> list[Any]:
    """Fills while steps are taken: what ``read(optimizer)`` gives inside of each."""
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(read(opt)))
    return seen


LOCAL = {"gradients": "local", "moments": "keep"}
