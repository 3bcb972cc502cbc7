"""Looks at weights and states, what ranks are told, and a measurement that is driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet.core.clock import Clock
from hdet.measure.batch_losses import BatchLosses
from hdet.measure.measurement import Watched
from tests.harness import batch, loss_of

STOCK = [
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "Rprop",
    "RMSprop",
    "ASGD",
    "Adafactor",
    "SGD",
]


def watched(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Watched:
    """A run of one replica."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    own = list(net.parameters())
    return Watched(
        optimizer, [own], [lambda: [None] * len(own)], hdet.LearningRate().bind(optimizer), Clock(10), hdet.Replicas.single(),
        lambda: [[1.0]],
    )  # fmt: skip


def watching(
    net: nn.Module,
    loss_fn: Any = loss_of,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
) -> BatchLosses:
    losses = BatchLosses(loss_fn, [batch(i) for i in range(8)], 8, net, **settings)
    losses.watch(watched(net, optimizer))
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
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, keys: Iterable[int]) -> torch.Tensor:
    """Without an Ensemble, a step on each of these batches; the weights."""
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


@contextmanager
def all_reduces() -> Iterator[list[Any]]:
    """Those that are asked for in Python, as they come."""
    calls: list[Any] = []
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args), real(*args, **kwargs))[1]
    try:
        yield calls
    finally:
        dist.all_reduce = real
