"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846) of the peak rate; all members take turns in one process.

The rule is that of Ray Tune's `PopulationBasedTraining(synch=True)` with its defaults: at every ready interval the worst quarter copies
weights, optimizer state and rate of a random member of the best quarter, then draws its rate afresh with probability 1/4 or multiplies it
by 1.2 or 0.8. One thing differs: Ray leaves a member whose loss is NaN alone for ever, here it is the worst.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence

import torch

from .problems import Problem

QUANTILE, RESAMPLE, FACTORS = 0.25, 0.25, (1.2, 0.8)
Draw = Callable[[], float]  # a rate from the prior


def explore(rate: float, rng: random.Random, draw: Draw) -> float:
    return draw() if rng.random() < RESAMPLE else rate * rng.choice(FACTORS)


def perturb(losses: Sequence[float], rates: Sequence[float], rng: random.Random, draw: Draw) -> list[tuple[int, int, float]]:
    """(member, whom it copies, its new rate) for each member of the worst quarter."""
    worst_first = sorted(range(len(losses)), key=lambda m: -losses[m])
    count = min(math.ceil(len(losses) * QUANTILE), len(losses) // 2)
    return [(member, s := rng.choice(worst_first[-count:]), explore(rates[s], rng, draw)) for member in worst_first[:count]]


def train(
    problem: Problem, members: int, seed: int, rng: random.Random, draw: Draw, shape: Sequence[float], interval: int
) -> tuple[float, list[tuple[float, float]]]:
    """Member m trains on the m-th part of every batch, with ``shape[step]`` times its rate; all start from the same weights.

    Returns the last rate of the member that ends best, and (examples all have trained on, the best one's loss) every ``interval`` steps."""
    if problem.batch_size % members:
        raise ValueError(f"members={members} do not divide the batch of {problem.batch_size} examples of {problem.name}: use 2, 4 or 8")
    models, rates, curve = [problem.build(seed) for _ in range(members)], [draw() for _ in range(members)], []
    optimizers = [torch.optim.AdamW(problem.groups(model), lr=0.0, betas=(0.9, 0.95), foreach=True) for model in models]
    for step in range(problem.steps + 1):
        if step % interval == 0 or step == problem.steps:
            losses = [loss if math.isfinite(loss := problem.validate(model)) else math.inf for model in models]
            curve.append((float(step * problem.batch_size), min(losses)))
            for member, source, rate in perturb(losses, rates, rng, draw) if 0 < step < problem.steps else ():
                models[member].load_state_dict(models[source].state_dict())
                optimizers[member].load_state_dict(copy.deepcopy(optimizers[source].state_dict()))
                rates[member] = rate
        if step < problem.steps:
            parts = zip(*(tensor.chunk(members) for tensor in problem.batch(seed, step)), strict=True)
            for model, optimizer, rate, part in zip(models, optimizers, rates, parts, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = shape[step] * rate
                optimizer.zero_grad()
                problem.losses(model, part).mean().backward()
                optimizer.step()
    return rates[losses.index(min(losses))], curve
