"""AutoLR's trial on N ranks: arms that are spread over the replicas, or that all of them train.

    python -m benchmarks.evidence.ranks [--workloads mlp-friedman ...] [--counts 2 4 8]

N gloo processes with DistributedDataParallel, each with an N-th of every batch. *Beside*: all ranks
train every arm on the whole batch, as one process would. *Spread* (``spread_arms=True``): each
replica trains arms of its own on its part. A process ends with its search; the end of the run is
read off the curve of fixed rates, as in benchmarks.evidence.auto, which has the trials of N = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet

from ..harness import spawn
from ..tables import percent
from ..tables import table as markdown
from . import auto, fixed_rates
from .experiment import Column, Experiment, Record
from .workloads import WORKLOADS

STEPS, STARTS = 10_000, (-4, 0, 4)
WAYS = {"beside": False, "spread": True}
CHOSEN = (
    "mlp-friedman", "cnn-digits", "recommender-clicks", "vae-digits", "flow-spirals",
    "masked-lm-markov", "mixture-density-branches", "transformer-recall",
)  # fmt: skip
"""of different kinds, with batches that eight ranks can share"""


def worker(
    rank: int, world: int, workload: str, spread: bool, starts: Sequence[int]
) -> list[Record]:
    """What searches from each start have found, which must be the same on all ranks."""
    found = [search(rank, world, workload, exponent, spread) for exponent in starts]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    assert len(set(map(str, every))) == 1, every
    return found


def search(rank: int, world: int, workload: str, exponent: int, spread: bool) -> Record:
    chosen = WORKLOADS[workload]
    problem, model = chosen.problem, chosen.problem.build(0)
    optimizer = chosen.optimizer_for(model, exponent)
    parallel = DistributedDataParallel(model)
    auto_lr = hdet.AutoLR(parallel, spread_arms=spread)
    scheduler = chosen.scheduler_for(optimizer, STEPS)
    ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=STEPS, search=auto_lr)
    torch.manual_seed(1000 + rank)  # each draws its own noise, and drops its own units
    for step in range(STEPS):
        batch = tuple(column[rank::world] for column in problem.batch(0, step))
        loss = problem.losses(parallel, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss, closure=partial(problem.losses, parallel, batch))
        if auto_lr.done:
            break
    interval = auto_lr.interval
    assert interval is not None
    found = {"factor": interval.suggestion / interval.rate, "reason": interval.reason}
    return {"exponent": exponent, **found, "cost": auto_lr.cost}


def run(workload: str, count: int, way: str, seed: int) -> Record:
    return {"found": spawn(worker, count, workload, WAYS[way], STARTS)}


def table(records: Sequence[Record]) -> str:
    """A line for each number of ranks and way.

    One process: from the trials of benchmarks.evidence.auto.
    """
    curves, rows = auto.curves(fixed_rates.EXPERIMENT.read()), []
    workloads = {record["workload"] for record in records}
    cells = {
        (record["count"], record["way"], record["workload"], found["exponent"]): found
        for record in records
        for found in record["found"]
    }
    for line in auto.EXPERIMENT.read():
        usual = line["level"] == "trial" and line["steps"] == STEPS and not line["whole"]
        if usual and line["workload"] in workloads and line["exponent"] in STARTS:
            cells[1, "", line["workload"], line["exponent"]] = line
    for kind in sorted({cell[:2] for cell in cells}):
        pairs, costs = [], []
        for (count, way, workload, exponent), found in cells.items():
            if (count, way) == kind:
                curve = curves[workload, STEPS, 0]
                gap = curve.at(exponent + math.log2(found["factor"]))
                pairs.append((curve.gap(curve.losses[exponent]), gap))
                costs.append(found["cost"])
        fixed, gaps = zip(*pairs, strict=True)
        worse = [gap - before for before, gap in pairs if gap - before > auto.NEAR]
        harm = f"{len(worse)}, by {percent(max(worse))}" if worse else "0"
        means = percent(mean(fixed)), percent(mean(gaps))
        rows.append([*kind, len(pairs), *means, harm, f"{mean(costs):.0f}"])
    heads = ["ranks", "arms", "runs", "gap, fixed rate", "gap, AutoLR", "worse by over 0.5 %",
             "steps' worth"]  # fmt: skip
    return markdown(heads, rows)


EXPERIMENT = Experiment(
    "ranks", __doc__, run,
    (
        Column("count", (2, 4, 8), [2]),
        Column("workload", CHOSEN, ["mlp-friedman"], WORKLOADS),
        Column("way", list(WAYS), ["spread"], WAYS),
    ),
    table,
    jobs=1,
    same=("workload", "count", "way"),
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
