"""The seventh test half: pairs that are ranked, echoes that are taken out, quantiles, points that are told apart by threes, a deep network without
normalisation, and rows with heavy tails."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, problem, sines, squares
from .groups import hidden_matrices

WIDE = 16


def _target(name: str, x: Tensor) -> Tensor:
    waves, weights = sines((name, "waves"), WIDE)
    return torch.sin(x @ waves) @ weights


def _hidden(width: int, depth: int, activation: type[nn.Module]) -> list[nn.Module]:
    return [layer for a, b in pairwise([WIDE, *[width] * depth]) for layer in (nn.Linear(a, b), activation())]


def _layers(out: int) -> nn.Module:
    return nn.Sequential(*_hidden(96, 2, nn.GELU), nn.Linear(96, out))


# -- ranked: which of two a noisy judge prefers (Bradley-Terry) --------------------------------------------------------------------------


def _preferred(key: Key, count: int) -> Batch:
    generator = seeded("ranked", *key)
    a, b = torch.randn(2, count, WIDE, generator=generator)
    chance = torch.sigmoid(4 * (_target("ranked", a) - _target("ranked", b)))
    return a, b, (torch.rand(count, generator=generator) < chance).float()


def _preference(model: nn.Module, batch: Batch) -> Tensor:
    a, b, first = batch
    return F.binary_cross_entropy_with_logits((model(a) - model(b))[:, 0], first, reduction="none")


# -- echoed: a sound without its echoes and noise ----------------------------------------------------------------------------------------

TICKS = 64


def _unechoed() -> nn.Module:
    def block(a: int, b: int) -> nn.Module:
        return weight_norm(nn.Conv1d(a, b, 9, padding=4))

    return nn.Sequential(block(1, 16), nn.ReLU(), block(16, 16), nn.ReLU(), block(16, 1))


def _echoes(key: Key, count: int) -> Batch:
    generator = seeded("echoed", *key)
    time = torch.arange(TICKS) / TICKS
    pitch, shift = 20 * torch.rand(count, 3, 1, generator=generator), 6 * torch.rand(count, 3, 1, generator=generator)
    sound = torch.sin(pitch * time + shift).sum(1) * torch.exp(-3 * (time - torch.rand(count, 1, generator=generator)).abs())
    echo = sound + 0.6 * sound.roll(3, 1) + 0.4 * sound.roll(7, 1)
    return (echo + 0.2 * torch.randn(count, TICKS, generator=generator))[:, None], sound[:, None]


def _unlike(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).mean((1, 2))


# -- quantiles: of a value whose spread depends on the place (pinball loss) --------------------------------------------------------------

PARTS = (0.05, 0.25, 0.5, 0.75, 0.95)


def _spread(key: Key, count: int) -> Batch:
    generator = seeded("quantiles", *key)
    x = torch.randn(count, WIDE, generator=generator)
    noise = torch.randn(count, generator=generator)
    return x, _target("quantiles", x) + (0.2 + 0.5 * torch.sigmoid(2 * x[:, 0])) * noise


def _pinball(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    off, parts = y[:, None] - model(x), torch.tensor(PARTS)
    return torch.maximum(parts * off, (parts - 1) * off).mean(1)


# -- threes: two views of one of many things, and a view of another (FaceNet's loss, arXiv 1503.03832) ----------------------------------

THINGS = 200


@cache
def _things() -> Tensor:
    return torch.randn(THINGS, WIDE, generator=seeded("threes", "things"))


def _threes(key: Key, count: int) -> Batch:
    generator = seeded("threes", *key)
    one = torch.randint(THINGS, (count,), generator=generator)
    other = (one + torch.randint(1, THINGS, (count,), generator=generator)) % THINGS
    views = torch.stack([_things()[one], _things()[one], _things()[other]])
    return tuple(
        (views * (1 + 0.5 * torch.randn(3, count, 1, generator=generator)) + 1.0 * torch.randn(views.shape, generator=generator)).unbind()
    )


def _nearer(model: nn.Module, batch: Batch) -> Tensor:
    a, same, other = (F.normalize(model(x), dim=-1) for x in batch)
    return F.relu((a - same).square().sum(-1) - (a - other).square().sum(-1) + 0.3)


# -- deep: fourteen layers of rectifiers, without normalisation --------------------------------------------------------------------------


def _deep() -> nn.Module:
    hidden = _hidden(48, 14, nn.ReLU)
    for layer in hidden[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*hidden, nn.Linear(48, 1), nn.Flatten(0))


def _smooth(key: Key, count: int) -> Batch:
    x = torch.randn(count, WIDE, generator=seeded("deep", *key))
    return x, _target("deep", x) + (x[:, 0] * x[:, 1]).tanh()


# -- heavy: rows some of which are far off ------------------------------------------------------------------------------------------------


def _tailed(key: Key, count: int) -> Batch:
    generator = seeded("heavy", *key)
    x = torch.randn(count, WIDE, generator=generator)
    tail = torch.randn(count, generator=generator) / torch.rand(count, generator=generator).clamp(min=1e-3).sqrt()
    return x, 3 * _target("heavy", x) + 0.3 * tail


def _robust(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.huber_loss(model(x)[:, 0], y, reduction="none", delta=1.0)


RANKED = problem("ranked", drawn(lambda: _layers(1)), _preferred, _preference, size=64)
ECHOED = problem("echoed", drawn(_unechoed), _echoes, _unlike)
QUANTILES = problem("quantiles", drawn(lambda: _layers(len(PARTS))), _spread, _pinball, size=64)
THREES = problem("threes", drawn(lambda: _layers(12)), _threes, _nearer, size=64, decay=1e-4)
DEEP = problem("deep", drawn(_deep), _smooth, squares, size=64, decay=1e-4)
HEAVY = replace(problem("heavy", drawn(lambda: _layers(1)), _tailed, _robust, size=64), groups=hidden_matrices)
