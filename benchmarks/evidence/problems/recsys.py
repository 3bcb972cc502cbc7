"""A recommender with the paper's four parameter groups: one pass through a year of interactions,
generated as they are read, judged by its last day."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.bytes.model import Block, GPTConfig

from .problem import Batch, Problem, drawn

TASKS = ("click", "like", "share")
Interactions = tuple[Tensor, Tensor, Tensor, Tensor]
"""users (batch,), items (batch,) and the users' latest items (batch, history), oldest first, int64;
engagement (batch, tasks), 0. or 1."""

CHOICES = 4
"""popular items among which a session's interest picks each item of its history"""
STRENGTH, RELATED = 2.5, 0.6
"""of the affinity in the logits (standard deviations); of what is a task's own in it, against 1 of
what they share"""
BIASES = (-0.5, -1.5, -2.5)
SWING = 1.5
"""amplitude of an item's season, in nats of its popularity"""


class InteractionLog:
    """A year of interactions between Zipf-distributed users and items, made up on demand: nothing
    is stored, nothing repeats.

    A session's interest is half the user's own taste, half a whim. The items of its history were
    picked by that interest from a few popular ones, so they tell of it; the item that is shown is
    popular, and three correlated coins say how it is engaged with,

        logit_task = bias_task + strength * <interest, A_task traits> / sqrt(factors) + quality.

    Drift: in the course of the year tastes and traits turn, each by an angle of its own, and
    popularity and quality of the items swing, each with a phase of its own: what was learned in
    spring is partly wrong in winter.

    Args:
        users, items, history: how many there are, and how many items of a session come before the
            one shown.
        factors: dimension of tastes and traits.
    """

    def __init__(
        self, users: int = 400, items: int = 200, history: int = 7, factors: int = 4
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self.users, self.items, self.history = users, items, history
        self._tastes, self._traits = _Turning(users, factors, g), _Turning(items, factors, g)
        self._activity = _zipf(torch.arange(users))
        self._popularity = _zipf(torch.randperm(items, generator=g))
        self._season, self._fashion = (
            2 * math.pi * torch.stack([torch.rand(items, generator=g) for _ in range(2)])
        )
        own = torch.randn(len(TASKS), factors, factors, generator=g) / factors**0.5
        self._tasks = (torch.eye(factors) + RELATED * own) / (1 + RELATED**2) ** 0.5
        self._biases = torch.tensor(BIASES)

    def sample(
        self, size: int, position: float, *, seed: int, stream: str, index: int
    ) -> Interactions:
        """``size`` interactions at ``position`` of the year, in [0, 1]: a pure function of its
        arguments."""
        digest = hashlib.sha256(f"{seed}/{stream}/{index}".encode()).digest()
        g = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        traits = self._traits.at(position)
        swing = SWING * torch.sin(2 * math.pi * position + self._season)
        shown = _cumulative(self._popularity + swing)
        users = _draw(_cumulative(self._activity), (size,), g)
        items = _draw(shown, (size,), g)
        whim = torch.randn(size, traits.shape[1], generator=g)
        interest = (self._tastes.at(position)[users] + whim) / 2**0.5
        choices = _draw(shown, (size, self.history, CHOICES), g)
        # The largest of scores with Gumbel noise is a draw from their softmax.
        noise = torch.rand(choices.shape, generator=g).log().neg().log()
        scores = torch.einsum("bk,bhck->bhc", interest, traits[choices]) - noise
        history = choices.gather(2, scores.argmax(2, keepdim=True)).squeeze(2)
        quality = torch.sin(0.5 * math.pi * position + self._fashion)[items]
        affinity = torch.einsum("bk,tkl,bl->bt", interest, self._tasks, traits[items])
        affinity = affinity / traits.shape[1] ** 0.5
        logits = self._biases + STRENGTH * affinity + quality[:, None]
        engagement = (torch.rand(logits.shape, generator=g) < logits.sigmoid()).float()
        return users, items, history, engagement


class _Turning:
    """(count, factors) standard normal vectors that turn in planes of their own, by 0 to 90 degrees
    in a year."""

    def __init__(self, count: int, factors: int, g: torch.Generator) -> None:
        self.first, self.second = (torch.randn(count, factors, generator=g) for _ in range(2))
        self.angle = 0.5 * math.pi * torch.rand(count, 1, generator=g)

    def at(self, position: float) -> Tensor:
        angle = self.angle * position
        return self.first * torch.cos(angle) + self.second * torch.sin(angle)


def _zipf(places: Tensor) -> Tensor:
    """Logarithms of 1 / rank, for ranks counted from 0."""
    return -(places + 1).log()


def _cumulative(logits: Tensor) -> Tensor:
    return logits.double().softmax(0).cumsum(0)


def _draw(cumulative: Tensor, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=g, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniform).clamp_(max=len(cumulative) - 1)


class Recommender(nn.Module):
    """users, items (batch,), history (batch, history) -> logits (batch, tasks).

    One transformer block reads the history with the shown item behind it; a small network reads
    what the block says of that item, with the user's and the item's own vectors. Nothing is
    normalised on the way out, so a rate that is too high ends it.
    """

    def __init__(self, users: int, items: int, history: int, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.place = nn.Embedding(history + 1, width)
        self.block = Block(GPTConfig(width=width, heads=2))
        self.hidden, self.out = nn.Linear(3 * width, 2 * width), nn.Linear(2 * width, len(TASKS))
        for table in (self.user, self.item, self.place):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor, history: Tensor) -> Tensor:
        shown = self.item(torch.cat([history, items[:, None]], 1)) + self.place.weight
        x = torch.cat([self.user(users), self.item(items), self.block(shown)[:, -1]], 1)
        return self.out(F.gelu(self.hidden(x)))

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The paper's four: tables, vectors (which do not decay), the transformer's matrices, all
        other matrices."""

        of = {"block": "transformer", "hidden": "non_embedding", "out": "non_embedding"}
        named: dict[str, list[Tensor]] = {
            name: [] for name in ("embedding", "no_decay", "non_embedding", "transformer")
        }
        for name, parameter in self.named_parameters():
            matrix = of.get(name.split(".")[0], "embedding")
            named["no_decay" if parameter.dim() < 2 else matrix].append(parameter)
        return [
            {
                "name": name,
                "params": parameters,
                "weight_decay": weight_decay * (name != "no_decay"),
            }
            for name, parameters in named.items()
        ]


STEPS, INTERACTIONS = 800, 128
LOG = InteractionLog()


def interactions(size: int, step: int, steps: int, seed: int) -> Interactions:
    """The batch of one of ``steps`` steps that are a year."""
    return LOG.sample(size, min(step / steps, 1.0), seed=seed, stream="train", index=step)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,) nats: the mean over the tasks of their binary cross entropies."""
    *seen, engagement = batch
    logits = model(*seen).float()
    return F.binary_cross_entropy_with_logits(logits, engagement, reduction="none").mean(1)


@cache
def held_out() -> list[Batch]:
    """16 384 interactions of the year's last day, of a stream that is never trained on."""
    return [LOG.sample(16384, 1.0, seed=0, stream="validation", index=0)]


RECSYS = Problem(
    name="recommender-clicks",
    steps=STEPS,
    batch_size=INTERACTIONS,
    build=drawn(lambda: Recommender(LOG.users, LOG.items, LOG.history)),
    groups=lambda model: model.parameter_groups(weight_decay=0.01),
    batch=lambda seed, step: interactions(INTERACTIONS, step, STEPS, seed),
    spare=lambda seed, step, number: LOG.sample(
        INTERACTIONS, min(step / STEPS, 1.0), seed=seed, stream="probe", index=number
    ),
    losses=losses,
    held_out=lambda: held_out(),
)
