"""Data that gets harder in the run: three bits to be remembered over ever longer times, by a recurrence without gates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn, mean_loss
from .generated import Key, labelled, problem

BITS, SIZE = 3, 32
STEPS, LENGTHS = (2000, 4000, 6000), (5, 10, 20, 30)
"""From these steps on texts have the next length."""


class Memory(nn.Module):
    """(batch, time, 4) -> logits (batch, 8)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body, self.out = nn.RNN(4, width, batch_first=True), nn.Linear(width, 2**BITS)
        nn.init.orthogonal_(self.body.weight_hh_l0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])


def _bits(key: Key, count: int, length: int) -> Batch:
    """The bits come first, then noise, and at the end a mark."""
    generator = seeded("harder", *key)
    bits, x = torch.randint(2, (count, BITS), generator=generator), torch.zeros(count, length, 4)
    x[:, :BITS, 0], x[:, :BITS, 2], x[:, -1, 3] = 2.0 * bits - 1, 1.0, 1.0
    x[:, :, 1] = 0.5 * torch.randn(count, length, generator=generator)
    return x, (bits * torch.tensor([1, 2, 4])).sum(1)


def _at(step: int) -> int:
    return LENGTHS[bisect_right(STEPS, step)]


def _held_out() -> Sequence[Batch]:
    return [_bits(("validation", part), SIZE, LENGTHS[-1]) for part in range(32)]


CURRICULUM = replace(
    problem("curriculum", drawn(Memory), lambda key, count: _bits(key, count, LENGTHS[-1]), labelled, decay=0.0),
    batch=lambda seed, step: _bits((seed, step), SIZE, _at(step)),
    spare=lambda seed, step, number: _bits((seed, "spare", number), SIZE, _at(step)),
    validate=lambda model: mean_loss(model, labelled, _held_out()),
)
