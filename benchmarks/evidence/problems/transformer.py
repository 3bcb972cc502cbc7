"""The byte-level transformer of the main job on the Python library's sources, small enough for
hundreds of runs on a core."""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn
from torch.nn import functional as F

from examples.bytes.data import Corpus, load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig

from .problem import Batch, Problem, drawn

SHAPE = GPTConfig()
STEPS, WINDOWS = 1000, 8


@cache
def corpus() -> Corpus:
    return load_corpus()


def windows(text: Tensor, count: int, context: int, seed: int, stream: str, index: int) -> Batch:
    return sample_batch(text, count, context, seed=seed, stream=stream, index=index)


@cache
def held_out(text: Tensor, context: int) -> list[Batch]:
    """512 windows."""
    return [windows(text, 64, context, 0, "validation", i) for i in range(8)]


def batch(seed: int, step: int) -> Batch:
    return windows(corpus().train, WINDOWS, SHAPE.context, seed, "train", step)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """A loss for each window: the mean over its bytes."""
    x, y = batch
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction="none").view(x.shape).mean(1)


TRANSFORMER = Problem(
    name="gpt-python",
    steps=STEPS,
    batch_size=WINDOWS,
    build=drawn(lambda: GPT(SHAPE)),
    groups=lambda model: model.parameter_groups(weight_decay=0.1),
    batch=batch,
    spare=lambda seed, step, number: batch(seed, STEPS + number),
    losses=losses,
    held_out=lambda: held_out(corpus().validation, SHAPE.context),
)
