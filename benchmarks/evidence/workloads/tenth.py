"""The tenth test half: facts, games, tags of three words, grades of which some are wrong, states that follow one another, and how far a picture has moved.
Of facts, games and grades there is a finite set that is seen again; of facts, games and tags a model is told nothing but a few numbers of things."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, either, finite, labelled, problem, sines, zipf
from .groups import hidden_matrices

# -- linked: what has this relation to this thing? (a graph of knowledge, with complex embeddings, arXiv 1606.06357) ---------------------

THINGS, RELATIONS = 600, 16


def _turned(thing: Tensor, relation: Tensor) -> Tensor:
    """The product of complex numbers, whose real parts come first."""
    (a, b), (c, d) = thing.chunk(2, -1), relation.chunk(2, -1)
    return torch.cat([a * c - b * d, a * d + b * c], -1)


class _Linked(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(THINGS, width), nn.Embedding(RELATIONS, width)
        self.fame = nn.Parameter(torch.zeros(THINGS))
        for table in (self.things, self.relations):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        head, relation = x.T
        return _turned(self.things(head), self.relations(relation)) @ self.things.weight.T + self.fame


@cache
def _knowledge() -> Tensor:
    """Of all questions one after the other, the sums of the chances of the answers: question n's go from n to n + 1."""
    generator = seeded("linked", "knowledge")
    things, relations = (torch.randn(many, 12, generator=generator) for many in (THINGS, RELATIONS))
    fame = 0.7 * torch.randn(THINGS, generator=generator)
    liking = _turned(things[:, None], relations) @ things.T
    chances = torch.softmax(0.8 * liking + fame, 2).double().flatten(0, 1)
    ends = chances.cumsum(1)
    return (ends / ends[:, -1:] + torch.arange(len(ends))[:, None]).flatten()


def _facts(key: Key, count: int) -> Batch:
    generator = seeded("linked", *key)
    head, relation = zipf(generator, THINGS, count), torch.randint(RELATIONS, (count,), generator=generator)
    question = head * RELATIONS + relation
    at = torch.searchsorted(_knowledge(), question + torch.rand(count, generator=generator, dtype=torch.float64), right=True)
    return torch.stack([head, relation], 1), (at - question * THINGS).clamp(0, THINGS - 1)


# -- won: which of two players wins on this map? (Bradley and Terry's chances) -----------------------------------------------------------

PLAYERS, MAPS = 3000, 20


class _Won(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.players, self.maps, self.begins = nn.Embedding(PLAYERS, width), nn.Embedding(MAPS, width), nn.Embedding(MAPS, 1)
        nn.init.zeros_(self.begins.weight)
        self.layers = nn.Sequential(nn.Linear(2 * width, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        board = self.maps(x[:, 2:])
        strength = self.layers(torch.cat([self.players(x[:, :2]), board.expand(-1, 2, -1)], 2))[..., 0]
        return strength[:, 0] - strength[:, 1] + self.begins(x[:, 2])[:, 0]


@cache
def _strengths() -> tuple[Tensor, Tensor]:
    """(players, maps), and what it is worth to begin"""
    generator = seeded("won", "strengths")
    skill, habits = torch.randn(PLAYERS, 1, generator=generator), torch.randn(PLAYERS, 3, generator=generator)
    suits = torch.randn(3, MAPS, generator=generator) / 3**0.5
    return 1.2 * skill + 0.8 * habits @ suits, 0.3 * torch.randn(MAPS, generator=generator)


def _games(key: Key, count: int) -> Batch:
    """Some play a lot more than others; nobody plays against himself."""
    generator = seeded("won", *key)
    one = (PLAYERS * torch.rand(count, generator=generator) ** 1.5).long().clamp(max=PLAYERS - 1)
    other = (one + torch.randint(1, PLAYERS, (count,), generator=generator)) % PLAYERS
    board = torch.randint(MAPS, (count,), generator=generator)
    strengths, begins = _strengths()
    chance = torch.sigmoid(strengths[one, board] - strengths[other, board] + begins[board])
    return torch.stack([one, other, board], 1), (torch.rand(count, generator=generator) < chance).float()


# -- tagged: what part has a word between two others? ------------------------------------------------------------------------------------

SAID, TAGS = 1500, 12


class _Tagged(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(SAID, width)
        self.layers = nn.Sequential(nn.Linear(3 * width, 96), nn.GELU(), nn.Linear(96, TAGS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.words(x).flatten(1))


@cache
def _parts() -> tuple[Tensor, Tensor, Tensor]:
    """What a word is by itself, which sort it is of, and what two sorts around it make of it."""
    generator = seeded("tagged", "parts")
    alone, sorts = 1.5 * torch.randn(SAID, TAGS, generator=generator), torch.randint(8, (SAID,), generator=generator)
    return alone, sorts, 1.2 * torch.randn(8, 8, TAGS, generator=generator)


def _threes(key: Key, count: int) -> Batch:
    generator = seeded("tagged", *key)
    x = zipf(generator, SAID, count, 3)
    alone, sorts, around = _parts()
    noise = torch.rand(count, TAGS, generator=generator).clamp(min=1e-6).log().neg().log().neg()
    return x, (alone[x[:, 1]] + around[sorts[x[:, 0]], sorts[x[:, 2]]] + noise).argmax(1)


# -- graded: in which of five grades are rows of numbers, where a person gives any grade at times ----------------------------------------

NUMBERS, GRADES = 20, 5


class _Graded(nn.Module):
    """Numbers -> logits of being above each grade but the last: one value, and four thresholds (arXiv 1901.07884)."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.second, self.value = nn.Linear(NUMBERS, width), nn.Linear(width, width), nn.Linear(width, 1, bias=False)
        self.thresholds = nn.Parameter(torch.linspace(1, -1, GRADES - 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.value(hidden + F.relu(self.second(hidden))) + self.thresholds


def _rows(key: Key, count: int) -> Batch:
    """One in five is of any grade."""
    generator = seeded("graded", *key)
    x = torch.randn(count, NUMBERS, generator=generator)
    waves, weights = sines(("graded", "waves"), NUMBERS, frequency=0.3)
    value = 1.5 * torch.sin(x @ waves) @ weights + 0.5 * torch.randn(count, generator=generator)
    grade = (value[:, None] > torch.tensor((-1.0, -0.3, 0.3, 1.0))).sum(1)
    careless = torch.rand(count, generator=generator) < 0.2
    return x, torch.where(careless, torch.randint(GRADES, (count,), generator=generator), grade)


def _above(model: nn.Module, batch: Batch) -> Tensor:
    x, grade = batch
    above = (grade[:, None] > torch.arange(GRADES - 1)).float()
    return F.binary_cross_entropy_with_logits(model(x), above, reduction="none").sum(1)


# -- stated: which states did a machine go through? (a conditional random field) ---------------------------------------------------------

STATES, TICKS, GAUGES, SPAN = 5, 8, 3, 5


class _Stated(nn.Module):
    """What is seen (batch, ticks, gauges) -> scores of the states (batch, ticks, states), and those of going from one to another."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SPAN * GAUGES, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, STATES)
        )
        self.goes = nn.Parameter(torch.zeros(STATES, STATES))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        around = F.pad(seen, (0, 0, SPAN // 2, SPAN // 2)).unfold(1, SPAN, 1)
        return self.layers(around.flatten(2)), self.goes


@cache
def _machine() -> tuple[Tensor, Tensor, Tensor]:
    """(states, states) chances of going; (states, gauges, gauges) how gauges go on; (states, gauges) where they go."""
    generator = seeded("stated", "machine")
    goes = torch.softmax(1.5 * torch.randn(STATES, STATES, generator=generator) + 2 * torch.eye(STATES), 1)
    return goes, 0.5 * torch.randn(STATES, GAUGES, GAUGES, generator=generator), torch.randn(STATES, GAUGES, generator=generator)


def _ticks(key: Key, count: int) -> Batch:
    generator = seeded("stated", *key)
    goes, on, where = _machine()
    state, gauges = torch.randint(STATES, (count,), generator=generator), torch.randn(count, GAUGES, generator=generator)
    noise, chosen = torch.randn(TICKS, count, GAUGES, generator=generator), torch.rand(TICKS, count, 1, generator=generator)
    states, seen = [], []
    for pushed, part in zip(noise, chosen, strict=True):
        state = (part > goes.cumsum(1)[state]).sum(1).clamp(max=STATES - 1)
        gauges = torch.tanh((gauges[:, None] @ on[state])[:, 0] + where[state]) + 0.5 * pushed
        states.append(state)
        seen.append(gauges)
    return torch.stack(seen, 1), torch.stack(states, 1)


def _path(model: nn.Module, batch: Batch) -> Tensor:
    """How unlikely the whole path is among all, for each tick."""
    seen, states = batch
    scores, goes = model(seen)
    right = scores.gather(2, states[..., None]).sum((1, 2)) + goes[states[:, :-1], states[:, 1:]].sum(1)
    every, *others = scores.unbind(1)
    for score in others:
        every = torch.logsumexp(every[:, :, None] + goes, 1) + score
    return (torch.logsumexp(every, 1) - right) / TICKS


# -- moved: how far has a picture moved between two looks at it? (a correlation of features, arXiv 1504.06852) ---------------------------

SIDE, FAR = 8, 2
MOVES = (2 * FAR + 1) ** 2


class _Moved(nn.Module):
    """Two pictures (batch, 2, side, side) -> logits of the moves (batch, 25)"""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, width, 5, padding=2), nn.GELU())
        self.layers = nn.Sequential(nn.Linear(MOVES, 64), nn.GELU(), nn.Linear(64, MOVES))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.features(x.flatten(0, 1)[:, None]).unflatten(0, (-1, 2)).unbind(1)
        inner = first[:, :, FAR:-FAR, FAR:-FAR]
        alike = inner.flatten(1)[:, None] @ F.unfold(second, SIDE - 2 * FAR)
        return self.layers(alike[:, 0] / SIDE)


def _looks(key: Key, count: int) -> Batch:
    """Of a wider scene, a little smooth; each look has noise, and a brightness of its own."""
    generator = seeded("moved", *key)
    wide = SIDE + 2 * FAR
    scene = F.avg_pool2d(torch.randn(count, 1, wide + 1, wide + 1, generator=generator), 2, 1)[:, 0] * 2
    move = torch.randint(MOVES, (count,), generator=generator)
    down, across = move // (2 * FAR + 1), move % (2 * FAR + 1)
    at, example = torch.arange(SIDE), torch.arange(count)[:, None, None]
    later = scene[example, (down[:, None] + at)[:, :, None], (across[:, None] + at)[:, None]]
    pictures = torch.stack([scene[:, FAR:-FAR, FAR:-FAR], later], 1)
    noise, light = torch.randn(pictures.shape, generator=generator), torch.randn(count, 2, 1, 1, generator=generator)
    return pictures + 0.8 * noise + 0.5 * light, move


LINKED = finite(problem("linked", drawn(_Linked), _facts, labelled, size=64), _facts, epochs=3)
WON = finite(problem("won", drawn(_Won), _games, either, size=32), _games, epochs=8)
TAGGED = problem("tagged", drawn(_Tagged), _threes, labelled, size=64)
GRADED = finite(problem("graded", drawn(_Graded), _rows, _above, decay=5e-4), _rows, epochs=6)
STATED = problem("stated", drawn(_Stated), _ticks, _path)
MOVED = replace(problem("moved", drawn(_Moved), _looks, labelled, size=16), groups=hidden_matrices)
