"""Whole runs with a known answer: several knobs at once move the right way under a probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet

from ..distributed import run_ranks


class Bent(nn.Module):
    """y = tanh(steep x a) + x b: ``a`` is known, ``b`` learned, ``steep`` is 2 in the data."""

    def __init__(self, steep: float) -> None:
        super().__init__()
        self.steep, self.b = steep, nn.Parameter(torch.zeros(6))
        self.register_buffer("a", torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.steep * (x @ self.a)) + x @ self.b


def bent_batch(key: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(key)
    x, noise = (torch.randn(32, *shape, generator=generator) for shape in ((6,), ()))
    bent = torch.tanh(2.0 * (x @ torch.linspace(-1, 1, 6)))
    return x, bent + x @ torch.tensor([3.0, -2, 1, 1, -2, 3]) + 0.3 * noise


def squared(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (net(batch[0]).flatten() - batch[1]).square().mean()


def probe_of(net: nn.Module, batch: Any, **settings: Any) -> hdet.ProbeController:
    """On 8 batches that nobody trains on."""
    draw = lambda cycle: [batch(10**6 + 8 * cycle + i) for i in range(8)]
    return hdet.ProbeController(squared, draw, model=net, **settings)


@pytest.mark.parametrize("steep", [0.4, 8.0])
def test_four_co_resident_replicas_find_a_temperature_and_a_rate(steep: float) -> None:
    """A steepness of 2, and a rate far above 1e-3 to get anywhere in 240 steps of AdamW."""
    net = Bent(steep)
    optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    replicas = hdet.CoresidentReplicas(net, 4)
    knobs = [hdet.LearningRate(0.3), hdet.Temperature(net, 0.3, attribute="steep")]
    run = hdet.Ensemble(
        optimizer, knobs=knobs, total_steps=240, replicas=replicas, sync=hdet.Sync(8),
        controller=probe_of(net, bent_batch),
    )  # fmt: skip
    for step in range(240):
        for k in range(4):
            with replicas.use(k), run.explore():
                loss = squared(net, bent_batch(4 * step + k))
                run.observe(loss)
                (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    found = run.values()
    assert net.steep == found["steep"] == pytest.approx(2.0, rel=0.35)
    assert found["lr"] > 5e-3 and squared(net, bent_batch(-1)).item() < 0.5


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
