"""Rows of numbers and of categories: regression, classification, ratings, clicks, preferences."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.digits import seeded
from ..problems.problem import Batch, Problem, drawn, mean_loss
from .generated import (
    Key,
    contrast,
    either,
    finite,
    labelled,
    problem,
    sines,
    squares,
    with_wrong_labels,
    zipf,
)
from .groups import decaying_matrices, hidden_matrices
from .staged import staged

# -- MLPs: Friedman's function, and small sets of which 15 % of the labels are wrong ---------------

ROWS, INPUTS = 32, 6
WRONG = 0.15
"""Part of the training labels that are flipped."""
HELD_OUT = 4096
"""Rows of the validation, where rows are generated."""
VAL_ROWS = 128
"""Held-out rows of `MLP_BREAST_CANCER` that are not in the validation."""


def _tanh_mlp(seed: int, inputs: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
        nn.Flatten(0),
    )


def _friedman(x: Tensor) -> Tensor:
    """Friedman's function of six inputs in [-1, 1], of which the last has no effect.

    There is no noise; the standard deviation is near 1.
    """
    u = (x + 1) / 2
    return (
        10 * torch.sin(torch.pi * u[:, 0] * u[:, 1])
        + 20 * (u[:, 2] - 0.5) ** 2
        + 10 * u[:, 3]
        + 5 * u[:, 4]
        - 14.4
    ) / 4.9


def _points(key: tuple[object, ...], count: int) -> Batch:
    x = 2 * torch.rand(count, INPUTS, generator=seeded("regression", *key)) - 1
    return x, _friedman(x)


@cache
def _cells() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training rows and labels, some of them wrong; held-out rows and their right labels."""
    data = load_breast_cancer()
    x, y = (
        torch.tensor(data.data, dtype=torch.float32),
        torch.tensor(data.target, dtype=torch.float32),
    )
    x = (x - x.mean(0)) / x.std(0)
    order, wrong = (
        torch.randperm(len(x), generator=seeded("small", "split")),
        torch.rand(len(x), generator=seeded("small", "wrong")) < WRONG,
    )
    train, held_out = order[:256], order[256:]
    return x[train], torch.where(wrong, 1 - y, y)[train], x[held_out], y[held_out]


def _of_epochs(x: Tensor, y: Tensor, step: int, *key: object) -> Batch:
    """A batch of the epoch to which the step belongs; each epoch has an order of its own."""
    epoch, place = divmod(step * ROWS, len(x))
    chosen = torch.randperm(len(x), generator=seeded(*key, epoch))[place : place + ROWS]
    return x[chosen], y[chosen]


def _cell_rows(seed: int, step: int) -> Batch:
    return _of_epochs(*_cells()[:2], step, "small", seed)


@cache
def _flipped(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of 30 numbers, labelled by the sign of a random network; the last `HELD_OUT` validate.

    Of the other labels some are wrong.
    """
    generator = seeded("flipped", rows)
    x = torch.randn(rows + HELD_OUT, 30, generator=generator)
    inner, outer = (
        torch.randn(64, 30, generator=generator) * 1.5 / 30**0.5,
        torch.randn(64, generator=generator) * 1.5 / 8,
    )
    y = ((x @ inner.T).tanh() @ outer > 0).float()
    wrong = torch.rand(len(x), generator=generator) < WRONG
    wrong[rows:] = False
    return x, torch.where(wrong, 1 - y, y)


def _of_flipped(rows: int, seed: int, step: int) -> Batch:
    x, y = _flipped(rows)
    return _of_epochs(x[:rows], y[:rows], step, "flipped", rows, seed)


def mlp_rows(rows: int) -> Problem:
    """`MLP_BREAST_CANCER` with a larger network, and ``rows`` generated examples."""
    return replace(
        MLP_BREAST_CANCER,
        name=f"mlp-rows-{rows}",
        build=lambda seed: _tanh_mlp(seed, 30, 128),
        batch=lambda seed, step: _of_flipped(rows, seed, step),
        spare=lambda seed, step, number: _of_flipped(rows, seed, 10_000_000 + number),
        validate=lambda model: mean_loss(
            model, either, [tuple(part[rows:] for part in _flipped(rows))]
        ),
    )


MLP_FRIEDMAN = Problem(
    name="mlp-friedman",
    steps=1500,
    batch_size=ROWS,
    build=lambda seed: _tanh_mlp(seed, INPUTS, 64),
    groups=lambda model: decaying_matrices(model, 0.0),
    batch=lambda seed, step: _points((seed, step), ROWS),
    spare=lambda seed, step, number: _points((seed, "spare", number), ROWS),
    losses=squares,
    validate=lambda model: mean_loss(model, squares, [_points(("validation",), HELD_OUT)]),
)
MLP_BREAST_CANCER = Problem(
    name="mlp-breast-cancer",
    steps=1500,
    batch_size=ROWS,
    build=lambda seed: _tanh_mlp(seed, 30, 32),
    groups=lambda model: decaying_matrices(model, 0.01),
    batch=_cell_rows,
    spare=lambda seed, step, number: _cell_rows(seed, 10_000_000 + number),
    losses=either,
    validate=lambda model: mean_loss(
        model, either, [tuple(rows[VAL_ROWS:] for rows in _cells()[2:])]
    ),
)


def cell_val_batches() -> list[Batch]:
    """Mini-batches of the held-out rows that are not in the validation."""
    x, y = (rows[:VAL_ROWS] for rows in _cells()[2:])
    return list(zip(x.split(ROWS), y.split(ROWS), strict=True))


# -- an MLP: twenty classes of three clusters each, and some wrong labels --------------------------

CLUSTER_CLASSES, CLUSTER_INPUTS, CLUSTER_WRONG = 20, 24, 0.1


def cluster_mlp() -> nn.Module:
    layers = [
        nn.Linear(CLUSTER_INPUTS, 96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Linear(96, CLUSTER_CLASSES),
    ]
    return nn.Sequential(*layers)


@cache
def centers(world: str) -> Tensor:
    return 1.2 * torch.randn(
        CLUSTER_CLASSES, 3, CLUSTER_INPUTS, generator=seeded("clusters", world)
    )


def clusters(key: Key, count: int, world: str = "first") -> Batch:
    generator = seeded("clusters", world, *key)
    y, cluster = (
        torch.randint(CLUSTER_CLASSES, (count,), generator=generator),
        torch.randint(3, (count,), generator=generator),
    )
    x = centers(world)[y, cluster] + torch.randn(count, CLUSTER_INPUTS, generator=generator)
    wrong = torch.rand(count, generator=generator) < CLUSTER_WRONG
    return x, torch.where(wrong, torch.randint(CLUSTER_CLASSES, (count,), generator=generator), y)


MLP_CLUSTERS = problem("mlp-clusters", drawn(cluster_mlp), clusters, labelled, decay=1e-4)


# -- an MLP: the heat equation; the loss falls by orders of magnitude ------------------------------

HEAT_WAVES = 6


class Heat(nn.Module):
    """Amplitudes (batch, 6), place and time (batch, 2) -> temperature (batch,)."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        layers = [
            nn.Linear(HEAT_WAVES + 2, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        ]
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


def _heat(key: Key, count: int, number: int = HEAT_WAVES) -> Batch:
    """``number``: how many waves are there, the longest first; the others have amplitude 0."""
    generator = seeded("heat", *key)
    amplitudes, at = (
        torch.randn(count, HEAT_WAVES, generator=generator),
        torch.rand(count, 2, generator=generator),
    )
    k = torch.arange(1, HEAT_WAVES + 1)
    amplitudes[:, number:] = 0.0
    waves = torch.sin(math.pi * k * at[:, :1]) * torch.exp(-0.3 * k.square() * at[:, 1:])
    return torch.cat([amplitudes, at], 1), (amplitudes * waves).sum(1)


NUMBERS_OF_WAVES = (1, 2, 4, 6)
"""Waves in each stage."""
MLP_HEAT = problem("mlp-heat", drawn(Heat), _heat, squares, size=64)
MLP_HEAT_RISING_WAVES = staged(
    "mlp-heat-rising-waves",
    drawn(Heat),
    lambda key, count, stage: _heat(key, count, NUMBERS_OF_WAVES[stage]),
    squares,
)


# -- distillation (arXiv 1503.02531): the answers of a larger network to random points -------------

STUDENT_INPUTS, ANSWERS = 20, 12


def _student() -> nn.Module:
    layers = [
        layer
        for _ in range(2)
        for layer in (nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1))
    ]
    return nn.Sequential(nn.Linear(STUDENT_INPUTS, 96), *layers, nn.Linear(96, ANSWERS))


@cache
def _teacher() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Linear(STUDENT_INPUTS, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.Linear(256, ANSWERS),
    ).requires_grad_(False)


def _answers(key: Key, count: int) -> Batch:
    x = 1.5 * torch.randn(count, STUDENT_INPUTS, generator=seeded("distilled", *key))
    return x, torch.log_softmax(25 * _teacher()(x), -1)


def _divergence(model: nn.Module, batch: Batch) -> Tensor:
    x, answers = batch
    return F.kl_div(model(x).log_softmax(-1), answers, reduction="none", log_target=True).sum(-1)


DISTILLATION_POINTS = problem(
    "distillation-points", drawn(_student), _answers, _divergence, size=64
)


# -- MLPs: the parity of three bits of twenty, and of three bits of 150 ----------------------------

BITS_OF_20 = 20


def _parity_of_20(key: Key, count: int) -> Batch:
    x = torch.randint(2, (count, BITS_OF_20), generator=seeded("parity", *key)) * 2.0 - 1
    return x, (x[:, 3] * x[:, 8] * x[:, 15] > 0).long()


BITS_OF_150 = 150


def _parity_mlp() -> nn.Module:
    net = nn.Sequential(nn.Linear(BITS_OF_150, 256), nn.ReLU(), nn.Linear(256, 1), nn.Flatten(0))
    for layer in net[:3:2]:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)  # type: ignore
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return net


def _parity_of_150(key: Key, count: int) -> Batch:
    x = (
        torch.randint(2, (count, BITS_OF_150), generator=seeded("misleading", "bits", *key)) * 2.0
        - 1
    )
    return x, (x[:, :3].prod(1) > 0).float()


MLP_PARITY_20 = problem(
    "mlp-parity-20",
    drawn(lambda: nn.Sequential(nn.Linear(BITS_OF_20, 128), nn.ReLU(), nn.Linear(128, 2))),
    _parity_of_20,
    labelled,
)
MLP_PARITY_150 = problem(
    "mlp-parity-150", drawn(_parity_mlp), _parity_of_150, either, size=64, decay=0.0
)


# -- MLPs on sines of 16 inputs: preferences, quantiles, no normalisation, heavy tails -------------

SINE_INPUTS = 16


def _sine(name: str, x: Tensor) -> Tensor:
    waves, weights = sines((name, "waves"), SINE_INPUTS)
    return torch.sin(x @ waves) @ weights


def _hidden(width: int, depth: int, activation: type[nn.Module]) -> list[nn.Module]:
    return [
        layer
        for a, b in pairwise([SINE_INPUTS, *[width] * depth])
        for layer in (nn.Linear(a, b), activation())
    ]


def _gelu_mlp(out: int) -> nn.Module:
    return nn.Sequential(*_hidden(96, 2, nn.GELU), nn.Linear(96, out))


def _preferences(key: Key, count: int) -> Batch:
    generator = seeded("ranked", *key)
    a, b = torch.randn(2, count, SINE_INPUTS, generator=generator)
    chance = torch.sigmoid(4 * (_sine("ranked", a) - _sine("ranked", b)))
    return a, b, (torch.rand(count, generator=generator) < chance).float()


def _preference_losses(model: nn.Module, batch: Batch) -> Tensor:
    a, b, first = batch
    return F.binary_cross_entropy_with_logits((model(a) - model(b))[:, 0], first, reduction="none")


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def _varying_spread(key: Key, count: int) -> Batch:
    generator = seeded("quantiles", *key)
    x = torch.randn(count, SINE_INPUTS, generator=generator)
    noise = torch.randn(count, generator=generator)
    return x, _sine("quantiles", x) + (0.2 + 0.5 * torch.sigmoid(2 * x[:, 0])) * noise


def _pinball(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    off, parts = y[:, None] - model(x), torch.tensor(QUANTILES)
    return torch.maximum(parts * off, (parts - 1) * off).mean(1)


def _deep_mlp() -> nn.Module:
    hidden = _hidden(48, 14, nn.ReLU)
    for layer in hidden[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*hidden, nn.Linear(48, 1), nn.Flatten(0))


def _deep_rows(key: Key, count: int) -> Batch:
    x = torch.randn(count, SINE_INPUTS, generator=seeded("deep", *key))
    return x, _sine("deep", x) + (x[:, 0] * x[:, 1]).tanh()


def _heavy_tails(key: Key, count: int) -> Batch:
    generator = seeded("heavy", *key)
    x = torch.randn(count, SINE_INPUTS, generator=generator)
    tail = (
        torch.randn(count, generator=generator)
        / torch.rand(count, generator=generator).clamp(min=1e-3).sqrt()
    )
    return x, 3 * _sine("heavy", x) + 0.3 * tail


def _huber(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.huber_loss(model(x)[:, 0], y, reduction="none", delta=1.0)


BRADLEY_TERRY_POINTS = problem(
    "bradley-terry-points", drawn(lambda: _gelu_mlp(1)), _preferences, _preference_losses, size=64
)
QUANTILE_MLP_SINES = problem(
    "quantile-mlp-sines",
    drawn(lambda: _gelu_mlp(len(QUANTILES))),
    _varying_spread,
    _pinball,
    size=64,
)
DEEP_MLP_SINES = problem(
    "deep-mlp-sines", drawn(_deep_mlp), _deep_rows, squares, size=64, decay=1e-4
)
HUBER_MLP_HEAVY_TAILS = replace(
    problem("huber-mlp-heavy-tails", drawn(lambda: _gelu_mlp(1)), _heavy_tails, _huber, size=64),
    groups=hidden_matrices,
)


# -- MLPs on smoother sines: survival, targets far from 0, two tasks, a rare class -----------------


def _smooth_sines(name: str, x: Tensor, out: int = 1) -> Tensor:
    """(examples, out), of mean 0 and variance near 1."""
    waves, weights = sines((name, "waves"), SINE_INPUTS, 32, 0.4, (out,), 16)
    return torch.sin(x @ waves) @ weights


def _silu_mlp(out: int, wide: int = SINE_INPUTS) -> nn.Module:
    return nn.Sequential(
        nn.Linear(wide, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, out)
    )


MONTHS = 12


def _censored(key: Key, count: int) -> Batch:
    generator = seeded("censored", *key)
    x = torch.randn(count, SINE_INPUTS, generator=generator)
    chance = torch.sigmoid(_smooth_sines("censored", x) * 1.5 - 2)
    happens = torch.rand(count, MONTHS, generator=generator) < chance
    month = torch.where(happens.any(1), happens.int().argmax(1), MONTHS)
    looked = torch.randint(MONTHS // 2, MONTHS + 1, (count,), generator=generator)
    at = torch.arange(MONTHS)
    return (
        x,
        ((at <= month[:, None]) & (at < looked[:, None])).float(),
        (at == month[:, None]).float(),
    )


def _hazard_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, at_risk, event = batch
    return (F.binary_cross_entropy_with_logits(model(x), event, reduction="none") * at_risk).sum(1)


def _unscaled(key: Key, count: int) -> Batch:
    generator = seeded("unscaled", *key)
    x = torch.randn(count, SINE_INPUTS, generator=generator)
    return x, 40 + 8 * _smooth_sines("unscaled", x)[:, 0] + torch.randn(count, generator=generator)


def _absolute_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x)[:, 0] - y).abs()


def _class_and_value(key: Key, count: int) -> Batch:
    generator = seeded("both", *key)
    x = torch.randn(count, SINE_INPUTS, generator=generator)
    known = _smooth_sines("both", x, 6)
    noise = torch.rand(count, 5, generator=generator).clamp(min=1e-6).log().neg().log().neg()
    return (
        x,
        (2 * known[:, :5] + noise).argmax(1),
        known[:, 5] + 0.3 * torch.randn(count, generator=generator),
    )


def _two_task_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, kind, value = batch
    said = model(x)
    return (
        F.cross_entropy(said[:, :5], kind, reduction="none") + 2.0 * (said[:, 5] - value).square()
    )


def _rare(key: Key, count: int) -> Batch:
    generator = seeded("rare", *key)
    x = torch.randn(count, SINE_INPUTS, generator=generator)
    return x, (
        torch.rand(count, generator=generator)
        < torch.sigmoid(3 * _smooth_sines("rare", x)[:, 0] - 6)
    ).float()


def _focal_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    plain = F.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")
    return (1 - torch.exp(-plain)).square() * plain


SURVIVAL_MLP_MONTHS = problem(
    "survival-mlp-months", drawn(lambda: _silu_mlp(MONTHS)), _censored, _hazard_losses, size=64
)
MLP_UNSCALED_TARGETS = problem(
    "mlp-unscaled-targets", drawn(lambda: _silu_mlp(1)), _unscaled, _absolute_losses, size=64
)
MULTITASK_MLP_SINES = problem(
    "multitask-mlp-sines",
    drawn(lambda: _silu_mlp(6)),
    _class_and_value,
    _two_task_losses,
    size=64,
    decay=1e-4,
)
FOCAL_MLP_RARE_CLASS = problem(
    "focal-mlp-rare-class", drawn(lambda: _silu_mlp(1)), _rare, _focal_losses, size=128
)


# -- views of the same thing: contrastive losses (CLIP's: arXiv 2103.00020), and triplets ----------

POINT_SIZE, VIEW_SIZE = 8, 32


class Towers(nn.Module):
    """Two views (batch, 32) each -> similarities (batch, batch)."""

    def __init__(self, width: int = 64, joint: int = 16) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(VIEW_SIZE, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, joint),
            )
            for _ in range(2)
        )
        self.sharpness = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        a, b = (
            F.normalize(tower(view), dim=-1)
            for tower, view in zip(self.towers, (one, other), strict=True)
        )
        return self.sharpness.clamp(max=math.log(100.0)).exp() * a @ b.T


@cache
def _view_maps() -> tuple[Tensor, Tensor]:
    generator = seeded("pairs", "views")
    first, second = (
        torch.randn(POINT_SIZE, VIEW_SIZE, generator=generator) / math.sqrt(POINT_SIZE)
        for _ in range(2)
    )
    return first, second


def _view_pairs(key: Key, count: int) -> Batch:
    generator = seeded("pairs", *key)
    latent, views = torch.randn(count, POINT_SIZE, generator=generator), []
    for matrix in _view_maps():
        view = torch.tanh(2 * latent @ matrix)
        views.append(view + 0.5 * torch.randn(view.shape, generator=generator))
    return tuple(views)


class _CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _silu_mlp(16, 24), _silu_mlp(16, 20)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (
            self.scale.exp()
            * F.normalize(self.one(a), dim=-1)
            @ F.normalize(self.other(b), dim=-1).T
        )


def _clip_views(key: Key, count: int) -> Batch:
    generator, maps = seeded("matched", *key), seeded("matched", "maps")
    hidden = torch.randn(count, 8, generator=generator)
    views = [torch.tanh(hidden @ torch.randn(8, wide, generator=maps)) for wide in (24, 20)]
    return tuple(view + 0.5 * torch.randn(view.shape, generator=generator) for view in views)


TRIPLET_THINGS = 200


@cache
def _triplet_things() -> Tensor:
    return torch.randn(TRIPLET_THINGS, SINE_INPUTS, generator=seeded("threes", "things"))


def _triplets(key: Key, count: int) -> Batch:
    generator = seeded("threes", *key)
    one = torch.randint(TRIPLET_THINGS, (count,), generator=generator)
    other = (one + torch.randint(1, TRIPLET_THINGS, (count,), generator=generator)) % TRIPLET_THINGS
    views = torch.stack([_triplet_things()[one], _triplet_things()[one], _triplet_things()[other]])
    return tuple(
        (
            views * (1 + 0.5 * torch.randn(3, count, 1, generator=generator))
            + 1.0 * torch.randn(views.shape, generator=generator)
        ).unbind()
    )


def _triplet_losses(model: nn.Module, batch: Batch) -> Tensor:
    a, same, other = (F.normalize(model(x), dim=-1) for x in batch)
    return F.relu((a - same).square().sum(-1) - (a - other).square().sum(-1) + 0.3)


TWO_TOWERS_VIEWS = problem("two-towers-views", drawn(Towers), _view_pairs, contrast, size=64)
CLIP_VIEWS = problem("clip-views", drawn(_CLIP), _clip_views, contrast, size=64)
TRIPLET_MLP_VIEWS = problem(
    "triplet-mlp-views",
    drawn(lambda: _gelu_mlp(12)),
    _triplets,
    _triplet_losses,
    size=64,
    decay=1e-4,
)


# -- Poisson regression on embeddings: how often people do things ----------------------------------

COUNTED_PEOPLE, COUNTED_THINGS = 400, 150


class Counter(nn.Module):
    """people, things (batch,) -> log of the mean count (batch,)"""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.people, self.things = (
            nn.Embedding(COUNTED_PEOPLE, width),
            nn.Embedding(COUNTED_THINGS, width),
        )
        self.body = nn.Sequential(
            nn.Linear(3 * width, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def forward(self, people: Tensor, things: Tensor) -> Tensor:
        a, b = self.people(people), self.things(things)
        return self.body(torch.cat([a, b, a * b], -1))[:, 0]


@cache
def _habits() -> tuple[Tensor, Tensor]:
    generator = seeded("counted", "tastes")
    return torch.randn(COUNTED_PEOPLE, 5, generator=generator), torch.randn(
        COUNTED_THINGS, 5, generator=generator
    )


def _counts(key: Key, count: int) -> Batch:
    generator = seeded("counted", *key)
    people, things = (
        torch.randint(COUNTED_PEOPLE, (count,), generator=generator),
        torch.randint(COUNTED_THINGS, (count,), generator=generator),
    )
    mean = torch.exp(0.5 * (_habits()[0][people] * _habits()[1][things]).sum(-1).clamp(-5, 5))
    return people, things, torch.poisson(mean, generator=generator)


def _poisson_losses(model: nn.Module, batch: Batch) -> Tensor:
    people, things, seen = batch
    return F.poisson_nll_loss(
        model(people, things), seen, log_input=True, full=True, reduction="none"
    )


POISSON_COUNTS = problem("poisson-counts", drawn(Counter), _counts, _poisson_losses, size=64)


# -- matrix factorisation with biases: ratings of films, a finite set ------------------------------

VIEWERS, FILMS = 6000, 2000


class _Factors(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.people, self.films = nn.Embedding(VIEWERS, width), nn.Embedding(FILMS, width)
        self.kindness, self.fame = nn.Embedding(VIEWERS, 1), nn.Embedding(FILMS, 1)
        self.middle = nn.Parameter(torch.zeros(()))
        for table in (self.people, self.films):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.kindness, self.fame):
            nn.init.zeros_(table.weight)

    def forward(self, x: Tensor) -> Tensor:
        person, film = x.T
        return (
            (self.people(person) * self.films(film)).sum(1)
            + (self.kindness(person) + self.fame(film))[:, 0]
            + self.middle
        )


@cache
def _film_tastes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = seeded("rated", "tastes")
    kindness, fame = (0.4 * torch.randn(many, generator=generator) for many in (VIEWERS, FILMS))
    tastes, kinds = (
        torch.randn(many, 5, generator=generator) / 5**0.5 for many in (VIEWERS, FILMS)
    )
    return kindness, fame, tastes, kinds


def _ratings(key: Key, count: int) -> Batch:
    """One to five stars, minus 3.5."""
    generator = seeded("rated", *key)
    person, film = (
        torch.randint(VIEWERS, (count,), generator=generator),
        zipf(generator, FILMS, count),
    )
    kindness, fame, tastes, kinds = _film_tastes()
    liking = kindness[person] + fame[film] + 1.5 * (tastes[person] * kinds[film]).sum(1)
    stars = (3.6 + liking + 0.6 * torch.randn(count, generator=generator)).round().clamp(1, 5)
    return torch.stack([person, film], 1), stars - 3.5


MATRIX_FACTORIZATION_RATINGS = finite(
    problem("matrix-factorization-ratings", drawn(_Factors), _ratings, squares, size=128),
    _ratings,
    epochs=11,
    key="rated",
)


# -- a factorisation machine with hashed crosses: clicks by eight categories, a finite set ---------

COLUMNS = (3000, 1500, 600, 300, 100, 40, 16, 8)
CROSSES = ((0, 4), (1, 5), (2, 6), (3, 7))
BUCKETS = 8192


class _FactorizationMachine(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.parts, self.alone, self.crossed = (
            nn.Embedding(sum(COLUMNS), width),
            nn.Embedding(sum(COLUMNS), 1),
            nn.Embedding(BUCKETS, 1),
        )
        nn.init.normal_(self.parts.weight, std=0.05)
        for table in (self.alone, self.crossed):
            nn.init.zeros_(table.weight)
        self.layers = nn.Sequential(
            nn.Linear(len(COLUMNS) * width, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.tensor(CROSSES).T
        parts, buckets = self.parts(x), (x[:, first] * 7919 + x[:, second]) % BUCKETS
        pairs = (parts.sum(1).square() - parts.square().sum(1)).sum(1) / 2
        return (
            self.layers(parts.flatten(1))[:, 0]
            + pairs
            + self.alone(x).sum((1, 2))
            + self.crossed(buckets).sum((1, 2))
        )


@cache
def _click_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Weights of categories, their factors in pairs, and weights of hashed crosses."""
    generator = seeded("crossed", "worth")
    many = sum(COLUMNS)
    alone, parts = (
        0.35 * torch.randn(many, generator=generator),
        0.3 * torch.randn(many, 4, generator=generator),
    )
    return alone, parts, 0.4 * torch.randn(65_536, generator=generator)


def _click_columns(key: Key, count: int) -> Batch:
    generator = seeded("crossed", *key)
    before = torch.tensor((0, *COLUMNS[:-1])).cumsum(0)
    x = torch.stack([zipf(generator, many, count) for many in COLUMNS], 1) + before
    alone, parts, together = _click_weights()
    pairs = (parts[x].sum(1).square() - parts[x].square().sum(1)).sum(1) / 2
    first, second = torch.tensor(CROSSES).T
    chance = torch.sigmoid(
        -1.5
        + alone[x].sum(1)
        + pairs
        + together[(x[:, first] * 4099 + x[:, second]) % len(together)].sum(1)
    )
    return x, (torch.rand(count, generator=generator) < chance).float()


FACTORIZATION_MACHINE_CLICKS = finite(
    problem(
        "factorization-machine-clicks",
        drawn(_FactorizationMachine),
        _click_columns,
        either,
        size=128,
    ),
    _click_columns,
    epochs=2,
    key="crossed",
)


# -- an MLP on embeddings: insurance claims (Tweedie's deviance), a finite set ---------------------

REGIONS, CARS, CLAIM_NUMBERS, MOST_CLAIMS = 300, 500, 6, 6


class _Insurer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regions, self.cars = nn.Embedding(REGIONS, 8), nn.Embedding(CARS, 8)
        self.layers = nn.Sequential(
            nn.Linear(CLAIM_NUMBERS + 16, 96),
            nn.GELU(),
            nn.Linear(96, 96),
            nn.GELU(),
            nn.Linear(96, 1),
        )

    def forward(self, names: Tensor, numbers: Tensor) -> Tensor:
        return self.layers(
            torch.cat([self.regions(names[:, 0]), self.cars(names[:, 1]), numbers], 1)
        )[:, 0]


def _claims(key: Key, count: int) -> Batch:
    generator, common = seeded("claims", *key), seeded("claims", "common")
    by_region, by_car = (0.4 * torch.randn(many, 2, generator=common) for many in (REGIONS, CARS))
    region, car = zipf(generator, REGIONS, count), zipf(generator, CARS, count)
    numbers = torch.randn(count, CLAIM_NUMBERS, generator=generator)
    waves, weights = sines(("claims", "waves"), CLAIM_NUMBERS, outs=(2,))
    often, dear = (torch.sin(numbers @ waves) @ weights + by_region[region] + by_car[car]).T
    happened = torch.poisson(torch.exp(often - 0.7), generator=generator)
    each = torch.exp(0.6 * dear[:, None] + torch.randn(count, MOST_CLAIMS, generator=generator))
    return (
        torch.stack([region, car], 1),
        numbers,
        (each * (torch.arange(MOST_CLAIMS) < happened[:, None])).sum(1),
    )


def _deviance(model: nn.Module, batch: Batch) -> Tensor:
    """Tweedie's deviance of power 1.5, without terms that do not depend on the model."""
    names, numbers, paid = batch
    half = model(names, numbers) / 2
    return 2 * (paid * torch.exp(-half) + torch.exp(half))


TWEEDIE_CLAIMS = finite(
    problem("tweedie-claims", drawn(_Insurer), _claims, _deviance, size=128),
    _claims,
    epochs=3,
    key="claims",
)


# -- strengths of players: which of two wins on a map (Bradley and Terry), a finite set ------------

PLAYERS, MAPS = 3000, 20


class _Strength(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.players, self.maps, self.begins = (
            nn.Embedding(PLAYERS, width),
            nn.Embedding(MAPS, width),
            nn.Embedding(MAPS, 1),
        )
        nn.init.zeros_(self.begins.weight)
        self.layers = nn.Sequential(nn.Linear(2 * width, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        board = self.maps(x[:, 2:])
        strength = self.layers(torch.cat([self.players(x[:, :2]), board.expand(-1, 2, -1)], 2))[
            ..., 0
        ]
        return strength[:, 0] - strength[:, 1] + self.begins(x[:, 2])[:, 0]


@cache
def _strengths() -> tuple[Tensor, Tensor]:
    """Strengths (players, maps), and the advantage of the first player on each map."""
    generator = seeded("won", "strengths")
    skill, habits = (
        torch.randn(PLAYERS, 1, generator=generator),
        torch.randn(PLAYERS, 3, generator=generator),
    )
    suits = torch.randn(3, MAPS, generator=generator) / 3**0.5
    return 1.2 * skill + 0.8 * habits @ suits, 0.3 * torch.randn(MAPS, generator=generator)


def _games(key: Key, count: int) -> Batch:
    """Some players play much more than others; nobody plays against himself."""
    generator = seeded("won", *key)
    one = (PLAYERS * torch.rand(count, generator=generator) ** 1.5).long().clamp(max=PLAYERS - 1)
    other = (one + torch.randint(1, PLAYERS, (count,), generator=generator)) % PLAYERS
    board = torch.randint(MAPS, (count,), generator=generator)
    strengths, begins = _strengths()
    chance = torch.sigmoid(strengths[one, board] - strengths[other, board] + begins[board])
    return torch.stack([one, other, board], 1), (
        torch.rand(count, generator=generator) < chance
    ).float()


BRADLEY_TERRY_GAMES = finite(
    problem("bradley-terry-games", drawn(_Strength), _games, either, size=32),
    _games,
    epochs=8,
    key="won",
)


# -- ordinal regression: five grades, of which one in five is random, a finite set -----------------

GRADED_INPUTS, GRADES = 20, 5


class _Graded(nn.Module):
    """Numbers -> logits of being above each grade but the last.

    One value and four thresholds (CORAL, arXiv 1901.07884).
    """

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.second, self.value = (
            nn.Linear(GRADED_INPUTS, width),
            nn.Linear(width, width),
            nn.Linear(width, 1, bias=False),
        )
        self.thresholds = nn.Parameter(torch.linspace(1, -1, GRADES - 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.value(hidden + F.relu(self.second(hidden))) + self.thresholds


def _graded_rows(key: Key, count: int) -> Batch:
    """One grade in five is random."""
    generator = seeded("graded", *key)
    x = torch.randn(count, GRADED_INPUTS, generator=generator)
    waves, weights = sines(("graded", "waves"), GRADED_INPUTS, frequency=0.3)
    value = 1.5 * torch.sin(x @ waves) @ weights + 0.5 * torch.randn(count, generator=generator)
    grade = (value[:, None] > torch.tensor((-1.0, -0.3, 0.3, 1.0))).sum(1)
    careless = torch.rand(count, generator=generator) < 0.2
    return x, torch.where(careless, torch.randint(GRADES, (count,), generator=generator), grade)


def _grade_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, grade = batch
    above = (grade[:, None] > torch.arange(GRADES - 1)).float()
    return F.binary_cross_entropy_with_logits(model(x), above, reduction="none").sum(1)


ORDINAL_MLP_GRADES = finite(
    problem("ordinal-mlp-grades", drawn(_Graded), _graded_rows, _grade_losses, decay=5e-4),
    _graded_rows,
    epochs=6,
    key="graded",
)


# -- a wide MLP: ten classes; three labels in ten are random, a finite set -------------------------

NOISY_INPUTS, NOISY_CLASSES = 16, 10


class _NoisyLabelMLP(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISY_INPUTS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, NOISY_CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _noisy_rows(key: Key, count: int) -> Batch:
    generator = seeded("doubted", *key)
    x = torch.randn(count, NOISY_INPUTS, generator=generator)
    waves, weights = sines(("doubted", "waves"), NOISY_INPUTS, frequency=0.2, outs=(NOISY_CLASSES,))
    return x, with_wrong_labels(
        generator, (torch.sin(x @ waves) @ weights).argmax(1), NOISY_CLASSES, 0.3
    )


MLP_NOISY_LABELS = finite(
    problem("mlp-noisy-labels", drawn(_NoisyLabelMLP), _noisy_rows, labelled),
    _noisy_rows,
    epochs=60,
    key="doubted",
)


# -- a mean of embeddings: the taste of a mixture of six spices, a finite set ----------------------

SPICES, SPOONS, QUALITIES, TASTES = 60, 6, 8, 5


class _EmbeddingBag(nn.Module):
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
    """One label in fifty is random."""
    generator = seeded("tasted", *key)
    x = torch.randint(SPICES, (count, SPOONS), generator=generator)
    waves, weights = sines(("tasted", "waves"), QUALITIES, outs=(TASTES,))
    taste = torch.sin(_qualities()[x].sum(1) / SPOONS**0.5 @ waves) @ weights
    return x, with_wrong_labels(generator, taste.argmax(1), TASTES, 0.02)


EMBEDDING_BAG_MIXTURES = finite(
    problem(
        "embedding-bag-mixtures", drawn(_EmbeddingBag), _mixtures, labelled, size=64, decay=1e-4
    ),
    _mixtures,
    epochs=40,
    key="tasted",
)


# -- an MLP: a regression whose data comes in blocks of 25 batches of one of six domains -----------

DOMAINS, BLOCK, DOMAIN_INPUTS, DOMAIN_WAVES = 6, 25, 16, 32


@cache
def _domains() -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, waves); weights of each domain, and common ones last (domains + 1, waves);

    the centers of the domains' inputs (domains, inputs).
    """
    generator = torch.Generator().manual_seed(1)
    waves, own, common, at = (
        torch.randn(shape, generator=generator)
        for shape in (
            (DOMAIN_INPUTS, DOMAIN_WAVES),
            (DOMAINS, DOMAIN_WAVES),
            (DOMAIN_WAVES,),
            (DOMAINS, DOMAIN_INPUTS),
        )
    )
    return 0.375 * waves, 0.25 * torch.cat([own, common[None]]), at


def _domain_rows(key: Key, count: int, domain: int | None = None) -> Batch:
    """Rows of one domain; None: of all domains."""
    generator = seeded("misleading", *key)
    waves, own, at = _domains()
    of = (
        torch.randint(DOMAINS, (count,), generator=generator)
        if domain is None
        else torch.full((count,), domain)
    )
    x = torch.randn(count, DOMAIN_INPUTS, generator=generator) + at[of]
    y = (torch.sin(x @ waves) * (own[-1] + own[of])).sum(1)
    return x, y + 0.1 * torch.randn(count, generator=generator)


def _block_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(DOMAIN_INPUTS, 128),
        nn.GELU(),
        nn.Linear(128, 128),
        nn.GELU(),
        nn.Linear(128, 1),
        nn.Flatten(0),
    )


MLP_DOMAIN_BLOCKS = replace(
    problem("mlp-domain-blocks", drawn(_block_mlp), _domain_rows, squares),
    batch=lambda seed, step: _domain_rows((seed, step), 32, step // BLOCK % DOMAINS),
    spare=lambda seed, step, number: _domain_rows(
        (seed, "spare", number), 32, step // BLOCK % DOMAINS
    ),
)


# -- a linear regression: 300 inputs say nothing, and the 20 that matter are small -----------------

IDLE, TELLING = 300, 20


def _linear() -> nn.Module:
    net = nn.Sequential(nn.Linear(IDLE + TELLING, 1), nn.Flatten(0))
    nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(net[0].bias)  # type: ignore[arg-type]
    return net


def _mostly_idle(key: Key, count: int) -> Batch:
    x = torch.randn(count, IDLE + TELLING, generator=seeded("misleading", "line", *key))
    return torch.cat([x[:, :IDLE], 0.05 * x[:, IDLE:]], 1), x[:, IDLE:].sum(1) / TELLING**0.5


LINEAR_IDLE_INPUTS = problem("linear-idle-inputs", drawn(_linear), _mostly_idle, squares, decay=0.0)


# -- an MLP: a hundred classes with Zipf's frequencies; and clicks by user and item, a finite set --

CLASSES, CLICK_INPUTS, CLICK_ROWS, USERS, ITEMS, CLICK_BATCH = 100, 16, 60_000, 6000, 3000, 64
CLICK_WAVES = ("misleading", "body")


def _waving(x: Tensor) -> Tensor:
    waves, weights = sines(CLICK_WAVES, CLICK_INPUTS)
    return 1.4 * torch.sin(x @ waves) @ weights


def _zipf_classes(key: Key, count: int) -> Batch:
    """A hundred classes with Zipf's frequencies."""
    generator, common = seeded("misleading", "kinds", *key), seeded("misleading", "kinds")
    x = torch.randn(count, CLICK_INPUTS, generator=generator)
    known = torch.sin(x @ sines(CLICK_WAVES, CLICK_INPUTS)[0])[:, :CLICK_INPUTS] @ (
        0.375 * torch.randn(CLICK_INPUTS, CLASSES, generator=common)
    )
    noise = -torch.rand(count, CLASSES, generator=generator).clamp(1e-9, 1 - 1e-7).log().neg().log()
    return x, (known - 1.2 * torch.arange(1.0, CLASSES + 1).log() + noise).argmax(1)


def _zipf_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(CLICK_INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


class Clicks(nn.Module):
    """(user, item, features, ...) -> logit of a click (batch,)"""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        for table in (self.users, self.things):
            nn.init.normal_(table.weight, std=0.01)
        self.layers = nn.Sequential(
            nn.Linear(CLICK_INPUTS + 16, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
            nn.Flatten(0),
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.layers(torch.cat([self.users(batch[0]), self.things(batch[1]), batch[2]], 1))


def _draw_clicks(generator: torch.Generator, count: int) -> Batch:
    common = seeded("misleading", "clicks")
    of_user, of_thing = (0.3 * torch.randn(many, generator=common) for many in (USERS, ITEMS))
    user, thing = (torch.randint(many, (count,), generator=generator) for many in (USERS, ITEMS))
    x = torch.randn(count, CLICK_INPUTS, generator=generator)
    chance = torch.sigmoid(-2.5 + 1.2 * _waving(x) + of_user[user] + of_thing[thing])
    return user, thing, x, (torch.rand(count, generator=generator) < chance).float()


@cache
def _click_rows() -> Batch:
    return _draw_clicks(seeded("misleading", "clicks", "rows"), CLICK_ROWS)


@cache
def _click_order(seed: int, epoch: int) -> Tensor:
    return torch.randperm(CLICK_ROWS, generator=seeded("misleading", "clicks", seed, epoch))


def _clicks(key: Key, count: int) -> Batch:
    return _draw_clicks(seeded("misleading", "clicks", *key), count)


def _click_epochs(seed: int, step: int) -> Batch:
    """A batch of 60 000 rows, in a new order in each epoch."""
    epoch, at = divmod(step, CLICK_ROWS // CLICK_BATCH)
    chosen = _click_order(seed, epoch)[at * CLICK_BATCH : (at + 1) * CLICK_BATCH]
    return tuple(column[chosen] for column in _click_rows())


def _click_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch[3], reduction="none")


MLP_ZIPF_CLASSES = problem(
    "mlp-zipf-classes", drawn(_zipf_mlp), _zipf_classes, labelled, size=64, decay=0.0
)
EMBEDDING_MLP_CLICKS = replace(
    problem("embedding-mlp-clicks", drawn(Clicks), _clicks, _click_losses, size=CLICK_BATCH),
    batch=_click_epochs,
)
