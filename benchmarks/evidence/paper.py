"""The paper's table on the generated recommender: what keeps a rate that is too high from crashing,
and what the controller does with four groups.

    python -m benchmarks.evidence.paper [--methods full ...] [--factors 1 8 ...] [--seeds 10]

N = 8 replicas, spread 1/9, AdamW, one pass, the same interactions for all. The best rate of the
baseline is looked for first, then everything runs at ``factors`` times it. Runs that are in the
file already are not repeated. A run has crashed, or learned nothing, if a loss is not finite, or if
over its last tenth the training loss is above that of the best constant prediction, in hindsight,
for the very same interactions. ``decay`` tells what is due to Eq. 7's decay alone, which freezes a
run early.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.core.spread import assignment, multipliers

from ..tables import crossed, grouped
from .experiment import Column, Experiment, Record, Task
from .problems import PROBLEMS
from .problems.recsys import interactions

PROBLEM = PROBLEMS["recommender-clicks"]
STEPS, BATCH = 400, 128
REPLICAS, SPREAD, INTERVAL, WARMUP, NOISE = 8, 1 / 9, 10, 0.1, 0.01
"""N, alpha, T, S_warm as a part of the run (where OneCycle is at its peak), nu"""
FIND, FIND_SEEDS = [2.0**e for e in range(-9, -3)], (1000, 1001, 1002)
"""rates among which the baseline's best one is looked for, on other seeds than those of the table
"""


@dataclass(frozen=True)
class Setup:
    """A row of the table."""

    replicas: int = REPLICAS
    """1: the gradient of the same batch, and nothing to explore or to average"""
    noise: float = NOISE
    averages: bool = True
    sigma: float | None = None
    """of the softmax controller; None: OneCycle as it is"""
    decay: str | None = "floor"
    """of that controller: Eq. 7, corrected, which replaces OneCycle; or None, and it multiplies
    OneCycle"""
    local: bool = False


METHODS = {
    "baseline": Setup(replicas=1, noise=0),
    "decay": Setup(replicas=1, noise=0, sigma=0.1),
    "warm-init": Setup(averages=False),
    "no-auto": Setup(),
    "no-warm": Setup(noise=0, sigma=0.1),
    "full": Setup(sigma=0.1),
    "sharp": Setup(sigma=0.002),
    "on-onecycle": Setup(sigma=0.1, decay=None),
    "local": Setup(local=True),
}
"""docs/evidence/replicas.md says what each is."""


class Diverged(Exception):
    """A loss is not finite."""


def run(problem: str, method: str, factor: float, rate: float, seed: int, steps: int) -> Record:
    setup, history = METHODS[method], History(steps)
    try:
        found = (train_local if setup.local else train_shared)(setup, rate, seed, steps, history)
    except (Diverged, hdet.ReplicasDiverged):
        found = {"validation": None}
    return {"exponent": math.log2(factor), **history.summary(), **found}


class History:
    """Training losses and engagement of the last tenth of a run."""

    def __init__(self, steps: int) -> None:
        self.begins = steps - max(1, steps // 10)
        self.losses: list[float] = []
        self.engagement: list[Tensor] = []
        self.finite = True

    def add(self, step: int, losses: Sequence[float], engagement: Tensor) -> None:
        if not all(map(math.isfinite, losses)):
            self.finite = False
            raise Diverged
        if step >= self.begins:
            self.losses.append(fmean(losses))
            self.engagement.append(engagement)

    def summary(self) -> Record:
        """``train``: final training loss in nats; ``constant``: that of the best constants for the
        same interactions, in hindsight."""
        if not self.finite or not self.losses:
            return {"train": None, "constant": None, "crashed": True}
        seen = torch.cat(self.engagement)
        train = fmean(self.losses)
        constant = F.binary_cross_entropy(seen.mean(0).expand_as(seen), seen).item()
        return {"train": train, "constant": constant, "crashed": train > constant}


# -- shared gradients ------------------------------------------------------------------------------


def train_shared(setup: Setup, rate: float, seed: int, steps: int, history: History) -> Record:
    model = PROBLEM.build(seed)
    optimizer = hdet.FusedAdamW(PROBLEM.groups(model), lr=rate, betas=(0.9, 0.95))
    alone = setup.replicas == 1
    replicas = hdet.Replicas.default() if alone else hdet.CoresidentReplicas(model, setup.replicas)
    for r in range(setup.replicas if setup.noise else 0):
        with replicas.use(r):
            hdet.warm_noise_(model.named_parameters(), setup.noise, seed, replicas)
    softmax = None
    if setup.sigma is not None:
        softmax = hdet.SoftmaxController(setup.sigma, decay=setup.decay)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one replica explores nothing")
        ensemble = hdet.Ensemble(
            optimizer,
            onecycle(optimizer, rate, steps),
            replicas=replicas,
            seed=seed,
            design="permutation",
            knobs=[hdet.LearningRate(SPREAD, groups="each")],
            sync=hdet.Sync(INTERVAL if setup.averages else steps + 1),
            warmup_steps=int(WARMUP * steps),
            controller=softmax,
        )
    bases, apart = [], []
    for step in range(steps):
        batch, losses = interactions(BATCH, step, steps, seed), []
        parts = zip(*(tensor.chunk(setup.replicas) for tensor in batch), strict=True)
        for r, part in enumerate(parts):
            with replicas.use(r):
                loss = PROBLEM.losses(model, part).mean()
                ensemble.observe(loss.detach())
                (loss / setup.replicas).backward()
            losses.append(loss.item())
        history.add(step, losses, batch[-1])
        optimizer.step()
        optimizer.zero_grad()
        if step == steps - 1 and not setup.averages:
            for r in range(setup.replicas):
                with replicas.use(r):
                    apart.append(PROBLEM.validate(model))
        ensemble.step()  # the last one averages in any case
        if (step + 1) * 4 % steps == 0:
            bases.append({name: value / rate for name, value in ensemble.values().items()})
    averaged = PROBLEM.validate(model)
    return {"validation": fmean(apart or [averaged]), "averaged": averaged, "bases": bases}


def onecycle(optimizer: torch.optim.Optimizer, rate: float, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, rate, total_steps=steps, pct_start=WARMUP, cycle_momentum=False)


# -- local gradients: models, optimizers and moments of their own, and every T steps the plain mean


def train_local(setup: Setup, rate: float, seed: int, steps: int, history: History) -> Record:
    models = noisy_starts(setup, seed)
    optimizers = [
        torch.optim.AdamW(PROBLEM.groups(model), lr=rate, betas=(0.9, 0.95), fused=True)
        for model in models
    ]
    clock = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)  # only its rate is used
    schedule, grid = onecycle(clock, rate, steps), multipliers(setup.replicas, SPREAD)
    for step in range(steps):
        batch, losses = interactions(BATCH, step, steps, seed), []
        parts = zip(*(tensor.chunk(setup.replicas) for tensor in batch), strict=True)
        for r, (model, optimizer, part) in enumerate(zip(models, optimizers, parts, strict=True)):
            for group in optimizer.param_groups:
                place = assignment(seed, step // INTERVAL, group["name"], setup.replicas)[r]
                group["lr"] = schedule.get_last_lr()[0] * grid[place]
            loss = PROBLEM.losses(model, part).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history.add(step, losses, batch[-1])
        clock.step()
        schedule.step()
        if (step + 1) % INTERVAL == 0 or step == steps - 1:
            average_(models)
    return {"validation": PROBLEM.validate(models[0])}


def noisy_starts(setup: Setup, seed: int) -> list[nn.Module]:
    """A model for each replica, with the noise that it has among co-resident ones."""
    model = PROBLEM.build(seed)
    replicas = hdet.CoresidentReplicas(model, setup.replicas)
    models = [PROBLEM.build(seed) for _ in range(setup.replicas)]
    for r, own in enumerate(models):
        with replicas.use(r):
            hdet.warm_noise_(model.named_parameters(), setup.noise, seed, replicas)
            own.load_state_dict(model.state_dict())
    return models


@torch.no_grad()
def average_(models: Sequence[nn.Module]) -> None:
    for copies in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(copies).mean(0)
        for copy in copies:
            copy.copy_(mean)


# -- what is run -----------------------------------------------------------------------------------


def search(options: argparse.Namespace) -> list[Task]:
    """For the baseline's best rate, on other seeds than those of the table."""
    seeds, rates = (FIND_SEEDS[:1], FIND[2:4]) if options.quick else (FIND_SEEDS, FIND)
    cells = product(rates, seeds)
    return [_task("paper-find", "baseline", 1.0, *cell, quick=options.quick) for cell in cells]


def _task(*of: Any, quick: bool) -> Task:
    names = ("benchmark", "method", "factor", "rate", "seed")
    length = {"problem": PROBLEM.name, "steps": 40 if quick else STEPS}
    return {**dict(zip(names, of, strict=True)), **length}


def best_rate(records: Sequence[Record]) -> float:
    """Of the baseline, by the mean held-out loss."""

    def loss(rate: float) -> float:
        found = [line["validation"] for line in by_rate[rate]]
        return math.inf if None in found else fmean(found)

    by_rate = grouped(records, "rate")
    return min(by_rate, key=loss)


def plan(options: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    best = best_rate(EXPERIMENT.complete(search(options), options))
    for task in EXPERIMENT.grid(options):
        method, factor = task["method"], task["factor"]
        if factor >= 1 or method == "baseline":
            of = method, factor, best * factor, task["seed"]
            yield _task("paper", *of, quick=options.quick)


def table(records: Sequence[Record]) -> str:
    """Runs that crashed or learned nothing, by configuration and multiple of the best rate."""
    shown = [record for record in records if record["benchmark"] == "paper"]
    methods = {method: grouped(own, "factor") for method, own in grouped(shown, "method").items()}
    factors = {
        f"{Fraction(factor).limit_denominator(100)} x": factor
        for factor in sorted(grouped(shown, "factor"))
    }

    def cell(own: dict[float, list[Record]], factor: float) -> str:
        lines = own.get(factor, [])
        return f"{sum(line['crashed'] for line in lines)}" if lines else ""

    return crossed("configuration", methods, factors, cell)


EXPERIMENT = Experiment(
    "paper", __doc__, run,
    (
        Column("factor", (1 / 9, 1.0, 8.0, 2.0, 4.0, 16.0, 32.0), [1.0, 16.0]),
        Column("method", list(METHODS), ["baseline"], METHODS),
    ),
    table,
    seeds=10,
    same=("benchmark", "method", "seed", "steps", "rate"),
    plan=plan,
)  # fmt: skip


if __name__ == "__main__":
    EXPERIMENT.main()
