"""Problems on data that is drawn anew for each step, none of which has any part in how a rule was made: series, sets of points, pairs of views,
clusters, brackets, and clusters from weights that have been trained on others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .groups import decaying_matrices

Key = tuple[object, ...]
PRETRAINING = 1500
"""Steps before a workload that begins from trained weights."""
WHOLE = 10_000
"""Steps of a run that sees a finite set as often as is said."""


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
        validate=lambda model: mean_loss(model, losses, [draw(("validation", part), size) for part in range(32)]),
    )


def labelled(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def either(model: nn.Module, batch: Batch) -> Tensor:
    """Of a chance."""
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x), y, reduction="none")


def squares(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square()


@cache
def sines(
    key: Key, inputs: int, count: int = 24, frequency: float = 0.5, outs: tuple[int, ...] = (), spread: int | None = None
) -> tuple[Tensor, Tensor]:
    """Of a target sin(x @ waves) @ weights: (inputs, count) and (count, *outs), weights of variance 1 / spread (None: count)."""
    generator = seeded(*key)
    waves, weights = torch.randn(inputs, count, generator=generator), torch.randn(count, *outs, generator=generator)
    return frequency * waves, weights / math.sqrt(spread or count)


def zipf(generator: torch.Generator, many: int, *shape: int) -> Tensor:
    """Numbers below ``many``, as frequent as words are (Zipf)."""
    return (many ** torch.rand(shape, generator=generator)).long().clamp(max=many) - 1


def finite(fresh: Problem, draw: Callable[[Key, int], Batch], epochs: int) -> Problem:
    """The same problem, but on a set that `WHOLE` steps see ``epochs`` times, in another order each time; what validates stays fresh."""
    size, name = fresh.batch_size, fresh.name

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


def pretrained(build: Callable[[], nn.Module], draw: Callable[[Key, int], Batch]) -> Callable[[int], nn.Module]:
    """Builds models, of any seed, with the weights after `PRETRAINING` steps on what is drawn; they are trained once, when they are asked for."""

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


# -- series: two coupled oscillators with noise, and the next value of each ----------------------------------------------------------

TIMES = 24


class Forecaster(nn.Module):
    """values (batch, time, 2) -> mean and log of the standard deviation of the next ones (batch, time, 4)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body, self.out = nn.LSTM(2, width, batch_first=True), nn.Linear(width, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.body(values)[0])


def _series(key: Key, count: int) -> Batch:
    generator = seeded("series", *key)
    x, v = torch.randn(count, 2, generator=generator), torch.randn(count, 2, generator=generator)
    strength, seen = 0.5 + torch.rand(count, 1, generator=generator), []
    for _ in range(TIMES + 1):
        v = 0.98 * v - 0.3 * (strength * torch.sin(x) + 0.5 * (x - x.flip(1)))
        x = x + 0.3 * v
        seen.append(x + 0.05 * torch.randn(count, 2, generator=generator))
    values = torch.stack(seen, 1)
    return values[:, :-1], values[:, 1:]


def _surprise(model: nn.Module, batch: Batch) -> Tensor:
    values, following = batch
    mean, log_deviation = model(values).chunk(2, -1)
    log_deviation = log_deviation.clamp(-6, 6)
    return (0.5 * ((following - mean) / log_deviation.exp()).square() + log_deviation + 0.5 * math.log(2 * math.pi)).mean((1, 2))


# -- sets of points in the plane: which of eight curves were they drawn from? -------------------------------------------------------

CURVES, POINTS = 8, 48


class Sets(nn.Module):
    """points (batch, count, 2) -> logits (batch, 8): deep sets."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.norm, self.all = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, CURVES))

    def forward(self, points: Tensor) -> Tensor:
        return self.all(self.norm(self.each(points).mean(1)))


def _sets(key: Key, count: int) -> Batch:
    """Curves r(t) = 1 + 0.4 sin(k t), k = 1 ... 8, turned and scaled at random, with noise."""
    generator = seeded("sets", *key)
    curve = torch.randint(CURVES, (count,), generator=generator)
    t, turn = 2 * torch.pi * torch.rand(count, POINTS, generator=generator), 2 * torch.pi * torch.rand(count, 1, generator=generator)
    radius = (1 + 0.4 * torch.sin((curve + 1)[:, None] * t)) * (0.7 + 0.6 * torch.rand(count, 1, generator=generator))
    points = torch.stack([radius * torch.cos(t + turn), radius * torch.sin(t + turn)], -1)
    return points + 0.05 * torch.randn(points.shape, generator=generator), curve


# -- pairs: which two views are of one point? -------------------------------------------------------------------------------------

LATENT, SEEN = 8, 32


class Towers(nn.Module):
    """Two views (batch, 32) each -> similarities (batch, batch)."""

    def __init__(self, width: int = 64, joint: int = 16) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(SEEN, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, joint)) for _ in range(2)
        )
        self.sharpness = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        a, b = (F.normalize(tower(view), dim=-1) for tower, view in zip(self.towers, (one, other), strict=True))
        return self.sharpness.clamp(max=math.log(100.0)).exp() * a @ b.T


@cache
def _views() -> tuple[Tensor, Tensor]:
    generator = seeded("pairs", "views")
    first, second = (torch.randn(LATENT, SEEN, generator=generator) / math.sqrt(LATENT) for _ in range(2))
    return first, second


def _pairs(key: Key, count: int) -> Batch:
    generator = seeded("pairs", *key)
    latent, views = torch.randn(count, LATENT, generator=generator), []
    for matrix in _views():
        view = torch.tanh(2 * latent @ matrix)
        views.append(view + 0.5 * torch.randn(view.shape, generator=generator))
    return tuple(views)


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    similar, same = model(*batch), torch.arange(len(batch[0]))
    return (F.cross_entropy(similar, same, reduction="none") + F.cross_entropy(similar.T, same, reduction="none")) / 2


# -- clusters: twenty classes of three clusters each, and some wrong labels ---------------------------------------------------------

CLASSES, FEATURES, WRONG = 20, 24, 0.1


def _network() -> nn.Module:
    layers = [nn.Linear(FEATURES, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, CLASSES)]
    return nn.Sequential(*layers)


@cache
def _centers(world: str) -> Tensor:
    return 1.2 * torch.randn(CLASSES, 3, FEATURES, generator=seeded("clusters", world))


def _clusters(key: Key, count: int, world: str = "first") -> Batch:
    generator = seeded("clusters", world, *key)
    y, cluster = torch.randint(CLASSES, (count,), generator=generator), torch.randint(3, (count,), generator=generator)
    x = _centers(world)[y, cluster] + torch.randn(count, FEATURES, generator=generator)
    wrong = torch.rand(count, generator=generator) < WRONG
    return x, torch.where(wrong, torch.randint(CLASSES, (count,), generator=generator), y)


def _near(key: Key, count: int) -> Batch:
    """The first world's clusters, each moved a little."""
    x, y = _clusters(key, count)
    return x + 0.8 * _centers("second")[y].mean(1), y


# -- brackets: the next of four kinds of brackets, nested ---------------------------------------------------------------------------

KINDS, DEPTH = 4, 32


class Reader(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 9): a causal transformer with learned positions."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(2 * KINDS + 1, width), nn.Parameter(0.02 * torch.randn(DEPTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 2 * KINDS + 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(DEPTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True))


def _brackets(key: Key, count: int) -> Batch:
    """Token 2k opens kind k, 2k + 1 closes it; the last one begins a text. What closes is always right; what opens is any kind."""
    generator = seeded("brackets", *key)
    opens, kinds = torch.rand(count, DEPTH, generator=generator) < 0.55, torch.randint(KINDS, (count, DEPTH), generator=generator)
    texts = []
    for row, drawn_kinds in zip(opens.tolist(), kinds.tolist(), strict=True):
        stack, text = [], [2 * KINDS]
        for opening, kind in zip(row, drawn_kinds, strict=True):
            if opening or not stack:
                stack.append(kind)
                text.append(2 * kind)
            else:
                text.append(2 * stack.pop() + 1)
        texts.append(text)
    tokens = torch.tensor(texts)
    return tokens[:, :-1], tokens[:, 1:]


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).transpose(1, 2), following, reduction="none").mean(1)


SERIES = problem("series", drawn(Forecaster), _series, _surprise)
SETS = problem("sets", drawn(Sets), _sets, labelled)
PAIRS = problem("pairs", drawn(Towers), _pairs, contrast, size=64)
CLUSTERS = problem("clusters", drawn(_network), _clusters, labelled, decay=1e-4)
TRANSFER = problem("transfer", pretrained(_network, _clusters), _near, labelled)
BRACKETS = problem("brackets", drawn(Reader), _brackets, next_token, size=16)
