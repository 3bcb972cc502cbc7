"""The recommender of `benchmarks.recsys`: one pass through a year of interactions, judged by its
last day."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from ...recsys.recommender import InteractionLog, Interactions, Recommender, engagement_losses
from .problem import Batch, Problem, mean_loss

STEPS, INTERACTIONS = 800, 128
LOG = InteractionLog()


def build(seed: int) -> Recommender:
    torch.manual_seed(seed)
    return Recommender(LOG.users, LOG.items, LOG.history)


def interactions(size: int, step: int, steps: int, seed: int) -> Interactions:
    """The batch of one of ``steps`` steps that are a year."""
    return LOG.sample(size, min(step / steps, 1.0), seed=seed, stream="train", index=step)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    users, items, history, engagement = batch
    return engagement_losses(model, (users, items, history, engagement))


@cache
def held_out() -> Interactions:
    """16 384 interactions of the year's last day, of a stream that is never trained on."""
    return LOG.sample(16384, 1.0, seed=0, stream="validation", index=0)


RECSYS = Problem(
    name="recommender-clicks",
    steps=STEPS,
    batch_size=INTERACTIONS,
    build=build,
    groups=lambda model: model.parameter_groups(weight_decay=0.01),
    batch=lambda seed, step: interactions(INTERACTIONS, step, STEPS, seed),
    spare=lambda seed, step, number: LOG.sample(
        INTERACTIONS, min(step / STEPS, 1.0), seed=seed, stream="probe", index=number
    ),
    losses=losses,
    validate=lambda model: mean_loss(model, losses, [held_out()]),
)
