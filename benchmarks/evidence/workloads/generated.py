"""Helpers for workloads with generated data: problems, finite sets, losses, trained weights.

The key of a seed often begins with an old name of the workload. Another key would be other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, mean_loss
from .groups import decaying_matrices

Key = tuple[object, ...]
PRETRAINING = 1500
"""Steps that train the weights from which a workload begins."""
WHOLE = 10_000
"""Steps of a run in which a finite set is seen as often as its number of epochs says."""


def problem(
    name: str,
    build: Callable[[int], nn.Module],
    draw: Callable[[Key, int], Batch],
    losses: Callable[[nn.Module, Batch], Tensor],
    size: int = 32,
    decay: float = 0.01,
) -> Problem:
    return Problem(
        name=name,
        steps=1500,
        batch_size=size,
        build=build,
        groups=lambda model: decaying_matrices(model, decay),
        batch=lambda seed, step: draw((seed, step), size),
        spare=lambda seed, step, number: draw((seed, "spare", number), size),
        losses=losses,
        validate=lambda model: mean_loss(
            model, losses, [draw(("validation", part), size) for part in range(32)]
        ),
    )


def labelled(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def either(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy; y may be a probability."""
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x), y, reduction="none")


def squares(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square()


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    similar, same = model(*batch), torch.arange(len(batch[0]))
    return (
        F.cross_entropy(similar, same, reduction="none")
        + F.cross_entropy(similar.T, same, reduction="none")
    ) / 2


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).transpose(1, 2), following, reduction="none").mean(1)


@cache
def sines(
    key: Key,
    inputs: int,
    count: int = 24,
    frequency: float = 0.5,
    outs: tuple[int, ...] = (),
    spread: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Parameters of a target sin(x @ waves) @ weights: (inputs, count) and (count, *outs).

    The weights have variance 1 / spread (None: 1 / count).
    """
    generator = seeded(*key)
    waves, weights = (
        torch.randn(inputs, count, generator=generator),
        torch.randn(count, *outs, generator=generator),
    )
    return frequency * waves, weights / math.sqrt(spread or count)


def zipf(generator: torch.Generator, many: int, *shape: int) -> Tensor:
    """Integers below ``many`` with Zipf's frequencies."""
    return (many ** torch.rand(shape, generator=generator)).long().clamp(max=many) - 1


def with_wrong_labels(
    generator: torch.Generator, labels: Tensor, classes: int, part: float
) -> Tensor:
    """A ``part`` of the labels is replaced by random ones."""
    careless = torch.rand(len(labels), generator=generator) < part
    return torch.where(careless, torch.randint(classes, labels.shape, generator=generator), labels)


def finite(
    fresh: Problem, draw: Callable[[Key, int], Batch], epochs: int, key: str | None = None
) -> Problem:
    """The same problem on a finite set, which a run of `WHOLE` steps sees ``epochs`` times.

    Each epoch has an order of its own. Validation data stays as it is. ``key`` begins the
    seeds of the orders (None: the problem's name).
    """
    size, name = fresh.batch_size, key or fresh.name

    @cache
    def rows() -> Batch:
        return draw(("rows",), WHOLE * size // epochs)

    @cache
    def order(seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(rows()[0]), generator=seeded(name, "order", seed, epoch))

    def batch(seed: int, step: int) -> Batch:
        epoch, at = divmod(step, len(rows()[0]) // size)
        chosen = order(seed, epoch)[at * size : (at + 1) * size]
        return tuple(column[chosen] for column in rows())

    return replace(fresh, batch=batch)


def pretrained(
    build: Callable[[], nn.Module], draw: Callable[[Key, int], Batch]
) -> Callable[[int], nn.Module]:
    """A function that builds models, the same for every seed, with trained weights.

    The weights are trained once, for `PRETRAINING` steps, when the first model is built.
    """

    @cache
    def weights() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=PRETRAINING)
        for step in range(PRETRAINING):
            labelled(model, draw(("pretraining", step), 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model.state_dict()

    def built(seed: int) -> nn.Module:
        model = build()
        model.load_state_dict(weights())
        return model

    return built
