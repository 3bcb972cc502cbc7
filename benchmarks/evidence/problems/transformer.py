"""The byte-level transformer of the main job on the Python library's sources, small enough for
hundreds of runs on a core."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.bytes.data import Corpus, load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig

from .problem import Batch, Problem, mean_loss

SHAPE = GPTConfig()
STEPS, WINDOWS = 1000, 8


@cache
def corpus() -> Corpus:
    return load_corpus()


def build(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(SHAPE)


def batch(seed: int, step: int) -> Batch:
    return sample_batch(
        corpus().train, WINDOWS, SHAPE.context, seed=seed, stream="train", index=step
    )


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """A loss for each window: the mean over its bytes."""
    x, y = batch
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction="none").view(x.shape).mean(1)


@cache
def held_out() -> list[Batch]:
    """512 windows of modules that are not trained on."""
    return [
        sample_batch(corpus().validation, 64, SHAPE.context, seed=0, stream="validation", index=i)
        for i in range(8)
    ]


TRANSFORMER = Problem(
    name="gpt-python",
    steps=STEPS,
    batch_size=WINDOWS,
    build=build,
    groups=lambda model: model.parameter_groups(weight_decay=0.1),
    batch=batch,
    spare=lambda seed, step, number: batch(seed, STEPS + number),
    losses=losses,
    validate=lambda model: mean_loss(model, losses, held_out()),
)
