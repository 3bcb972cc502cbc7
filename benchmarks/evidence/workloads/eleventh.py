"""Sets that are seen many times, with a judge: kinds of which many are named wrong, tastes of mixtures, and knocks in recordings."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, finite, labelled, problem, sines


def _misnamed(generator: torch.Generator, names: Tensor, many: int, part: float) -> Tensor:
    """A part of the names is any of ``many``."""
    careless = torch.rand(len(names), generator=generator) < part
    return torch.where(careless, torch.randint(many, names.shape, generator=generator), names)


# -- doubted: of which kind are rows of numbers, where three names in ten are any name? (a wide network learns them by heart) -------------

MEASURES, KINDS = 16, 10


class _Doubted(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(MEASURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, KINDS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _measures(key: Key, count: int) -> Batch:
    generator = seeded("doubted", *key)
    x = torch.randn(count, MEASURES, generator=generator)
    waves, weights = sines(("doubted", "waves"), MEASURES, frequency=0.2, outs=(KINDS,))
    return x, _misnamed(generator, (torch.sin(x @ waves) @ weights).argmax(1), KINDS, 0.3)


# -- tasted: which taste has a mixture of six spices? (few weights, many rows) -----------------------------------------------------------

SPICES, SPOONS, QUALITIES, TASTES = 60, 6, 8, 5


class _Tasted(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.spices = nn.Embedding(SPICES, width)
        self.layers = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, TASTES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.spices(x).mean(1))


@cache
def _qualities() -> Tensor:
    return torch.randn(SPICES, QUALITIES, generator=seeded("tasted", "qualities"))


def _mixtures(key: Key, count: int) -> Batch:
    """One name in fifty is any."""
    generator = seeded("tasted", *key)
    x = torch.randint(SPICES, (count, SPOONS), generator=generator)
    waves, weights = sines(("tasted", "waves"), QUALITIES, outs=(TASTES,))
    taste = torch.sin(_qualities()[x].sum(1) / SPOONS**0.5 @ waves) @ weights
    return x, _misnamed(generator, taste.argmax(1), TASTES, 0.02)


# -- knocked: which knock is somewhere in a recording with noise, where one name in ten is any name? -------------------------------------

MOMENTS, KNOCKS, LASTS = 32, 8, 7


class _Knocked(nn.Module):
    """Recordings (batch, moments) -> logits of the knocks"""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, LASTS, stride=2, padding=LASTS // 2), nn.GELU(), nn.Conv1d(width, 2 * width, 5, padding=2), nn.GELU()
        )
        self.last = nn.Linear(2 * width, KNOCKS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x[:, None]).amax(2))


@cache
def _knocks() -> Tensor:
    return 1.5 * torch.randn(KNOCKS, LASTS, generator=seeded("knocked", "knocks"))


def _recordings(key: Key, count: int) -> Batch:
    generator = seeded("knocked", *key)
    x = 0.7 * torch.randn(count, MOMENTS, generator=generator)
    knock = torch.randint(KNOCKS, (count,), generator=generator)
    at = torch.randint(MOMENTS - LASTS + 1, (count, 1), generator=generator) + torch.arange(LASTS)
    loud = 0.5 + torch.rand(count, 1, generator=generator)
    return x.scatter_add(1, at, loud * _knocks()[knock]), _misnamed(generator, knock, KNOCKS, 0.1)


DOUBTED = finite(problem("doubted", drawn(_Doubted), _measures, labelled), _measures, epochs=60)
TASTED = finite(problem("tasted", drawn(_Tasted), _mixtures, labelled, size=64, decay=1e-4), _mixtures, epochs=40)
KNOCKED = finite(problem("knocked", drawn(_Knocked), _recordings, labelled), _recordings, epochs=15)
