"""The ninth test half: ratings, clicks by their crossed columns, claims with heavy tails, words of a short text, gratings of which some are named wrongly
and energies, of all of which there is a finite set that is seen again; and, always fresh, what happens next and when, and how a body is turned."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, drawn
from .generated import Key, either, finite, labelled, next_token, problem, sines, squares, zipf
from .groups import hidden_matrices

# -- rated: what people think of films (matrix factorisation, with biases) ---------------------------------------------------------------

PEOPLE, FILMS = 6000, 2000


class _Factors(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.people, self.films = nn.Embedding(PEOPLE, width), nn.Embedding(FILMS, width)
        self.kindness, self.fame = nn.Embedding(PEOPLE, 1), nn.Embedding(FILMS, 1)
        self.middle = nn.Parameter(torch.zeros(()))
        for table in (self.people, self.films):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.kindness, self.fame):
            nn.init.zeros_(table.weight)

    def forward(self, x: Tensor) -> Tensor:
        person, film = x.T
        return (self.people(person) * self.films(film)).sum(1) + (self.kindness(person) + self.fame(film))[:, 0] + self.middle


@cache
def _tastes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = seeded("rated", "tastes")
    kindness, fame = (0.4 * torch.randn(many, generator=generator) for many in (PEOPLE, FILMS))
    tastes, kinds = (torch.randn(many, 5, generator=generator) / 5**0.5 for many in (PEOPLE, FILMS))
    return kindness, fame, tastes, kinds


def _ratings(key: Key, count: int) -> Batch:
    """From -2.5 to 1.5: stars, less the 3.5 that most give."""
    generator = seeded("rated", *key)
    person, film = torch.randint(PEOPLE, (count,), generator=generator), zipf(generator, FILMS, count)
    kindness, fame, tastes, kinds = _tastes()
    liking = kindness[person] + fame[film] + 1.5 * (tastes[person] * kinds[film]).sum(1)
    stars = (3.6 + liking + 0.6 * torch.randn(count, generator=generator)).round().clamp(1, 5)
    return torch.stack([person, film], 1), stars - 3.5


# -- crossed: clicks by eight columns of names, and by their pairs (factorisation machines, and hashed crosses) --------------------------

COLUMNS = (3000, 1500, 600, 300, 100, 40, 16, 8)
CROSSES = ((0, 4), (1, 5), (2, 6), (3, 7))
BUCKETS = 8192


class _Machine(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.parts, self.alone, self.crossed = nn.Embedding(sum(COLUMNS), width), nn.Embedding(sum(COLUMNS), 1), nn.Embedding(BUCKETS, 1)
        nn.init.normal_(self.parts.weight, std=0.05)
        for table in (self.alone, self.crossed):
            nn.init.zeros_(table.weight)
        self.layers = nn.Sequential(nn.Linear(len(COLUMNS) * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.tensor(CROSSES).T
        parts, buckets = self.parts(x), (x[:, first] * 7919 + x[:, second]) % BUCKETS
        pairs = (parts.sum(1).square() - parts.square().sum(1)).sum(1) / 2
        return self.layers(parts.flatten(1))[:, 0] + pairs + self.alone(x).sum((1, 2)) + self.crossed(buckets).sum((1, 2))


@cache
def _worth() -> tuple[Tensor, Tensor, Tensor]:
    """Of each name, its part in pairs, and of each pair of names in a cross."""
    generator = seeded("crossed", "worth")
    many = sum(COLUMNS)
    alone, parts = 0.35 * torch.randn(many, generator=generator), 0.3 * torch.randn(many, 4, generator=generator)
    return alone, parts, 0.4 * torch.randn(65_536, generator=generator)


def _columns(key: Key, count: int) -> Batch:
    generator = seeded("crossed", *key)
    before = torch.tensor((0, *COLUMNS[:-1])).cumsum(0)
    x = torch.stack([zipf(generator, many, count) for many in COLUMNS], 1) + before
    alone, parts, together = _worth()
    pairs = (parts[x].sum(1).square() - parts[x].square().sum(1)).sum(1) / 2
    first, second = torch.tensor(CROSSES).T
    chance = torch.sigmoid(-1.5 + alone[x].sum(1) + pairs + together[(x[:, first] * 4099 + x[:, second]) % len(together)].sum(1))
    return x, (torch.rand(count, generator=generator) < chance).float()


# -- claims: what an insurance will pay, mostly nothing, at times a lot (Tweedie's deviance) ---------------------------------------------

REGIONS, CARS, NUMBERS, MOST = 300, 500, 6, 6


class _Insurer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regions, self.cars = nn.Embedding(REGIONS, 8), nn.Embedding(CARS, 8)
        self.layers = nn.Sequential(nn.Linear(NUMBERS + 16, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))

    def forward(self, names: Tensor, numbers: Tensor) -> Tensor:
        return self.layers(torch.cat([self.regions(names[:, 0]), self.cars(names[:, 1]), numbers], 1))[:, 0]


def _claims(key: Key, count: int) -> Batch:
    generator, common = seeded("claims", *key), seeded("claims", "common")
    by_region, by_car = (0.4 * torch.randn(many, 2, generator=common) for many in (REGIONS, CARS))
    region, car = zipf(generator, REGIONS, count), zipf(generator, CARS, count)
    numbers = torch.randn(count, NUMBERS, generator=generator)
    waves, weights = sines(("claims", "waves"), NUMBERS, outs=(2,))
    often, dear = (torch.sin(numbers @ waves) @ weights + by_region[region] + by_car[car]).T
    happened = torch.poisson(torch.exp(often - 0.7), generator=generator)
    each = torch.exp(0.6 * dear[:, None] + torch.randn(count, MOST, generator=generator))
    return torch.stack([region, car], 1), numbers, (each * (torch.arange(MOST) < happened[:, None])).sum(1)


def _deviance(model: nn.Module, batch: Batch) -> Tensor:
    """Of power 1.5, without what no model can change."""
    names, numbers, paid = batch
    half = model(names, numbers) / 2
    return 2 * (paid * torch.exp(-half) + torch.exp(half))


# -- worded: the next word of a short text, which is read from beginning to end again and again ------------------------------------------

SORTS, EACH, TOPICS, LONG = 40, 40, 8, 16
WORDS = SORTS * EACH


class _Worded(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LONG, width))
        nn.init.normal_(self.words.weight, std=0.1)
        self.layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LONG), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.norm(self.layer(self.words(words) + self.places, src_mask=self.mask, is_causal=True)))


@cache
def _grammar() -> tuple[Tensor, Tensor]:
    """Which sort of words follows on which, (sorts, sorts); and which word of a sort on a topic, (sorts, topics, each)."""
    generator = seeded("worded", "grammar")
    following = torch.softmax(2 * torch.randn(SORTS, SORTS, generator=generator), 1)
    liked = torch.randn(SORTS, TOPICS, EACH, generator=generator) - torch.arange(1.0, EACH + 1).log()
    return following, torch.softmax(liked, 2)


def _text(key: Key, count: int) -> Batch:
    """Windows: each has one topic, and now and then says the word before the last one again."""
    generator = seeded("worded", *key)
    following, liked = _grammar()
    topic, sort = torch.randint(TOPICS, (count,), generator=generator), torch.randint(SORTS, (count,), generator=generator)
    said: list[Tensor] = []
    for place in range(LONG + 1):
        sort = torch.multinomial(following[sort], 1, generator=generator)[:, 0]
        word = sort * EACH + torch.multinomial(liked[sort, topic], 1, generator=generator)[:, 0]
        same = torch.rand(count, generator=generator) < 0.1
        said.append(torch.where(same, said[-2], word) if place > 1 else word)
        sort = said[-1] // EACH
    words = torch.stack(said, 1)
    return words[:, :-1], words[:, 1:]


# -- gratings: which of twelve textures is it, with one name in five wrong ---------------------------------------------------------------

TEXTURES, DOTS = 12, 16


def _looks() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, TEXTURES),
    )  # fmt: skip


def _gratings(key: Key, count: int) -> Batch:
    """Two waves each, of any phase and contrast."""
    generator, common = seeded("gratings", *key), seeded("gratings", "waves")
    turn, pace = math.pi * torch.rand(TEXTURES, 2, generator=common), 0.5 + torch.rand(TEXTURES, 2, generator=common)
    kind = torch.randint(TEXTURES, (count,), generator=generator)
    down, across = (pace * turn.sin())[kind], (pace * turn.cos())[kind]
    phase, contrast = 2 * math.pi * torch.rand(count, 2, generator=generator), 0.5 + torch.rand(count, 2, generator=generator)
    at = torch.arange(DOTS)
    waves = down[:, :, None, None] * at[:, None] + across[:, :, None, None] * at + phase[:, :, None, None]
    seen = (contrast[:, :, None, None] * waves.sin()).sum(1, keepdim=True)
    named = torch.where(torch.rand(count, generator=generator) < 0.2, torch.randint(TEXTURES, (count,), generator=generator), kind)
    return seen + torch.randn(seen.shape, generator=generator), named


# -- energies: of eight atoms of three kinds, by their distances (a Finnis-Sinclair potential) -------------------------------------------

ATOMS, ELEMENTS = 8, 3


class _Potential(nn.Module):
    steps: Tensor

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(0.5, 3.5, 12))
        self.pairs = nn.Sequential(nn.Linear(12 + 2 * ELEMENTS, width), nn.SiLU(), nn.Linear(width, width))
        self.atoms = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, places: Tensor, elements: Tensor) -> Tensor:
        near = torch.exp(-4 * (torch.cdist(places, places)[..., None] - self.steps).square())
        kinds = F.one_hot(elements, ELEMENTS).float()
        one, other = kinds[:, :, None].expand(-1, -1, ATOMS, -1), kinds[:, None].expand(-1, ATOMS, -1, -1)
        others = 1 - torch.eye(ATOMS)[..., None]
        return self.atoms((self.pairs(torch.cat([near, one, other], 3)) * others).sum(2) / ATOMS).sum((1, 2))


def _molecules(key: Key, count: int) -> Batch:
    generator, common = seeded("energies", *key), seeded("energies", "elements")
    reach, depth = (0.7 + 0.6 * torch.rand(ELEMENTS, ELEMENTS, generator=common) for _ in range(2))
    places, elements = torch.randn(count, ATOMS, 3, generator=generator), torch.randint(ELEMENTS, (count, ATOMS), generator=generator)
    pair = elements[:, :, None], elements[:, None]
    apart = ((places[:, :, None] - places[:, None]).square().sum(3) + 0.2).sqrt() / (reach + reach.T)[pair]
    others = 1 - torch.eye(ATOMS)
    pushed = ((depth + depth.T)[pair] * torch.exp(-4 * apart) * others).sum((1, 2))
    bound = ((torch.exp(-2.5 * apart) * others).sum(2) + 1e-3).sqrt().sum(1)
    return places, elements, (1.2 * pushed - 2 * bound + 8.2) / 0.7


def _missed(model: nn.Module, batch: Batch) -> Tensor:
    places, elements, energy = batch
    return (model(places, elements) - energy).square()


# -- awaited: what happens next, and when, where things that happen bring others (a Hawkes process) --------------------------------------

EVENTS, SERIES, FADES = 5, 16, 4.0


class _Awaited(nn.Module):
    """(logarithm of a gap, what ended it) -> what ends the next one, and weights, middles and log widths of three log-normals of it"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.kinds, self.body = nn.Embedding(EVENTS, 8), nn.GRU(9, width, batch_first=True)
        self.out = nn.Linear(width, EVENTS + 9)

    def forward(self, gaps: Tensor, kinds: Tensor) -> Tensor:
        return self.out(self.body(torch.cat([gaps[..., None], self.kinds(kinds)], 2))[0])


@cache
def _brings() -> Tensor:
    """Each brings 0.8 others in the mean, so that it ends."""
    return 0.8 * FADES * torch.softmax(2 * torch.randn(EVENTS, EVENTS, generator=seeded("awaited", "brings")), 1)


def _happened(key: Key, count: int) -> Batch:
    generator = seeded("awaited", *key)
    excited, gaps, kinds = torch.zeros(count, EVENTS), [], []
    waits = torch.empty(SERIES + 1, count, 1).exponential_(generator=generator)
    chosen = torch.rand(SERIES + 1, count, 1, generator=generator)
    for wait, part in zip(waits, chosen, strict=True):
        rates = 0.1 + excited
        gap = wait / rates.sum(1, keepdim=True)
        kind = (part * rates.sum(1, keepdim=True) > rates.cumsum(1)).sum(1).clamp(max=EVENTS - 1)
        excited = excited * torch.exp(-FADES * gap) + _brings()[kind]
        gaps.append(gap[:, 0])
        kinds.append(kind)
    return torch.stack(gaps, 1).clamp(min=1e-4).log(), torch.stack(kinds, 1)


def _unforeseen(model: nn.Module, batch: Batch) -> Tensor:
    gaps, kinds = batch
    what, weights, middles, widths = model(gaps[:, :-1], kinds[:, :-1]).split([EVENTS, 3, 3, 3], 2)
    widths = widths.clamp(-4, 4)
    off = (gaps[:, 1:, None] - middles) * torch.exp(-widths)
    when = torch.logsumexp(F.log_softmax(weights, 2) - widths - 0.5 * off.square() - 0.5 * math.log(2 * math.pi), 2)
    return (F.cross_entropy(what.transpose(1, 2), kinds[:, 1:], reduction="none") - when).mean(1)


# -- turned: how a body is turned, of which some corners are not seen (six numbers, arXiv 1812.07035) ------------------------------------

CORNERS = 12


def _square(six: Tensor) -> Tensor:
    """(..., 6) -> rotations (..., 3, 3)"""
    first, second = six[..., :3], six[..., 3:]
    first = F.normalize(first, dim=-1)
    second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -2)


def _turns(key: Key, count: int) -> Batch:
    generator = seeded("turned", *key)
    body = torch.randn(CORNERS, 3, generator=seeded("turned", "body"))
    rotation = _square(torch.randn(count, 6, generator=generator))
    seen = body @ rotation + 0.1 * torch.randn(count, CORNERS, 3, generator=generator)
    shown = (torch.rand(count, CORNERS, 1, generator=generator) < 0.6).float()
    return torch.cat([seen * shown, shown], 2).flatten(1), rotation


def _askew(model: nn.Module, batch: Batch) -> Tensor:
    x, rotation = batch
    return (_square(model(x)) - rotation).square().sum((1, 2))


def _steady() -> nn.Module:
    return nn.Sequential(nn.Linear(4 * CORNERS, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 6))


RATED = finite(problem("rated", drawn(_Factors), _ratings, squares, size=128), _ratings, epochs=11)
CROSSED = finite(problem("crossed", drawn(_Machine), _columns, either, size=128), _columns, epochs=2)
CLAIMS = finite(problem("claims", drawn(_Insurer), _claims, _deviance, size=128), _claims, epochs=3)
WORDED = finite(problem("worded", drawn(_Worded), _text, next_token, size=8, decay=0.1), _text, epochs=7)
GRATINGS = finite(problem("gratings", drawn(_looks), _gratings, labelled, decay=5e-4), _gratings, epochs=5)
ENERGIES = finite(replace(problem("energies", drawn(_Potential), _molecules, _missed), groups=hidden_matrices), _molecules, epochs=9)
AWAITED = problem("awaited", drawn(_Awaited), _happened, _unforeseen)
TURNED = problem("turned", drawn(_steady), _turns, _askew, size=64)
