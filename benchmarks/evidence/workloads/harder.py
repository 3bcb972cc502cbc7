"""Data that gets harder in the run: three bits to be remembered over ever longer times, by a recurrence without gates; letters under ever more noise; and
heat of ever more waves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn
from .fourth import Heat, heat, letters, reader
from .generated import Key, labelled, problem, squares

BITS, SIZE = 3, 32
STEPS = (2000, 4000, 6000)
"""From these on the next stage is trained on; the last one is validated."""
LENGTHS, NOISES, NUMBERS = (5, 10, 20, 30), (0.0, 0.3, 0.7, 1.0), (1, 2, 4, 6)
Draw = Callable[[Key, int, int], Batch]
"""(key, count, stage)"""


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


def _staged(name: str, build: Callable[[int], nn.Module], draw: Draw, losses: Callable[[nn.Module, Batch], Tensor]) -> Problem:
    last = len(STEPS)
    return replace(
        problem(name, build, lambda key, count: draw(key, count, last), losses, SIZE, decay=0.0),
        batch=lambda seed, step: draw((seed, step), SIZE, bisect_right(STEPS, step)),
        spare=lambda seed, step, number: draw((seed, "spare", number), SIZE, bisect_right(STEPS, step)),
    )


CURRICULUM = _staged("curriculum", drawn(Memory), lambda key, count, stage: _bits(key, count, LENGTHS[stage]), labelled)
FADING = _staged("fading", drawn(reader), lambda key, count, stage: letters(key, count, noise=NOISES[stage]), labelled)
SWELLING = _staged("swelling", drawn(Heat), lambda key, count, stage: heat(key, count, NUMBERS[stage]), squares)
