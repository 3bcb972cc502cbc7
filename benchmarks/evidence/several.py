"""Several knobs at once, from usual values: one run of eight replicas against random search with as
many examples.

    python -m benchmarks.evidence.several [--workloads transformer-sorting ...] [--replicas 8]

The knobs are the rate, the decay, beta2, and the dropout rate of a model that has one. The table
has held-out losses at the end:

    usual        one run with the usual values
    averaged     the same run by gloo processes, each on its part of the batch, averaged every
                 `INTERVAL` steps: what that costs hdet
    hdet         the same run; gloo processes, each on its part of the batch and at values of its
                 own, averaged every `INTERVAL` steps; `AutoLR`, then a `ProbeController` on batches
                 that are not trained on
    random 16    the best of 16 trials, each a 16th as long, by batches that are not trained on.
                 Together they train on as many examples as hdet, whose trials and probes come on
                 top. The first trial has the usual values, the others values drawn around them, by
                 the factors in `AROUND`
    random 64    the same with 64 trials
    ... again    the best trial's values in a run as long as hdet's, after the search: twice as
                 many examples in all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

import hdet

from ..harness import spawn
from ..tables import table as markdown
from .experiment import Column, Experiment, Record, finite
from .problems import Batch, Problem
from .training import Parts, on_ranks, scheduled, train
from .workloads import WORKLOADS
from .workloads.kit import Draw

INTERVAL, CHUNKS, VAL_BATCHES = 50, 8, 16
SPREADS = {"lr": 0.3, "weight_decay": 0.4, "beta2": 0.4, "dropout": 0.4}
USUAL = {"lr": 1e-3, "weight_decay": 0.01, "beta2": 0.999, "dropout": 0.1}
AROUND = {"lr": 16.0, "weight_decay": 16.0, "beta2": 16.0, "dropout": 4.0}
"""Values are drawn evenly in the logarithm, from a value over this to its product with this; of 1 -
beta2, and the dropout rate, likewise."""
METHODS = ("usual", "averaged", "hdet", "random 16", "random 64")
Values = dict[str, float]


def made(problem: Problem, seed: int, values: Values) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = problem.build(seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = values["dropout"]
    groups = problem.groups(model)
    for group in groups:
        group["weight_decay"] = values["weight_decay"] if group["weight_decay"] else 0.0
    return model, hdet.FusedAdamW(groups, lr=values["lr"], betas=(0.9, values["beta2"]))


def val_batch(workload: str, seed: int, number: int) -> Batch:
    """A mini-batch that nothing trains on, and that does not validate."""
    chosen = WORKLOADS[workload]
    if chosen.val_batches:
        batches = chosen.val_batches()
        return batches[number % len(batches)]
    return chosen.problem.spare(seed, 0, number)


# -- one run of several replicas -------------------------------------------------------------------


def replica(
    rank: int, world: int, workload: str, seed: int, steps: int, searches: bool
) -> tuple[float, Values]:
    """(held-out loss, values that were found), the same on all ranks."""
    problem = WORKLOADS[workload].lasting(steps)
    model, optimizer = made(problem, seed, USUAL)
    knobs: list[Any] = [hdet.LearningRate(SPREADS["lr"]), hdet.Betas(SPREADS["beta2"], which=[1])]
    if any(group["weight_decay"] for group in optimizer.param_groups):
        knobs.append(hdet.WeightDecay(SPREADS["weight_decay"]))
    if any(isinstance(module, nn.Dropout) for module in model.modules()):
        knobs.append(hdet.Dropout(model, SPREADS["dropout"]))

    def common(cycle: int) -> list[Batch]:
        first = VAL_BATCHES + CHUNKS * cycle
        return [val_batch(workload, seed, first + i) for i in range(CHUNKS)]

    of_batch = lambda net, batch: problem.losses(net, batch).mean()
    probe = hdet.ProbeController(of_batch, common, chunks=CHUNKS, model=model, held_out=True)
    ensemble = hdet.Ensemble(
        optimizer,
        WORKLOADS[workload].scheduler_for(optimizer, steps),
        total_steps=steps,
        search=hdet.AutoLR(model) if searches else None,
        controller=probe if searches else None,
        knobs=knobs if searches else [hdet.LearningRate(0.0)],
        seed=seed,
        sync=hdet.Sync(INTERVAL, gradients="local", moments="keep"),
    )
    loss = on_ranks(problem, model, optimizer, ensemble, seed, rank, world)
    return loss, {name: _moved(name, factor) for name, factor in ensemble.corrections.items()}


def _moved(name: str, factor: float) -> float:
    """The usual value, corrected: of beta2 the steps that an average remembers are multiplied."""
    return 1 - (1 - USUAL[name]) / factor if name == "beta2" else USUAL[name] * factor


# -- random search ---------------------------------------------------------------------------------


def drawn(workload: str, seed: int, number: int) -> Values:
    """Those of a trial; of the first one the usual ones."""
    if not number:
        return USUAL
    g = Draw("several", workload, seed, number)
    return {
        name: _moved(name, around ** (2 * g.rand().item() - 1)) for name, around in AROUND.items()
    }


def alone(workload: str, seed: int, steps: int, values: Values) -> tuple[float, float]:
    """(loss by which trials are chosen, held-out loss) after a run of one replica."""
    chosen, judged = WORKLOADS[workload], list[float]()

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        model, optimizer = made(problem, seed, values)

        def final() -> nn.Module:
            model.eval()
            batches = [val_batch(workload, seed, i) for i in range(VAL_BATCHES)]
            with torch.no_grad():
                judged.append(fmean(problem.losses(model, x).mean().item() for x in batches))
            return model

        parts = scheduled(problem, model, optimizer, chosen.scheduler_for(optimizer, steps))
        return replace(parts, final=final)

    loss = train(chosen.lasting(steps), build, values["lr"], seed)["validation"]
    return (math.inf, math.inf) if loss is None else (judged[0], loss)


def search(workload: str, seed: int, steps: int, trials: int) -> tuple[float, Values]:
    """(held-out loss, values) of the best trial."""
    tried = [drawn(workload, seed, number) for number in range(trials)]
    losses = [alone(workload, seed, steps // trials, values) for values in tried]
    best = min(range(trials), key=lambda number: losses[number][0])
    return losses[best][1], tried[best]


# -- the command -----------------------------------------------------------------------------------


def run(workload: str, method: str, seed: int, steps: int, replicas: int) -> Record:
    again = None
    if method in ("averaged", "hdet"):
        loss, values = spawn(replica, replicas, workload, seed, steps, method == "hdet")
    elif method == "usual":
        loss, values = alone(workload, seed, steps, USUAL)[1], USUAL
    else:
        loss, values = search(workload, seed, steps, int(method.split()[1]))
        again = finite(alone(workload, seed, steps, values)[1])
    return {"validation": finite(loss), "again": again, "values": values}


def table(records: Sequence[Record]) -> str:
    rows = []
    for r in sorted(records, key=lambda r: (r["workload"], r["seed"], METHODS.index(r["method"]))):
        loss, again = ("broke" if x is None else f"{x:.4f}" for x in (r["validation"], r["again"]))
        values = ", ".join(f"{name} {value:.3g}" for name, value in r["values"].items())
        again = again if "random" in r["method"] else ""
        rows.append([r["workload"], r["seed"], r["method"], loss, again, values])
    return markdown(["workload", "seed", "method", "loss", "again", "values"], rows)


CHOSEN = ("mlp-breast-cancer", "transformer-sorting", "gru-bytes")
EXPERIMENT = Experiment(
    "several", __doc__, run,
    (
        Column("workload", CHOSEN, CHOSEN[:1], WORKLOADS),
        Column("method", METHODS, ["hdet"], METHODS),
        Column("steps", (6000,), [128], option="steps"),
        Column("replicas", (8,), [4], option="replicas"),
    ),
    table,
    jobs=1,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
