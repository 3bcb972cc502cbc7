"""Looks at weights and states, what ranks are told, and a measurement that is driven by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet.controllers.batch_losses import BatchLosses
from hdet.controllers.measurement import Watched
from hdet.core.clock import Clock
from tests.harness import batch, loss_of

STOCK = ["AdamW", "NAdam", "Adagrad", "Rprop", "RMSprop", "ASGD", "Adafactor", "SGD"]
"""Others of torch's have states as AdamW's: a counter, and tensors that begin as zeros."""
MASTERS = functools.partial(hdet.FusedAdamW, master_weights="fp32")
SPLIT = functools.partial(hdet.FusedAdamW, master_weights="split")
TAKEN_BACK = hdet.Divergence(rollback="device")
ALL_WARNINGS = pytest.mark.filterwarnings("error")


def foreign(package: str, name: str, **settings: Any) -> Callable[..., Any]:
    """Makes optimizers of another library; the test is skipped where it is not installed."""

    def make(parameters: Any, lr: float, weight_decay: float = 0.0) -> Any:
        optimizer = getattr(pytest.importorskip(package), name)(parameters, lr=lr, **settings)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return make


def watching(
    net: nn.Module, loss_fn: Any = loss_of, optimizer: Any = None, **settings: Any
) -> BatchLosses:
    """The measurement of a run of one replica."""
    optimizer, own = optimizer or torch.optim.SGD(net.parameters(), lr=0.1), list(net.parameters())
    losses = BatchLosses(loss_fn, [batch(i) for i in range(8)], 8, net, **settings)
    losses.watch(Watched(optimizer, [own], [lambda: [None] * len(own)], Clock(10)))
    return losses


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


def state_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


def same(one: Any, two: Any) -> bool:
    """To the bit, however tensors are nested."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def filled(net: nn.Module, value: float, parameters: int | None = None) -> None:
    """Writes to all parameters, or to the first few."""
    with torch.no_grad():
        for p in list(net.parameters())[:parameters]:
            p.fill_(value)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, keys: Iterable[int]) -> torch.Tensor:
    """The weights after a step on each of these batches, without an Ensemble."""
    for key in keys:
        optimizer.zero_grad()
        loss_of(net, batch(key)).backward()
        optimizer.step()
    return flat(net)


def on_all_ranks(tensor: torch.Tensor) -> bool:
    """Is it equal there?"""
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return all(torch.equal(tensor, other) for other in everyones)


def told(act: Callable[[], Any]) -> str:
    """What the error says that ``act`` raises."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the test compares what it says
        return str(error)
    return "no error"
