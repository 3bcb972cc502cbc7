"""The paper's table on the generated recommender: what keeps a rate that is too high from crashing,
and what the controller does with four groups.

    python -m benchmarks.evidence.paper [--methods full ...] [--factors 1 8 ...] [--seeds 10]
    [--jobs 2] [--quick] [--json FILE]

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
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.core.spread import assignment, multipliers

from . import command
from .problems import PROBLEMS
from .problems.recsys import interactions
from .runs import Record, Task, identity

RESULTS = "benchmarks/results/evidence/paper.jsonl"
PROBLEM = PROBLEMS["recommender-clicks"]
STEPS, BATCH = 400, 128
REPLICAS, SPREAD, INTERVAL, WARMUP, NOISE = 8, 1 / 9, 10, 0.1, 0.01
"""N, alpha, T, S_warm as a part of the run (where OneCycle is at its peak), nu"""
FACTORS = [1 / 9, 1, 8, 2, 4, 16, 32]
FIND, FIND_SEEDS = [2.0**e for e in range(-9, -3)], (1000, 1001, 1002)
"""rates among which the baseline's best one is looked for, on other seeds than those of the table
"""


@dataclass(frozen=True)
class Setup:
    """A row of the table."""

    title: str
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
    "baseline": Setup("Baseline", replicas=1, noise=0),
    "decay": Setup("Baseline with the decay of Eq. 7", replicas=1, noise=0, sigma=0.1),
    "warm-init": Setup("Warm-Init, no averaging", averages=False),
    "no-auto": Setup("HDET without auto-LR"),
    "no-warm": Setup("HDET without warm init", noise=0, sigma=0.1),
    "full": Setup("HDET, full", sigma=0.1),
    "sharp": Setup("HDET, full, the code's sigma 0.002", sigma=0.002),
    "on-onecycle": Setup(
        "HDET, full, but multiplying OneCycle instead of the decay of Eq. 7", sigma=0.1, decay=None
    ),
    "local": Setup("HDET without auto-LR, local gradients", local=True),
}


class Diverged(Exception):
    """A loss is not finite."""


def run(
    benchmark: str, problem: str, method: str, factor: float, rate: float, seed: int, steps: int
) -> Record:
    """One line of the results."""
    began, setup, history = time.perf_counter(), METHODS[method], History(steps)
    try:
        found = (train_local if setup.local else train_shared)(setup, rate, seed, steps, history)
    except (Diverged, hdet.ReplicasDiverged):
        found = {"validation": None}
    return {
        "benchmark": benchmark,
        "problem": problem,
        "method": method,
        "factor": factor,
        "exponent": math.log2(factor),
        "rate": rate,
        "seed": seed,
        "steps": steps,
        **history.summary(),
        **found,
        "seconds": time.perf_counter() - began,
    }


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
            self.losses.append(statistics.mean(losses))
            self.engagement.append(engagement)

    def summary(self) -> Record:
        """``train``: final training loss in nats; ``constant``: that of the best constants for the
        same interactions, in hindsight."""
        if not self.finite or not self.losses:
            return {"train": None, "constant": None, "crashed": True}
        seen = torch.cat(self.engagement)
        train, constant = (
            statistics.mean(self.losses),
            F.binary_cross_entropy(seen.mean(0).expand_as(seen), seen).item(),
        )
        return {"train": train, "constant": constant, "crashed": train > constant}


# -- shared gradients ------------------------------------------------------------------------------


def train_shared(setup: Setup, rate: float, seed: int, steps: int, history: History) -> Record:
    model = PROBLEM.build(seed)
    optimizer = hdet.FusedAdamW(PROBLEM.groups(model), lr=rate, betas=(0.9, 0.95))
    replicas = (
        hdet.Replicas.default()
        if setup.replicas == 1
        else hdet.CoresidentReplicas(model, setup.replicas)
    )
    for r in range(setup.replicas if setup.noise else 0):
        with replicas.use(r):
            hdet.warm_noise_(model.named_parameters(), setup.noise, seed, replicas)
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
            controller=None
            if setup.sigma is None
            else hdet.SoftmaxController(setup.sigma, decay=setup.decay),
        )
    bases, apart = [], []
    for step in range(steps):
        batch, losses = interactions(BATCH, step, steps, seed), []
        for r, part in enumerate(
            zip(*(tensor.chunk(setup.replicas) for tensor in batch), strict=True)
        ):
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
    return {
        "validation": statistics.mean(apart or [averaged]),
        "averaged": averaged,
        "bases": bases,
    }


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
                group["lr"] = (
                    schedule.get_last_lr()[0]
                    * grid[assignment(seed, step // INTERVAL, group["name"], setup.replicas)[r]]
                )
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
    replicas, models = (
        hdet.CoresidentReplicas(model, setup.replicas),
        [PROBLEM.build(seed) for _ in range(setup.replicas)],
    )
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


key = identity("benchmark", "method", "seed", "steps", "rate")


def search(steps: int, rates: Sequence[float], seeds: Sequence[int]) -> Iterator[Task]:
    for seed in seeds:
        for rate in rates:
            yield {
                "benchmark": "paper-find",
                "problem": PROBLEM.name,
                "method": "baseline",
                "factor": 1.0,
                "rate": rate,
                "seed": seed,
                "steps": steps,
            }


def best_rate(records: Sequence[Record], steps: int) -> float:
    """Of the baseline, by the mean held-out loss."""
    found: dict[float, list[float]] = {}
    for record in records:
        if record["benchmark"] == "paper-find" and record["steps"] == steps:
            found.setdefault(record["rate"], []).append(
                math.inf if record["validation"] is None else record["validation"]
            )
    return min(found, key=lambda rate: statistics.mean(found[rate]))


def grid(options: argparse.Namespace, best: float) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    for seed in range(options.seeds):
        for factor in options.factors:
            for method in options.methods:
                if factor >= 1 or method == "baseline":
                    yield {
                        "benchmark": "paper",
                        "problem": PROBLEM.name,
                        "method": method,
                        "factor": factor,
                        "rate": best * factor,
                        "seed": seed,
                        "steps": options.steps,
                    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one seed, 40 steps at two rates", seeds=10)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--factors",
        type=float,
        nargs="+",
        default=FACTORS,
        help="times the best rate; below 1 for the baseline alone",
    )
    parser.set_defaults(steps=STEPS, rates=FIND, find_seeds=FIND_SEEDS)
    options = command.parsed(
        parser,
        arguments,
        steps=40,
        rates=FIND[2:4],
        find_seeds=FIND_SEEDS[:1],
        factors=[1.0, 16.0],
        seeds=1,
    )
    found = command.complete(
        run, search(options.steps, options.rates, options.find_seeds), key, options
    )
    command.complete(run, grid(options, best_rate(found, options.steps)), key, options)


if __name__ == "__main__":
    main()
