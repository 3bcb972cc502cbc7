"""Rows of numbers and of categories: regression, classification, ratings, clicks, preferences."""

from __future__ import annotations

import math
from functools import cache

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems import PROBLEMS, Batch
from ..problems.problem import seeded
from .kit import (
    FAR,
    Draw,
    Examples,
    Field,
    contrast,
    either,
    for_muon,
    in_epochs,
    labelled,
    loss_of,
    mlp,
    rising,
    sines,
    squares,
)

FIELD = Field("tables")
FIELD.known(PROBLEMS["recommender-clicks"], "clicks that drift", "adamw-0.95", "wsd", 1e-3)

# -- MLPs: Friedman's function, and small sets of which 15 % of the labels are wrong ---------------

ROWS, HELD_OUT = 32, 4096
"""Of a batch; of the validation, where rows are generated."""
WRONG = 0.15
"""Part of the training labels that are flipped."""
VAL_ROWS = 128
"""Held-out rows of mlp-breast-cancer that are not in the validation."""


@FIELD.workload(
    "mlp-friedman", "Friedman's function", "adamw-0.999", "cosine", 1e-3,
    lambda: mlp(6, 64, 64, 1, of=nn.Tanh, flat=True),
    squares, key="regression", decay=0.0, part=HELD_OUT,
)  # fmt: skip
def _friedman(g: Draw, count: int) -> Batch:
    """Of six inputs in [-1, 1], of which the last has no effect.

    There is no noise; the standard deviation is near 1.
    """
    x = 2 * g.rand(count, 6) - 1
    u = (x + 1) / 2
    waves = 10 * torch.sin(torch.pi * u[:, 0] * u[:, 1])
    return x, (waves + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4] - 14.4) / 4.9


@cache
def _cells() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training rows and labels, some of them wrong; held-out rows and their right labels."""
    x, y = (torch.tensor(a, dtype=torch.float32) for a in load_breast_cancer(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=seeded("small", "split"))
    wrong = Draw("small", "wrong").rand(len(x)) < WRONG
    train, held_out = order[:256], order[256:]
    return x[train], torch.where(wrong, 1 - y, y)[train], x[held_out], y[held_out]


@cache
def _flipped(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_cells`; rows of 30 numbers are labelled by the sign of a random network."""
    g = Draw("flipped", rows)
    x = g.randn(rows + HELD_OUT, 30)
    inner, outer = g.randn(64, 30) * 1.5 / 30**0.5, g.randn(64) * 1.5 / 8
    y = ((x @ inner.T).tanh() @ outer > 0).float()
    wrong = g.rand(len(x)) < WRONG
    return x[:rows], torch.where(wrong, 1 - y, y)[:rows], x[rows:], y[rows:]


def _small_set(name: str, rows: int, times: str, schedule: str, width: int) -> None:
    """``rows``: generated; 0: those of breast cancer."""
    known = cache(lambda: _flipped(rows) if rows else _cells())
    batch = in_epochs(lambda: known()[:2], ROWS, *(("flipped", rows) if rows else ("small",)))

    def held_out() -> list[Batch]:
        return [tuple(part[0 if rows else VAL_ROWS :] for part in known()[2:])]

    def val_batches() -> list[Batch]:
        x, y = (part[:VAL_ROWS].split(ROWS) for part in known()[2:])
        return list(zip(x, y, strict=True))

    FIELD.add(
        name, f"{rows or 256} rows, 15 % of the labels wrong, seen {times} times", "adamw-0.999",
        schedule, 1e-3, lambda: mlp(30, width, width, 1, of=nn.Tanh, flat=True), either,
        Examples(batch, lambda seed, step, number: batch(seed, FAR + number), held_out),
        val_batches=None if rows else val_batches,
    )  # fmt: skip


_small_set("mlp-breast-cancer", 0, "1 250", "linear", 32)
_small_set("mlp-rows-256", 256, "1 250", "cosine", 128)
_small_set("mlp-rows-4096", 4096, "78", "cosine", 128)


# -- an MLP: twenty classes of three clusters each, and some wrong labels --------------------------

CLUSTER_CLASSES, CLUSTER_INPUTS, FIRST_CLUSTERS = 20, 24, ("clusters", "first")


def cluster_mlp() -> nn.Module:
    return mlp(CLUSTER_INPUTS, 96, 96, CLUSTER_CLASSES)


@cache
def centers(world: str) -> Tensor:
    return 1.2 * Draw("clusters", world).randn(CLUSTER_CLASSES, 3, CLUSTER_INPUTS)


@FIELD.workload(
    "mlp-clusters", "clusters, 10 % of the labels random", "sgd", "wsd", 0.1,
    cluster_mlp, labelled, key=FIRST_CLUSTERS, decay=1e-4,
)  # fmt: skip
def clusters(g: Draw, count: int) -> Batch:
    y, cluster = g.below(CLUSTER_CLASSES, count), g.below(3, count)
    x = centers("first")[y, cluster] + g.randn(count, CLUSTER_INPUTS)
    return x, g.wrong(y, CLUSTER_CLASSES, 0.1)


# -- an MLP: the heat equation; the loss falls by orders of magnitude ------------------------------

HEAT_WAVES = 6


def _heat_mlp() -> nn.Module:
    """Amplitudes, place and time (batch, 8) -> temperature (batch,)."""
    return mlp(HEAT_WAVES + 2, 96, 96, 1, of=nn.Tanh, flat=True)


@FIELD.workload(
    "mlp-heat-rising-waves", "ever more waves", "adamw-0.999", "cosine", 1e-3,
    _heat_mlp, squares, key="heat", decay=0.0, varies=rising(1, 2, 4, 6),
)  # fmt: skip
@FIELD.workload(
    "mlp-heat", "the heat equation", "adamw-0.999", "linear", 1e-3,
    _heat_mlp, squares, key="heat", size=64,
)  # fmt: skip
def _heat(g: Draw, count: int, number: int = HEAT_WAVES) -> Batch:
    """``number``: how many waves are there, the longest first; the others have amplitude 0."""
    amplitudes, at = g.randn(count, HEAT_WAVES), g.rand(count, 2)
    k = torch.arange(1, HEAT_WAVES + 1)
    amplitudes[:, number:] = 0.0
    waves = torch.sin(math.pi * k * at[:, :1]) * torch.exp(-0.3 * k.square() * at[:, 1:])
    return torch.cat([amplitudes, at], 1), (amplitudes * waves).sum(1)


# -- distillation (arXiv 1503.02531): the answers of a larger network to random points -------------

STUDENT_INPUTS, ANSWERS = 20, 12


def _student() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Linear(STUDENT_INPUTS, 96), *layers, nn.Linear(96, ANSWERS))


@cache
def _teacher() -> nn.Module:
    torch.manual_seed(6)
    return mlp(STUDENT_INPUTS, 256, 256, ANSWERS, of=nn.Tanh).requires_grad_(False)


def _divergence(model: nn.Module, batch: Batch) -> Tensor:
    x, answers = batch
    return F.kl_div(model(x).log_softmax(-1), answers, reduction="none", log_target=True).sum(-1)


@FIELD.workload(
    "distillation-points", "the answers of a larger network", "adamw-0.999", "cosine", 1e-3,
    _student, _divergence, key="distilled", size=64,
)  # fmt: skip
def _answers(g: Draw, count: int) -> Batch:
    x = 1.5 * g.randn(count, STUDENT_INPUTS)
    return x, torch.log_softmax(25 * _teacher()(x), -1)


# -- MLPs: the parity of three bits of twenty, and of three bits of 150 ----------------------------


@FIELD.workload(
    "mlp-parity-20", "the parity of three bits of 20", "adamw-0.999", "linear", 1e-3,
    lambda: mlp(20, 128, 2), labelled, key="parity",
)  # fmt: skip
def _parity_of_20(g: Draw, count: int) -> Batch:
    x = g.below(2, count, 20) * 2.0 - 1
    return x, (x[:, 3] * x[:, 8] * x[:, 15] > 0).long()


def _parity_mlp() -> nn.Module:
    net = mlp(150, 256, 1, flat=True)
    for layer in net[:3:2]:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)  # type: ignore
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return net


@FIELD.workload(
    "mlp-parity-150", "the parity of three bits of 150", "sgd", "cosine", 0.2,
    _parity_mlp, either, key=("misleading", "bits"), size=64, decay=0.0,
)  # fmt: skip
def _parity_of_150(g: Draw, count: int) -> Batch:
    x = g.below(2, count, 150) * 2.0 - 1
    return x, (x[:, :3].prod(1) > 0).float()


# -- MLPs on sines of 16 inputs: preferences, quantiles, no normalisation, heavy tails -------------

INPUTS = 16


def _sine(name: str, x: Tensor) -> Tensor:
    return sines((name, "waves"), INPUTS)(x)


def _gelu_mlp(out: int, flat: bool = False) -> nn.Module:
    return mlp(INPUTS, 96, 96, out, of=nn.GELU, flat=flat)


def _preference_losses(model: nn.Module, batch: Batch) -> Tensor:
    a, b, first = batch
    return F.binary_cross_entropy_with_logits((model(a) - model(b))[:, 0], first, reduction="none")


@FIELD.workload(
    "bradley-terry-points", "which of two points is preferred", "adamw-0.999", "cosine", 1e-3,
    lambda: _gelu_mlp(1), _preference_losses, key="ranked", size=64,
)  # fmt: skip
def _preferences(g: Draw, count: int) -> Batch:
    a, b = g.randn(2, count, INPUTS)
    return a, b, g.coins(torch.sigmoid(4 * (_sine("ranked", a) - _sine("ranked", b))))


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def _pinball(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    off, parts = y[:, None] - model(x), torch.tensor(QUANTILES)
    return torch.maximum(parts * off, (parts - 1) * off).mean(1)


@FIELD.workload(
    "quantile-mlp-sines", "quantiles of a value", "lion", "linear", 1e-4,
    lambda: _gelu_mlp(len(QUANTILES)), _pinball, key="quantiles", size=64,
)  # fmt: skip
def _varying_spread(g: Draw, count: int) -> Batch:
    x, noise = g.randn(count, INPUTS), g.randn(count)
    return x, _sine("quantiles", x) + (0.2 + 0.5 * torch.sigmoid(2 * x[:, 0])) * noise


def _deep_mlp() -> nn.Module:
    hidden = mlp(INPUTS, *[48] * 14)
    for layer in hidden[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*hidden, nn.ReLU(), nn.Linear(48, 1), nn.Flatten(0))


@FIELD.workload(
    "deep-mlp-sines", "14 layers without normalisation", "sgd", "cosine", 0.01,
    _deep_mlp, squares, key="deep", size=64, decay=1e-4,
)  # fmt: skip
def _deep_rows(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    return x, _sine("deep", x) + (x[:, 0] * x[:, 1]).tanh()


@FIELD.workload(
    "huber-mlp-heavy-tails", "a value with heavy tails", "fused-muon", "wsd", 1e-3,
    lambda: _gelu_mlp(1, flat=True), loss_of(F.huber_loss), key="heavy", size=64, decay=for_muon,
)  # fmt: skip
def _heavy_tails(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    tail = g.randn(count) / g.rand(count).clamp(min=1e-3).sqrt()
    return x, 3 * _sine("heavy", x) + 0.3 * tail


# -- MLPs on smoother sines: survival, targets far from 0, two tasks, a rare class -----------------


def _smooth_sines(name: str, x: Tensor, out: int = 1) -> Tensor:
    """(examples, out), of mean 0 and variance near 1."""
    return sines((name, "waves"), INPUTS, 32, 0.4, (out,), 16)(x)


def _silu_mlp(out: int, wide: int = INPUTS, flat: bool = False) -> nn.Module:
    return mlp(wide, 96, 96, out, of=nn.SiLU, flat=flat)


MONTHS = 12


def _hazard_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, at_risk, event = batch
    return (F.binary_cross_entropy_with_logits(model(x), event, reduction="none") * at_risk).sum(1)


@FIELD.workload(
    "survival-mlp-months", "the month of an event, or none", "adamw-0.999", "cosine", 1e-3,
    lambda: _silu_mlp(MONTHS), _hazard_losses, key="censored", size=64,
)  # fmt: skip
def _censored(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    happens = g.rand(count, MONTHS) < torch.sigmoid(_smooth_sines("censored", x) * 1.5 - 2)
    month = torch.where(happens.any(1), happens.int().argmax(1), MONTHS)[:, None]
    looked, at = g.between(MONTHS // 2, MONTHS + 1, count)[:, None], torch.arange(MONTHS)
    return x, ((at <= month) & (at < looked)).float(), (at == month).float()


@FIELD.workload(
    "mlp-unscaled-targets", "targets far from 0", "adamw-0.95", "wsd", 1e-3,
    lambda: _silu_mlp(1, flat=True), loss_of(F.l1_loss), key="unscaled", size=64,
)  # fmt: skip
def _unscaled(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    return x, 40 + 8 * _smooth_sines("unscaled", x)[:, 0] + g.randn(count)


def _two_task_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, kind, value = batch
    said = model(x)
    wrong = F.cross_entropy(said[:, :5], kind, reduction="none")
    return wrong + 2.0 * (said[:, 5] - value).square()


@FIELD.workload(
    "multitask-mlp-sines", "a class and a value at once", "sgd", "cosine", 0.1,
    lambda: _silu_mlp(6), _two_task_losses, key="both", size=64, decay=1e-4,
)  # fmt: skip
def _class_and_value(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    known = _smooth_sines("both", x, 6)
    noise = g.rand(count, 5).clamp(min=1e-6).log().neg().log().neg()
    return x, (2 * known[:, :5] + noise).argmax(1), known[:, 5] + 0.3 * g.randn(count)


def _focal_losses(model: nn.Module, batch: Batch) -> Tensor:
    plain = either(model, batch)
    return (1 - torch.exp(-plain)).square() * plain


@FIELD.workload(
    "focal-mlp-rare-class", "a class of one row in fifty", "adamw-0.999", "restarts", 1e-3,
    lambda: _silu_mlp(1, flat=True), _focal_losses, key="rare", size=128,
)  # fmt: skip
def _rare(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    return x, g.coins(torch.sigmoid(3 * _smooth_sines("rare", x)[:, 0] - 6))


# -- views of the same thing: contrastive losses (CLIP's: arXiv 2103.00020), and triplets ----------

VIEW_SIZE = 32
SAME_POINT = "which views are of the same point"


class Towers(nn.Module):
    """Two views (batch, 32) each -> similarities (batch, batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(mlp(VIEW_SIZE, 64, 64, 16) for _ in range(2))
        self.sharpness = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        views = zip(self.towers, (one, other), strict=True)
        a, b = (F.normalize(tower(x), dim=-1) for tower, x in views)
        return self.sharpness.clamp(max=math.log(100.0)).exp() * a @ b.T


def _noisy_views(g: Draw, hidden: Tensor, maps: list[Tensor]) -> Batch:
    views = (torch.tanh(hidden @ matrix) for matrix in maps)
    return tuple(view + 0.5 * g.randn(*view.shape) for view in views)


@FIELD.workload(
    "two-towers-views", SAME_POINT, "adamw-0.999", "one-cycle", 1e-3,
    Towers, contrast, key="pairs", size=64,
)  # fmt: skip
def _view_pairs(g: Draw, count: int) -> Batch:
    common = Draw("pairs", "views")
    maps = [common.randn(8, VIEW_SIZE) / math.sqrt(8) for _ in range(2)]
    return _noisy_views(g, 2 * g.randn(count, 8), maps)


class _CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _silu_mlp(16, 24), _silu_mlp(16, 20)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.one(a), dim=-1), F.normalize(self.other(b), dim=-1)
        return self.scale.exp() * a @ b.T


@FIELD.workload(
    "clip-views", SAME_POINT, "lion", "linear", 1e-4,
    _CLIP, contrast, key="matched", size=64,
)  # fmt: skip
def _clip_views(g: Draw, count: int) -> Batch:
    common = Draw("matched", "maps")
    return _noisy_views(g, g.randn(count, 8), [common.randn(8, wide) for wide in (24, 20)])


THINGS = 200


@cache
def _triplet_things() -> Tensor:
    return Draw("threes", "things").randn(THINGS, INPUTS)


def _triplet_losses(model: nn.Module, batch: Batch) -> Tensor:
    a, same, other = (F.normalize(model(x), dim=-1) for x in batch)
    return F.relu((a - same).square().sum(-1) - (a - other).square().sum(-1) + 0.3)


@FIELD.workload(
    "triplet-mlp-views", "which views are of the same thing", "sgd", "one-cycle", 0.1,
    lambda: _gelu_mlp(12), _triplet_losses, key="threes", size=64, decay=1e-4,
)  # fmt: skip
def _triplets(g: Draw, count: int) -> Batch:
    one = g.below(THINGS, count)
    other = (one + g.between(1, THINGS, count)) % THINGS
    views = _triplet_things()[torch.stack([one, one, other])]
    return tuple((views * (1 + 0.5 * g.randn(3, count, 1)) + 1.0 * g.randn(*views.shape)).unbind())


# -- Poisson regression on embeddings: how often people do things ----------------------------------

COUNTED_PEOPLE, COUNTED_THINGS = 400, 150


class Counter(nn.Module):
    """people, things (batch,) -> log of the mean count (batch,)"""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.people = nn.Embedding(COUNTED_PEOPLE, width)
        self.things = nn.Embedding(COUNTED_THINGS, width)
        self.body = mlp(3 * width, 64, 64, 1, of=nn.SiLU, flat=True)

    def forward(self, people: Tensor, things: Tensor) -> Tensor:
        a, b = self.people(people), self.things(things)
        return self.body(torch.cat([a, b, a * b], -1))


@cache
def _habits() -> tuple[Tensor, Tensor]:
    g = Draw("counted", "tastes")
    return g.randn(COUNTED_PEOPLE, 5), g.randn(COUNTED_THINGS, 5)


_poisson = loss_of(F.poisson_nll_loss, log_input=True, full=True)


@FIELD.workload(
    "poisson-counts", "counts of what people do", "lion", "wsd", 1e-4,
    Counter, _poisson, key="counted", size=64,
)  # fmt: skip
def _counts(g: Draw, count: int) -> Batch:
    people, things = g.below(COUNTED_PEOPLE, count), g.below(COUNTED_THINGS, count)
    mean = torch.exp(0.5 * (_habits()[0][people] * _habits()[1][things]).sum(-1).clamp(-5, 5))
    return people, things, torch.poisson(mean, generator=g.generator)


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
        biases = (self.kindness(person) + self.fame(film))[:, 0]
        return (self.people(person) * self.films(film)).sum(1) + biases + self.middle


@cache
def _film_tastes() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = Draw("rated", "tastes")
    kindness, fame = (0.4 * g.randn(many) for many in (VIEWERS, FILMS))
    tastes, kinds = (g.randn(many, 5) / 5**0.5 for many in (VIEWERS, FILMS))
    return kindness, fame, tastes, kinds


@FIELD.workload(
    "matrix-factorization-ratings", "ratings of films, seen 11 times", "adamw-0.999", "wsd", 1e-3,
    _Factors, squares, key="rated", size=128, epochs=11,
)  # fmt: skip
def _ratings(g: Draw, count: int) -> Batch:
    """One to five stars, minus 3.5."""
    person, film = g.below(VIEWERS, count), g.zipf(FILMS, count)
    kindness, fame, tastes, kinds = _film_tastes()
    liking = kindness[person] + fame[film] + 1.5 * (tastes[person] * kinds[film]).sum(1)
    stars = (3.6 + liking + 0.6 * g.randn(count)).round().clamp(1, 5)
    return torch.stack([person, film], 1), stars - 3.5


# -- a factorisation machine with hashed crosses: clicks by eight categories, a finite set ---------

COLUMNS = (3000, 1500, 600, 300, 100, 40, 16, 8)
CROSSES = torch.tensor(((0, 1, 2, 3), (4, 5, 6, 7)))
BUCKETS = 8192


def _pairs(parts: Tensor) -> Tensor:
    """Sums of the products of all pairs of a row's factors."""
    return (parts.sum(1).square() - parts.square().sum(1)).sum(1) / 2


class _FactorizationMachine(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.parts, self.alone = nn.Embedding(sum(COLUMNS), width), nn.Embedding(sum(COLUMNS), 1)
        self.crossed = nn.Embedding(BUCKETS, 1)
        nn.init.normal_(self.parts.weight, std=0.05)
        for table in (self.alone, self.crossed):
            nn.init.zeros_(table.weight)
        self.layers = mlp(len(COLUMNS) * width, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = CROSSES
        parts, buckets = self.parts(x), (x[:, first] * 7919 + x[:, second]) % BUCKETS
        both = _pairs(parts)
        linear = self.alone(x).sum((1, 2)), self.crossed(buckets).sum((1, 2))
        return self.layers(parts.flatten(1))[:, 0] + both + linear[0] + linear[1]


@cache
def _click_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Weights of categories, their factors in pairs, and weights of hashed crosses."""
    g, many = Draw("crossed", "worth"), sum(COLUMNS)
    return 0.35 * g.randn(many), 0.3 * g.randn(many, 4), 0.4 * g.randn(65_536)


@FIELD.workload(
    "factorization-machine-clicks",
    "clicks by categories, seen twice", "adamw-0.999", "cosine", 1e-3,
    _FactorizationMachine, either, key="crossed", size=128, epochs=2,
)  # fmt: skip
def _click_columns(g: Draw, count: int) -> Batch:
    before = torch.tensor((0, *COLUMNS[:-1])).cumsum(0)
    x = torch.stack([g.zipf(many, count) for many in COLUMNS], 1) + before
    alone, parts, together = _click_weights()
    first, second = CROSSES
    crossed = together[(x[:, first] * 4099 + x[:, second]) % len(together)].sum(1)
    return x, g.coins(torch.sigmoid(-1.5 + alone[x].sum(1) + _pairs(parts[x]) + crossed))


# -- an MLP on embeddings: insurance claims (Tweedie's deviance), a finite set ---------------------

REGIONS, CARS, CLAIM_NUMBERS, MOST_CLAIMS = 300, 500, 6, 6


class _Insurer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regions, self.cars = nn.Embedding(REGIONS, 8), nn.Embedding(CARS, 8)
        self.layers = mlp(CLAIM_NUMBERS + 16, 96, 96, 1, of=nn.GELU, flat=True)

    def forward(self, names: Tensor, numbers: Tensor) -> Tensor:
        region, car = self.regions(names[:, 0]), self.cars(names[:, 1])
        return self.layers(torch.cat([region, car, numbers], 1))


def _deviance(model: nn.Module, batch: Batch) -> Tensor:
    """Tweedie's deviance of power 1.5, without terms that do not depend on the model."""
    names, numbers, paid = batch
    half = model(names, numbers) / 2
    return 2 * (paid * torch.exp(-half) + torch.exp(half))


@FIELD.workload(
    "tweedie-claims", "insurance claims, seen 3 times", "adamw-0.999", "linear", 1e-3,
    _Insurer, _deviance, key="claims", size=128, epochs=3,
)  # fmt: skip
def _claims(g: Draw, count: int) -> Batch:
    common = Draw("claims", "common")
    by_region, by_car = (0.4 * common.randn(many, 2) for many in (REGIONS, CARS))
    region, car = g.zipf(REGIONS, count), g.zipf(CARS, count)
    numbers = g.randn(count, CLAIM_NUMBERS)
    waves = sines(("claims", "waves"), CLAIM_NUMBERS, outs=(2,))(numbers)
    often, dear = (waves + by_region[region] + by_car[car]).T
    happened = torch.poisson(torch.exp(often - 0.7), generator=g.generator)
    each = torch.exp(0.6 * dear[:, None] + g.randn(count, MOST_CLAIMS))
    paid = (each * (torch.arange(MOST_CLAIMS) < happened[:, None])).sum(1)
    return torch.stack([region, car], 1), numbers, paid


# -- strengths of players: which of two wins on a map (Bradley and Terry), a finite set ------------

PLAYERS, MAPS = 3000, 20


class _Strength(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.players, self.maps = nn.Embedding(PLAYERS, width), nn.Embedding(MAPS, width)
        self.begins = nn.Embedding(MAPS, 1)
        nn.init.zeros_(self.begins.weight)
        self.layers = mlp(2 * width, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        boards = self.maps(x[:, 2:]).expand(-1, 2, -1)
        strength = self.layers(torch.cat([self.players(x[:, :2]), boards], 2))[..., 0]
        return strength[:, 0] - strength[:, 1] + self.begins(x[:, 2])[:, 0]


@cache
def _strengths() -> tuple[Tensor, Tensor]:
    """Strengths (players, maps), and the advantage of the first player on each map."""
    g = Draw("won", "strengths")
    skill, habits = g.randn(PLAYERS, 1), g.randn(PLAYERS, 3)
    suits = g.randn(3, MAPS) / 3**0.5
    return 1.2 * skill + 0.8 * habits @ suits, 0.3 * g.randn(MAPS)


@FIELD.workload(
    "bradley-terry-games", "who wins, seen 8 times", "adamw-0.95", "linear", 1e-3,
    _Strength, either, key="won", epochs=8,
)  # fmt: skip
def _games(g: Draw, count: int) -> Batch:
    """Some players play much more than others; nobody plays against himself."""
    one = (PLAYERS * g.rand(count) ** 1.5).long().clamp(max=PLAYERS - 1)
    other = (one + g.between(1, PLAYERS, count)) % PLAYERS
    board = g.below(MAPS, count)
    strengths, begins = _strengths()
    ahead = strengths[one, board] - strengths[other, board] + begins[board]
    return torch.stack([one, other, board], 1), g.coins(torch.sigmoid(ahead))


# -- ordinal regression: five grades, of which one in five is random, a finite set -----------------

GRADED_INPUTS, GRADES = 20, 5


class _Graded(nn.Module):
    """Numbers -> logits of being above each grade but the last.

    One value and four thresholds (CORAL, arXiv 1901.07884).
    """

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(GRADED_INPUTS, width), nn.Linear(width, width)
        self.value = nn.Linear(width, 1, bias=False)
        self.thresholds = nn.Parameter(torch.linspace(1, -1, GRADES - 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.value(hidden + F.relu(self.second(hidden))) + self.thresholds


def _grade_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, grade = batch
    above = (grade[:, None] > torch.arange(GRADES - 1)).float()
    return F.binary_cross_entropy_with_logits(model(x), above, reduction="none").sum(1)


@FIELD.workload(
    "ordinal-mlp-grades", "20 % of the grades random, seen 6 times", "sgd", "cosine", 0.1,
    _Graded, _grade_losses, key="graded", decay=5e-4, epochs=6,
)  # fmt: skip
def _graded_rows(g: Draw, count: int) -> Batch:
    x = g.randn(count, GRADED_INPUTS)
    wave = sines(("graded", "waves"), GRADED_INPUTS, frequency=0.3)(x)
    value = 1.5 * wave + 0.5 * g.randn(count)
    return x, g.wrong((value[:, None] > torch.tensor((-1.0, -0.3, 0.3, 1.0))).sum(1), GRADES, 0.2)


# -- a wide MLP: ten classes; three labels in ten are random, a finite set -------------------------


@FIELD.workload(
    "mlp-noisy-labels",
    "ten classes, 30 % of the labels random, seen 60 times", "adamw-0.95", "cosine", 1e-3,
    lambda: mlp(16, 128, 128, 10), labelled, key="doubted", epochs=60, spare_validates=True,
)  # fmt: skip
def _noisy_rows(g: Draw, count: int) -> Batch:
    x = g.randn(count, 16)
    values = sines(("doubted", "waves"), 16, frequency=0.2, outs=(10,))(x)
    return x, g.wrong(values.argmax(1), 10, 0.3)


# -- a mean of embeddings: the taste of a mixture of six spices, a finite set ----------------------

SPICES, SPOONS, QUALITIES, TASTES = 60, 6, 8, 5


class _EmbeddingBag(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.spices, self.layers = nn.Embedding(SPICES, width), mlp(width, 24, TASTES, of=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.spices(x).mean(1))


@cache
def _qualities() -> Tensor:
    return Draw("tasted", "qualities").randn(SPICES, QUALITIES)


@FIELD.workload(
    "embedding-bag-mixtures", "the taste of a mixture of spices, seen 40 times", "sgd", "wsd", 0.1,
    _EmbeddingBag, labelled, key="tasted", size=64, decay=1e-4, epochs=40, spare_validates=True,
)  # fmt: skip
def _mixtures(g: Draw, count: int) -> Batch:
    """One label in fifty is random."""
    x = g.below(SPICES, count, SPOONS)
    taste = sines(("tasted", "waves"), QUALITIES, outs=(TASTES,))
    return x, g.wrong(taste(_qualities()[x].sum(1) / SPOONS**0.5).argmax(1), TASTES, 0.02)


# -- an MLP: a regression whose data comes in blocks of 25 batches of one of six domains -----------

DOMAINS, BLOCK, WAVES = 6, 25, 32


@cache
def _domains() -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, waves); weights of each domain, and common ones last (domains + 1, waves);

    the centers of the domains' inputs (domains, inputs).
    """
    g = torch.Generator().manual_seed(1)
    shapes = (INPUTS, WAVES), (DOMAINS, WAVES), (WAVES,), (DOMAINS, INPUTS)
    waves, own, common, at = (torch.randn(shape, generator=g) for shape in shapes)
    return 0.375 * waves, 0.25 * torch.cat([own, common[None]]), at


@FIELD.workload(
    "mlp-domain-blocks", "data in blocks of one domain", "adamw-0.999", "cosine", 1e-3,
    lambda: mlp(INPUTS, 128, 128, 1, of=nn.GELU, flat=True),
    squares, key="misleading",
    varies=lambda step: None if step is None else step // BLOCK % DOMAINS,
)  # fmt: skip
def _domain_rows(g: Draw, count: int, domain: int | None) -> Batch:
    """Rows of one domain; None: of all domains."""
    waves, own, at = _domains()
    of = g.below(DOMAINS, count) if domain is None else torch.full((count,), domain)
    x = g.randn(count, INPUTS) + at[of]
    y = (torch.sin(x @ waves) * (own[-1] + own[of])).sum(1)
    return x, y + 0.1 * g.randn(count)


# -- a linear regression: 300 inputs say nothing, and the 20 that matter are small -----------------

IDLE, TELLING = 300, 20


def _linear() -> nn.Module:
    net = mlp(IDLE + TELLING, 1, flat=True)
    nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(net[0].bias)  # type: ignore[arg-type]
    return net


@FIELD.workload(
    "linear-idle-inputs", "most inputs say nothing", "sgd", "wsd", 0.0096,
    _linear, squares, key=("misleading", "line"), decay=0.0,
)  # fmt: skip
def _mostly_idle(g: Draw, count: int) -> Batch:
    x = g.randn(count, IDLE + TELLING)
    return torch.cat([x[:, :IDLE], 0.05 * x[:, IDLE:]], 1), x[:, IDLE:].sum(1) / TELLING**0.5


# -- an MLP: a hundred classes with Zipf's frequencies; and clicks by user and item, a finite set --

CLASSES, USERS, ITEMS = 100, 6000, 3000
CLICK_WAVES = ("misleading", "body")


@FIELD.workload(
    "mlp-zipf-classes", "100 classes with Zipf's frequencies", "lion", "cosine", 1e-3,
    lambda: mlp(INPUTS, 64, 64, CLASSES), labelled, key=("misleading", "kinds"), size=64, decay=0.0,
)  # fmt: skip
def _zipf_classes(g: Draw, count: int) -> Batch:
    x = g.randn(count, INPUTS)
    waves = 0.5 * Draw(*CLICK_WAVES).randn(INPUTS, 24)
    weights = 0.375 * Draw("misleading", "kinds").randn(INPUTS, CLASSES)
    known = torch.sin(x @ waves)[:, :INPUTS] @ weights
    noise = -g.rand(count, CLASSES).clamp(1e-9, 1 - 1e-7).log().neg().log()
    return x, (known - 1.2 * torch.arange(1.0, CLASSES + 1).log() + noise).argmax(1)


class Clicks(nn.Module):
    """user, item, features -> logit of a click (batch,)"""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        for table in (self.users, self.things):
            nn.init.normal_(table.weight, std=0.01)
        self.layers = mlp(INPUTS + 16, 64, 64, 1, flat=True)

    def forward(self, user: Tensor, item: Tensor, features: Tensor) -> Tensor:
        return self.layers(torch.cat([self.users(user), self.things(item), features], 1))


@FIELD.workload(
    "embedding-mlp-clicks", "clicks, seen about 11 times", "adamw-0.95", "cosine", 3e-4,
    Clicks, either, key=("misleading", "clicks"), size=64, rows=60_000,
)  # fmt: skip
def _clicks(g: Draw, count: int) -> Batch:
    common = Draw("misleading", "clicks")
    of_user, of_thing = (0.3 * common.randn(many) for many in (USERS, ITEMS))
    user, thing = (g.below(many, count) for many in (USERS, ITEMS))
    x = g.randn(count, INPUTS)
    waves = 1.2 * (1.4 * sines(CLICK_WAVES, INPUTS)(x))
    return user, thing, x, g.coins(torch.sigmoid(-2.5 + waves + of_user[user] + of_thing[thing]))
