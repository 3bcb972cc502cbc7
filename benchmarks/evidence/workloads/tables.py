"""A regression whose loss falls by orders of magnitude, and a small noisy set that is seen many times."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, mean_loss
from .generated import either, squares
from .groups import decaying_matrices

ROWS, INPUTS = 32, 6
WRONG = 0.15
"""part of the training labels that are flipped"""
HELD_OUT = 4096
"""rows that validate, where rows are generated"""
JUDGED = 128
"""held-out rows of `SMALL` that judge, and do not validate"""


def _network(seed: int, inputs: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(0))


def _smooth(x: Tensor) -> Tensor:
    """Friedman's function of six inputs in [-1, 1], the last of no effect; without noise, standard deviation near 1."""
    u = (x + 1) / 2
    return (10 * torch.sin(torch.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4] - 14.4) / 4.9


def _points(key: tuple[object, ...], count: int) -> Batch:
    x = 2 * torch.rand(count, INPUTS, generator=seeded("regression", *key)) - 1
    return x, _smooth(x)


@cache
def _cells() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training rows and their labels, of which some are wrong; held-out rows and their right labels."""
    data = load_breast_cancer()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    order, wrong = (
        torch.randperm(len(x), generator=seeded("small", "split")),
        torch.rand(len(x), generator=seeded("small", "wrong")) < WRONG,
    )
    train, held_out = order[:256], order[256:]
    return x[train], torch.where(wrong, 1 - y, y)[train], x[held_out], y[held_out]


def _of_epochs(x: Tensor, y: Tensor, step: int, *key: object) -> Batch:
    """Epoch by epoch, each in an order of its own."""
    epoch, place = divmod(step * ROWS, len(x))
    chosen = torch.randperm(len(x), generator=seeded(*key, epoch))[place : place + ROWS]
    return x[chosen], y[chosen]


def _rows(seed: int, step: int) -> Batch:
    return _of_epochs(*_cells()[:2], step, "small", seed)


@cache
def _flipped(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of 30 numbers and the signs of a network of them, and `HELD_OUT` further ones; of the first ones some have the wrong sign."""
    generator = seeded("flipped", rows)
    x = torch.randn(rows + HELD_OUT, 30, generator=generator)
    inner, outer = torch.randn(64, 30, generator=generator) * 1.5 / 30**0.5, torch.randn(64, generator=generator) * 1.5 / 8
    y = ((x @ inner.T).tanh() @ outer > 0).float()
    wrong = torch.rand(len(x), generator=generator) < WRONG
    wrong[rows:] = False
    return x, torch.where(wrong, 1 - y, y)


def _of_flipped(rows: int, seed: int, step: int) -> Batch:
    x, y = _flipped(rows)
    return _of_epochs(x[:rows], y[:rows], step, "flipped", rows, seed)


def flipped(rows: int) -> Problem:
    """`SMALL`, with ``rows`` generated examples."""
    return replace(
        SMALL,
        name=f"rows-{rows}",
        build=lambda seed: _network(seed, 30, 128),
        batch=lambda seed, step: _of_flipped(rows, seed, step),
        spare=lambda seed, step, number: _of_flipped(rows, seed, 10_000_000 + number),
        validate=lambda model: mean_loss(model, either, [tuple(part[rows:] for part in _flipped(rows))]),
    )


REGRESSION = Problem(
    name="regression",
    steps=1500,
    batch_size=ROWS,
    build=lambda seed: _network(seed, INPUTS, 64),
    groups=lambda model: decaying_matrices(model, 0.0),
    batch=lambda seed, step: _points((seed, step), ROWS),
    spare=lambda seed, step, number: _points((seed, "spare", number), ROWS),
    losses=squares,
    validate=lambda model: mean_loss(model, squares, [_points(("validation",), HELD_OUT)]),
)
SMALL = Problem(
    name="small",
    steps=1500,
    batch_size=ROWS,
    build=lambda seed: _network(seed, 30, 32),
    groups=lambda model: decaying_matrices(model, 0.01),
    batch=_rows,
    spare=lambda seed, step, number: _rows(seed, 10_000_000 + number),
    losses=either,
    validate=lambda model: mean_loss(model, either, [tuple(rows[JUDGED:] for rows in _cells()[2:])]),
)


def small_judge() -> list[Batch]:
    """Mini-batches of the held-out rows that the validation leaves out."""
    x, y = (rows[:JUDGED] for rows in _cells()[2:])
    return list(zip(x.split(ROWS), y.split(ROWS), strict=True))
