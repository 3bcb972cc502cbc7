"""Small workloads for `stack`: generated, of scikit-learn, or bytes of Python's own library."""

from __future__ import annotations

import hashlib
import math
from functools import cache

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor

from .problems.problem import seeded
from .stack import Examples, Method, Workload, attention, cnn, evaluate, mlp, train, window
from .workloads.text import python

Split = tuple[Examples, Examples]
SYMBOLS, CONTEXT = 64, 8


def _split(x: Tensor, y: Tensor, test: int) -> Split:
    """The same for all seeds."""
    chosen = torch.randperm(len(x), generator=seeded("split", len(x)))
    x, y = x[chosen], y[chosen]
    return (x[test:], y[test:]), (x[:test], y[:test])


@cache
def digits() -> Split:
    x, y = load_digits(return_X_y=True)
    return _split(torch.tensor(x).float() / 16, torch.tensor(y), 497)


@cache
def turned() -> Split:
    """Digits whose pixels are transposed, of which pretraining has seen none."""
    (x, y), test = digits()
    return tuple((a.view(-1, 8, 8).mT.flatten(1), b) for a, b in ((x[600:], y[600:]), test))  # type: ignore[return-value]


@cache
def upright() -> Split:
    (x, y), test = digits()
    return (x[:600], y[:600]), test


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0)


@cache
def cancer() -> Split:
    x, y = load_breast_cancer(return_X_y=True)
    return _split(_standard(torch.tensor(x).float()), torch.tensor(y), 200)


@cache
def diabetes() -> Split:
    x, y = load_diabetes(return_X_y=True)
    target = _standard(torch.tensor(y).float()[:, None])
    return _split(_standard(torch.tensor(x).float()), target, 142)


@cache
def friedman() -> Split:
    g = seeded("friedman")
    u = torch.rand(2900, 6, generator=g)
    y = 10 * torch.sin(math.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2
    y = (y + 10 * u[:, 3] + 5 * u[:, 4] - 14.4) / 4.9 + 0.3 * torch.randn(2900, generator=g)
    return _split(2 * u - 1, y[:, None], 2000)


@cache
def teacher(count: int, outs: int, classes: bool) -> Split:
    """A random network of 20 inputs; labels are drawn by its logits."""
    g, net = seeded("teacher", outs), mlp(20, 32, outs)
    x = torch.randn(count, 20, generator=g)
    z = net.forward(net.split(net.draw("teacher", outs)[None]), x[None], lambda h: h)[0]
    if not classes:
        return _split(x, z / z.std() + 0.3 * torch.randn(z.shape, generator=g), 4000)
    gumbel = -torch.rand(z.shape, generator=g).log().neg().log()
    return _split(x, (2 * z / z.std() + gumbel).argmax(-1), 4000)


@cache
def windows(count: int, test: int, context: int) -> Split:
    """Of Python's sources, with the 63 most frequent bytes; the test is of other files."""
    texts = python()
    common = torch.bincount(texts[0].long(), minlength=256).argsort(descending=True)
    codes = torch.full((256,), SYMBOLS - 1)
    codes[common[: SYMBOLS - 1]] = torch.arange(SYMBOLS - 1)

    def drawn(text: Tensor, many: int, span: int) -> Examples:
        rows = codes[text[:span].long()].unfold(0, context + 1, 1)
        rows = rows[torch.randperm(len(rows), generator=seeded("windows", many))[:many]]
        return rows[:, :-1].contiguous(), rows[:, -1].contiguous()

    return drawn(texts[0], count, 20 * count), drawn(texts[1], test, len(texts[1]))


@cache
def little_text() -> Split:
    """Consecutive windows of one text of some pages."""
    return windows(8000, 4000, CONTEXT)


# -- augmentation ----------------------------------------------------------------------------------


@cache
def _shifts() -> Tensor:
    """(9, 64): which pixel comes to each place; 64 for none."""
    place = torch.arange(64).view(8, 8)
    padded = torch.nn.functional.pad(place, (1, 1, 1, 1), value=64)
    return torch.stack([padded[i : i + 8, j : j + 8].flatten() for i in range(3) for j in range(3)])


def shifted(x: Tensor, u: Tensor, strength: Tensor) -> Tensor:
    """By at most a pixel, with the probability ``strength`` / 2."""
    moved = u[..., 0] < 0.5 * strength.squeeze(-1)
    choice = torch.where(moved, (9 * u[..., 1]).long(), 4)
    return torch.nn.functional.pad(x, (0, 1)).gather(-1, _shifts()[choice])


def noised(x: Tensor, u: Tensor, strength: Tensor | float) -> Tensor:
    sigma = strength * (0.1 + 0.9 * u[..., :1])
    return torch.cat([x + sigma * u[..., 1:], sigma], -1)


def _normal(g: torch.Generator, seeds: int, count: int) -> Tensor:
    level = torch.rand(seeds, count, 1, generator=g)
    return torch.cat([level, torch.randn(seeds, count, 64, generator=g)], -1)


def _bake(x: Tensor) -> Tensor:
    return noised(x, _normal(seeded("bake"), 1, len(x))[0], 1.0)


@cache
def images() -> Split:
    (x, _), (test, _) = digits()
    return (x, x), (_bake(test), test)


# -- the list --------------------------------------------------------------------------------------

DIGITS = mlp(64, 32, 10)


@cache
def pretrained() -> Tensor:
    """An MLP that knows digits which are not transposed."""
    job = Workload("pretraining", "", DIGITS, upright, 500, "sgd", 0.1, 10, steps=512)
    ends = train(job, Method(replicas=False), 1, [{"lr": 0.1, "weight_decay": 1e-3}], [0])
    return ends[0, 0]


_ALL = (
    Workload("noisy-mlp", "digits, 30 % of the labels wrong", DIGITS, digits, 800,
        "sgd", 0.05, 10, wrong=0.3),
    Workload("noisy-cnn", "digits, 20 % of the labels wrong", cnn(), digits, 800,
        "adamw", 4e-3, 10, wrong=0.2),
    Workload("few-cnn", "300 digits", cnn(), digits, 300, "sgd", 0.05, 10),
    Workload("shifted-mlp", "600 digits, shifted at random", DIGITS, digits, 600,
        "sgd", 0.05, 10, draw=lambda g, s, n: torch.rand(s, n, 2, generator=g), augment=shifted),
    Workload("denoise", "noise is taken from digits", mlp(65, 32, 64), images, 900,
        "adamw", 4e-3, draw=_normal, augment=noised, bake=_bake),
    Workload("cancer", "breast cancer, 10 % wrong", mlp(30, 32, 2), cancer, 240,
        "adamw", 2e-3, 2, wrong=0.1),
    Workload("diabetes", "regression", mlp(10, 32, 1), diabetes, 200, "sgd", 0.01),
    Workload("friedman", "regression with noise", mlp(6, 48, 1), friedman, 400,
        "adamw", 4e-3),
    Workload("fine-tuning", "128 transposed digits, 20 % wrong", DIGITS, turned, 128,
        "sgd", 0.02, 10, wrong=0.2, batch=32, begin=pretrained),
    Workload("large-batch", "a network's classes", mlp(20, 32, 10),
        lambda: teacher(9000, 10, True), 4096, "adamw", 8e-3, 10, batch=1024, steps=128),
    Workload("book", "next byte, 4 000 windows", window(SYMBOLS, CONTEXT), little_text, 6000,
        "adamw", 4e-3, SYMBOLS),
    Workload("stream", "next byte, each once", window(SYMBOLS, CONTEXT),
        lambda: windows(34_000, 4000, CONTEXT), 32_768, "adamw", 8e-3, SYMBOLS),
    Workload("attention", "next byte, each once", attention(SYMBOLS, 12),
        lambda: windows(34_001, 4000, 12), 32_768, "adamw", 8e-3, SYMBOLS),
    Workload("teacher", "a network's values, each once", mlp(20, 32, 4),
        lambda: teacher(40_000, 4, False), 32_768, "sgd", 0.05),
)  # fmt: skip
WORKLOADS = {one.name: one for one in _ALL}


def _place(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


_SORTED: list[str] = sorted(WORKLOADS, key=_place)
DEVELOPMENT, TEST = (sorted(half) for half in (_SORTED[::2], _SORTED[1::2]))
"""Halves by a hash of the names; of the second one nothing is run until the advice is written."""


def validated(name: str, weights: Tensor, seeds: list[int]) -> Tensor:
    """(points, seeds): losses on each seed's own validation examples."""
    one = WORKLOADS[name]
    return evaluate(one, weights, *one.data(seeds)[1])[0]


def tested(name: str, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and accuracies on the test."""
    one = WORKLOADS[name]
    (x, y) = one.examples()[1]
    return evaluate(one, weights, x[None], y[None])
