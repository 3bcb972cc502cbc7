"""The sixth test half: a teacher's answers, a picture by its coordinates, counts, phrases in another language, densities with several peaks, a pendulum
over many steps, weights of one bit, a parity that nothing hints at, and bytes with parameters of 16 bits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.cli.job.data import sample_batch

from ..problems import digits
from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .generated import Key, labelled, problem, squares
from .groups import decaying_matrices, hidden_matrices
from .text import english

# -- distilled: what a larger network thinks of points (Hinton, Vinyals, Dean, arXiv 1503.02531) -----------------------------------------

SEEN, THOUGHTS = 20, 12


def _student() -> nn.Module:
    layers = [layer for _ in range(2) for layer in (nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(SEEN, 96), *layers, nn.Linear(96, THOUGHTS))


@cache
def _teacher() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(SEEN, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, THOUGHTS)).requires_grad_(False)


def _answers(key: Key, count: int) -> Batch:
    x = 1.5 * torch.randn(count, SEEN, generator=seeded("distilled", *key))
    return x, torch.log_softmax(25 * _teacher()(x), -1)


def _divergence(model: nn.Module, batch: Batch) -> Tensor:
    x, answers = batch
    return F.kl_div(model(x).log_softmax(-1), answers, reduction="none", log_target=True).sum(-1)


# -- painted: a picture as a function of its coordinates (sine networks, arXiv 2006.09661) ----------------------------------------------

SPOTS = 40


class Painter(nn.Module):
    """(batch, 2) in [-1, 1] -> (batch,)"""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.out = nn.Linear(width, 1)
        nn.init.uniform_(self.layers[0].weight, -0.5, 0.5)
        for layer in self.layers[1:]:
            nn.init.uniform_(layer.weight, -math.sqrt(6 / width) / 20, math.sqrt(6 / width) / 20)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(20 * layer(x))
        return self.out(x)[:, 0]


@cache
def _spots() -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded("painted", "spots")
    at, size = 2 * torch.rand(SPOTS, 2, generator=generator) - 1, 0.05 + 0.2 * torch.rand(SPOTS, generator=generator)
    return at, size, torch.randn(SPOTS, generator=generator)


def _picture(key: Key, count: int) -> Batch:
    at, size, light = _spots()
    x = 2 * torch.rand(count, 2, generator=seeded("painted", *key)) - 1
    away = (x[:, None] - at).square().sum(-1) / size.square()
    return x, (light * torch.exp(-away)).sum(-1) + 0.3 * torch.sign(torch.sin(9 * x[:, 0] + 4 * x[:, 1]))


# -- counted: how often people do things (Poisson) ---------------------------------------------------------------------------------------

PEOPLE, THINGS = 400, 150


class Counter(nn.Module):
    """people, things (batch,) -> log of the mean count (batch,)"""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(PEOPLE, width), nn.Embedding(THINGS, width)
        self.body = nn.Sequential(nn.Linear(3 * width, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, people: Tensor, things: Tensor) -> Tensor:
        a, b = self.people(people), self.things(things)
        return self.body(torch.cat([a, b, a * b], -1))[:, 0]


@cache
def _tastes() -> tuple[Tensor, Tensor]:
    generator = seeded("counted", "tastes")
    return torch.randn(PEOPLE, 5, generator=generator), torch.randn(THINGS, 5, generator=generator)


def _counts(key: Key, count: int) -> Batch:
    generator = seeded("counted", *key)
    people, things = torch.randint(PEOPLE, (count,), generator=generator), torch.randint(THINGS, (count,), generator=generator)
    mean = torch.exp(0.5 * (_tastes()[0][people] * _tastes()[1][things]).sum(-1).clamp(-5, 5))
    return people, things, torch.poisson(mean, generator=generator)


def _unlikely(model: nn.Module, batch: Batch) -> Tensor:
    people, things, seen = batch
    return F.poisson_nll_loss(model(people, things), seen, log_input=True, full=True, reduction="none")


# -- translated: phrases, word by word and turned round in pieces, by an encoder and a decoder -------------------------------------------

WORDS, LONG, PIECE = 24, 12, 3


class Translator(nn.Module):
    """phrases, shifted translations (batch, 12) -> logits (batch, 12, 24)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.read, self.said = nn.Embedding(WORDS, width), nn.Embedding(WORDS + 1, width)
        self.places = nn.Parameter(0.02 * torch.randn(LONG, width))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, **options)  # type: ignore[arg-type]
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, **options)  # type: ignore[arg-type]
        self.out = nn.Linear(width, WORDS)

    def forward(self, phrases: Tensor, said: Tensor) -> Tensor:
        memory = self.encoder(self.read(phrases) + self.places)
        later = torch.full((LONG, LONG), -math.inf, device=said.device).triu(1)
        return self.out(self.decoder(self.said(said) + self.places, memory, tgt_mask=later))


@cache
def _dictionary() -> Tensor:
    return torch.stack([torch.randperm(WORDS, generator=seeded("translated", "dictionary", after)) for after in range(2)])


def _translations(key: Key, count: int) -> Batch:
    """A word's translation depends on whether the one before it is of the first half of the words."""
    phrases = torch.randint(WORDS, (count, LONG), generator=seeded("translated", *key))
    before = torch.cat([phrases[:, :1], phrases[:, :-1]], 1) < WORDS // 2
    words = torch.where(before, _dictionary()[0][phrases], _dictionary()[1][phrases])
    turned = words.view(count, -1, PIECE).flip(-1).flatten(1)
    return phrases, torch.cat([torch.full((count, 1), WORDS), turned[:, :-1]], 1), turned


def _each_word(model: nn.Module, batch: Batch) -> Tensor:
    phrases, said, wanted = batch
    return F.cross_entropy(model(phrases, said).transpose(1, 2), wanted, reduction="none").mean(1)


# -- forked: y may be one of several functions of x (mixture density networks, Bishop 1994) ----------------------------------------------

PEAKS = 6


def _forked(key: Key, count: int) -> Batch:
    generator = seeded("forked", *key)
    x, branch = 4 * torch.rand(count, 3, generator=generator) - 2, torch.randint(3, (count,), generator=generator)
    branches = torch.stack([torch.sin(2 * x[:, 0]) * x[:, 1], x[:, 2].square() - 1, torch.cos(3 * x[:, 1]) + x[:, 0]], 1)
    spread = 0.05 + 0.1 * x[:, 2].abs()
    return x, branches.gather(1, branch[:, None])[:, 0] + spread * torch.randn(count, generator=generator)


def _surprise(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weight, center, log_spread = model(x).chunk(3, -1)
    off = (y[:, None] - center) * torch.exp(-log_spread)
    return -torch.logsumexp(weight.log_softmax(-1) - 0.5 * off.square() - log_spread - 0.5 * math.log(2 * math.pi), -1)


# -- swung: a driven pendulum, of which each step is fed to the next ---------------------------------------------------------------------

SWINGS, TICK = 16, 0.25


class Pendulum(nn.Module):
    """first states (batch, 2), pushes (batch, 16) -> states (batch, 16, 2)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, state: Tensor, pushes: Tensor) -> Tensor:
        states = []
        for push in pushes.unbind(1):
            state = state + self.change(torch.cat([state, push[:, None]], 1))
            states.append(state)
        return torch.stack(states, 1)


def _swung(key: Key, count: int) -> Batch:
    generator = seeded("swung", *key)
    angle, speed = (3 * torch.rand(count, generator=generator) - 1.5 for _ in range(2))
    first, pushes, states = torch.stack([angle, speed], 1), torch.randn(count, SWINGS, generator=generator), []
    for push in pushes.unbind(1):
        for _ in range(5):
            speed = speed + TICK / 5 * (push - torch.sin(2 * angle) - 0.2 * speed)
            angle = angle + TICK / 5 * speed
        states.append(torch.stack([angle, speed], 1))
    return first, pushes, torch.stack(states, 1)


def _astray(model: nn.Module, batch: Batch) -> Tensor:
    first, pushes, states = batch
    return (model(first, pushes) - states).square().mean((1, 2))


# -- binary: digits by weights of one bit, whose gradients pass straight through (arXiv 1602.02830) --------------------------------------


class Signed(nn.Conv2d):
    """A convolution with the signs of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.where(self.weight >= 0, 1.0, -1.0)
        return F.conv2d(x, self.weight + (signs - self.weight).detach(), None, padding=1)


def _signs() -> nn.Module:
    blocks = [(1, 16), (16, 32), (32, 32)]
    layers = [
        layer for a, b in blocks for layer in (Signed(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.Hardtanh(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


# -- parity: of three bits out of twenty, and nobody says which --------------------------------------------------------------------------

BITS = 20


def _parity(key: Key, count: int) -> Batch:
    x = torch.randint(2, (count, BITS), generator=seeded("parity", *key)) * 2.0 - 1
    return x, (x[:, 3] * x[:, 8] * x[:, 15] > 0).long()


# -- halved: bytes of English text after the eight before them, with parameters of 16 bits -----------------------------------------------

BEFORE, READ = 8, 64


def _next_byte() -> nn.Module:
    body = nn.Sequential(nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * BEFORE, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU())
    return nn.Sequential(body, nn.Linear(192, 256)).bfloat16()


def _contexts(stream: str, seed: int, index: int) -> Batch:
    x, y = sample_batch(english()[stream == "validation"], READ, BEFORE, seed=seed, stream=stream, index=index)
    return x, y[:, -1]


def _in_32_bits(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="none")


DISTILLED = problem("distilled", drawn(_student), _answers, _divergence, size=64)
PAINTED = problem("painted", drawn(Painter), _picture, squares, size=128, decay=0.0)
COUNTED = problem("counted", drawn(Counter), _counts, _unlikely, size=64)
TRANSLATED = replace(problem("translated", drawn(Translator), _translations, _each_word), groups=hidden_matrices)
FORKED = problem(
    "forked",
    drawn(lambda: nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3 * PEAKS))),
    _forked,
    _surprise,
    size=64,
)
SWUNG = problem("swung", drawn(Pendulum), _swung, _astray)
BINARY = replace(digits.DIGITS, name="binary", build=drawn(_signs), groups=lambda model: decaying_matrices(model, 1e-4))
PARITY = problem("parity", drawn(lambda: nn.Sequential(nn.Linear(BITS, 128), nn.ReLU(), nn.Linear(128, 2))), _parity, labelled)
HALVED = Problem(
    name="halved",
    steps=1500,
    batch_size=READ,
    build=drawn(_next_byte),
    groups=lambda model: decaying_matrices(model, 0.01),
    batch=lambda seed, step: _contexts("train", seed, step),
    spare=lambda seed, step, number: _contexts("spare", seed, number),
    losses=_in_32_bits,
    validate=lambda model: mean_loss(model, _in_32_bits, [_contexts("validation", 0, part) for part in range(32)]),
)
