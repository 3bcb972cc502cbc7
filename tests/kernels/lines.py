"""What replicas on one line leave behind, for comparing backends bit for bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import RankOneTensors, StepOptions

from .cases import Guarded
from .table import F32, SETTINGS


def line_left(rule: str, count: int, formats: tuple[torch.dtype, ...], sizes: list[int], backend: str, device: str = "cpu") -> list[Tensor]:
    """All memory, guards included, after each of seven steps with two means, a skipped step and two converges.

    `formats`: dtypes of outputs, gradients and moments.
    """
    output, gradient, moment = formats
    decay = 0.1 if rule in ("adamw", "lion") else 0.0
    multipliers = [0.5 + 0.25 * k for k in range(count)]
    common = SETTINGS._replace(multipliers=multipliers, weight_decay=decay, decay_at_base=decay > 0)
    settings = [common._replace(lr=lr) for lr in (0.02, 0.01)]
    weights = [1 / count] * count
    kinds = (F32, F32, moment, moment)
    base, displacement, first, second = (Guarded(sizes, place % 3, place, device, kinds[place]) for place in range(4))
    for guarded in (displacement, first, second):
        guarded.zero()
    outputs = [Guarded(sizes, k % 2, 9 + k, device, output) for k in range(count)]
    steps = [torch.zeros((), device=device) for _ in sizes]
    tensors = RankOneTensors(
        rule,
        base.tensors,
        displacement.tensors,
        [g.tensors for g in outputs],
        [i % 2 for i in range(len(sizes))],
        steps,
        first.tensors,
        second.tensors if rule in ("adamw", "adam") else None,
        stochastic=5,
    )
    plan = kernels.rank_one_plan(tensors, backend)
    left = []
    for turn in range(7):
        gradients = Guarded(sizes, 1, 100 + turn, device, gradient)
        if turn == 5:
            gradients.tensors[0][-1] = math.nan  # skipped, with a fold pending
        finish = "mean" if turn in (2, 4) else "store"
        options = StepOptions(max_norm=50.0, zero_gradients=turn > 2, finish=finish, weights=weights if finish == "mean" else None)
        plan.step(gradients.tensors, settings, options)
        if turn in (3, 6):
            plan.converge(weights)
        left += [g.buffer.cpu() if device != "cpu" else g.buffer.clone() for g in (base, displacement, first, second, *outputs, gradients)]
        left.append(torch.stack(steps).cpu())
    return left
