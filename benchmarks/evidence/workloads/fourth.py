"""The fourth test half, on data that is drawn anew for each step: marked numbers, graphs, heat, letters with noise, and other letters from weights that have
been trained on those."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, labelled, pretrained, problem, squares

# -- marked: the sum of the two numbers that are marked, of twenty ---------------------------------------------------------------------

LONG = 20


class Adder(nn.Module):
    """(batch, time, 2) -> (batch,): a GRU."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body, self.out = nn.GRU(2, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)[0][:, -1])[:, 0]


def _marked(key: Key, count: int) -> Batch:
    generator = seeded("marked", *key)
    numbers, marks = torch.rand(count, LONG, generator=generator), torch.zeros(count, LONG)
    places = torch.rand(count, LONG, generator=generator).topk(2).indices
    marks.scatter_(1, places, 1.0)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)


# -- graphs: the number of triangles in a graph of fourteen nodes, in five classes -----------------------------------------------------

NODES, ROUNDS, EDGES = 14, 3, (4, 9, 16, 26)


class Messages(nn.Module):
    """Adjacency (batch, 14, 14) -> logits (batch, 5): three rounds of messages, and the mean of all nodes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(NODES, width)
        self.rounds = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(ROUNDS))
        self.norms, self.out = nn.ModuleList(nn.LayerNorm(width) for _ in range(ROUNDS)), nn.Linear(width, len(EDGES) + 1)

    def forward(self, adjacency: Tensor) -> Tensor:
        state = self.first(adjacency)
        for update, norm in zip(self.rounds, self.norms, strict=True):
            state = norm(state + update(torch.cat([state, adjacency @ state], -1)))
        return self.out(state.mean(1))


def _graphs(key: Key, count: int) -> Batch:
    generator = seeded("graphs", *key)
    density = 0.2 + 0.35 * torch.rand(count, 1, 1, generator=generator)
    upper = (torch.rand(count, NODES, NODES, generator=generator) < density).float().triu(1)
    adjacency = upper + upper.mT
    triangles = (adjacency @ adjacency * adjacency).sum((1, 2)) / 6
    return adjacency, torch.bucketize(triangles, torch.tensor(EDGES, dtype=torch.float32))


# -- heat: the temperature at a place and a time, from that at the beginning: a loss that falls by orders of magnitude ------------------

WAVES = 6


class Heat(nn.Module):
    """Amplitudes (batch, 6), place and time (batch, 2) -> temperature (batch,)."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        layers = [nn.Linear(WAVES + 2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


def heat(key: Key, count: int, number: int = WAVES) -> Batch:
    """``number``: of the waves that are heard, the longest first; the others are not there."""
    generator = seeded("heat", *key)
    amplitudes, at = torch.randn(count, WAVES, generator=generator), torch.rand(count, 2, generator=generator)
    k = torch.arange(1, WAVES + 1)
    amplitudes[:, number:] = 0.0
    waves = torch.sin(math.pi * k * at[:, :1]) * torch.exp(-0.3 * k.square() * at[:, 1:])
    return torch.cat([amplitudes, at], 1), (amplitudes * waves).sum(1)


# -- letters: which of sixteen strokes was drawn on 12 x 12 dots, with noise; and sixteen others, from weights trained on the first ------

LETTERS, DOTS = 16, 12


def reader() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
        nn.Flatten(), nn.Linear(24 * 9, 48), nn.ReLU(), nn.Linear(48, LETTERS),
    )  # fmt: skip


@cache
def _strokes(alphabet: str) -> Tensor:
    """(16, 12, 12): each a walk of 18 dots."""
    generator, walks = seeded("letters", alphabet), torch.zeros(LETTERS, DOTS, DOTS)
    for walk in walks:
        place = torch.randint(3, 9, (2,), generator=generator)
        for _ in range(18):
            walk[tuple(place.tolist())] = 1.0
            place = (place + torch.randint(-1, 2, (2,), generator=generator)).clamp(1, DOTS - 2)
    return walks


def letters(key: Key, count: int, alphabet: str = "first", noise: float = 0.7) -> Batch:
    generator = seeded("letters", alphabet, *key)
    y, shift = torch.randint(LETTERS, (count,), generator=generator), torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    drawn_at = torch.stack(
        [torch.roll(_strokes(alphabet)[letter], tuple(by), (0, 1)) for letter, by in zip(y.tolist(), shift, strict=True)]
    )
    return (drawn_at + noise * torch.randn(count, DOTS, DOTS, generator=generator))[:, None], y


MARKED = problem("marked", drawn(Adder), _marked, squares)
GRAPHS = problem("graphs", drawn(Messages), _graphs, labelled)
HEAT = problem("heat", drawn(Heat), heat, squares, size=64)
LETTERS_ANEW = problem("letters", drawn(reader), letters, labelled)
RETRAINED = problem("retrained", pretrained(reader, letters), lambda key, count: letters(key, count, "second"), labelled)
