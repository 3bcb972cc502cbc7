"""Data that changes during training, in four stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from ..problems.problem import Batch, Problem
from .generated import Key, problem

SIZE = 32
STEPS = (2000, 4000, 6000)
"""From these steps on the next stage is trained on; the last one is validated."""
Draw = Callable[[Key, int, int], Batch]
"""(key, count, stage)"""


def staged(
    name: str,
    build: Callable[[int], nn.Module],
    draw: Draw,
    losses: Callable[[nn.Module, Batch], Tensor],
) -> Problem:
    last = len(STEPS)
    return replace(
        problem(name, build, lambda key, count: draw(key, count, last), losses, SIZE, decay=0.0),
        batch=lambda seed, step: draw((seed, step), SIZE, bisect_right(STEPS, step)),
        spare=lambda seed, step, number: draw(
            (seed, "spare", number), SIZE, bisect_right(STEPS, step)
        ),
    )
