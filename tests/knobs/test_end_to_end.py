"""Whole runs with a known answer: several knobs at once move the right way under a probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet

from ..distributed import run_ranks


def squared(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (net(batch[0]).flatten() - batch[1]).square().mean()


def probe_of(net: nn.Module, batch: Any, **settings: Any) -> hdet.ProbeController:
    """On 8 batches that nobody trains on."""
    draw = lambda cycle: [batch(10**6 + 8 * cycle + i) for i in range(8)]
    return hdet.ProbeController(squared, draw, model=net, **settings)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(x))


def endless(key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New data in every step, of a linear rule: regularising can only do harm."""
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(key))
    return x, x @ torch.linspace(-1, 1, 12)


def too_regular(rank: int, world: int) -> Any:
    """Local gradients: each of four processes trains with its own dropout and its own decay."""
    net = Dropped()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=3.0)
    probe = probe_of(net, endless, average_every=2, held_out=True)
    run = hdet.Ensemble(
        optimizer, knobs=[hdet.Dropout(net, 0.4), hdet.WeightDecay(0.4)], total_steps=160,
        sync=hdet.Sync(10, gradients="local", moments="keep"), controller=probe,
    )  # fmt: skip
    seen = []
    for step in range(160):
        with run.explore():
            torch.manual_seed(4 * step + rank)
            squared(net, endless(4 * step + rank)).backward()
            seen.append(net.drop.p / run.values()["dropout"])
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    decay, loss = optimizer.param_groups[0]["weight_decay"], squared(net, endless(-1)).item()
    return run.values(), run.corrections, net.drop.p, decay, seen[0], loss


def test_four_processes_give_up_dropout_and_decay_that_only_harm() -> None:
    ranks = run_ranks(too_regular, 4)
    values, corrections, p, decay, _, loss = ranks[0]
    assert corrections["dropout"] < 0.5 and corrections["weight_decay"] < 0.5 and loss < 1.0
    assert (p, decay) == (values["dropout"], values["weight_decay"])
    assert all(other[0] == values for other in ranks)
    # two replicas up, two down
    assert sorted(rank[4] for rank in ranks) == pytest.approx([0.6, 0.6, 1.4, 1.4])
