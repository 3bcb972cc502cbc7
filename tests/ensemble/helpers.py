"""A measurement's run, where it is driven by hand."""

from __future__ import annotations

import torch
from torch import nn

import hdet
from hdet.core.clock import Clock
from hdet.measure.measurement import Watched


def watched(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Watched:
    """A run of one replica."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    own = list(net.parameters())
    return Watched(
        optimizer, [own], [lambda: [None] * len(own)], hdet.LearningRate().bind(optimizer), Clock(10), hdet.Replicas.single(),
        lambda: [[1.0]], False, lambda name: [],
    )  # fmt: skip
