"""AutoLR's trial on N ranks: arms that are spread over the replicas, beside arms that all of them
train.

    python -m benchmarks.evidence.ranks [--workloads mlp-friedman ...] [--counts 2 4 8] [--jobs 1]
        [--quick] [--json FILE]

N gloo processes with DistributedDataParallel, each with an N-th of every batch. *Beside*: all ranks
train every arm on the whole batch, as one process would. *Spread* (``spread_arms=True``): each
replica trains arms of its own on its part. A process ends with its search; the end of the run is
read off the curve of fixed rates, as in benchmarks.evidence.auto, which has the trials of N = 1.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet

from ..harness import spawn
from . import auto, command, fixed_rates
from .report.tables import table as markdown
from .runs import Record, Task, identity, read
from .workloads import OPTIMIZERS, SCHEDULES, WORKLOADS

RESULTS = "benchmarks/results/evidence/ranks.jsonl"
STEPS = 10_000
WAYS = {"beside": False, "spread": True}
STARTS = (-4, 0, 4)
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
    problem = replace(chosen.problem, steps=STEPS)
    model = problem.build(0)
    optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), chosen.rate * 2.0**exponent)
    parallel = DistributedDataParallel(model)
    controller = hdet.AutoLR(parallel, spread_arms=spread)
    ensemble = hdet.Ensemble(
        optimizer, SCHEDULES[chosen.schedule](optimizer, STEPS), total_steps=STEPS,
        controller=controller,
    )  # fmt: skip
    torch.manual_seed(1000 + rank)  # each draws its own noise, and drops its own units
    for step in range(STEPS):
        batch = tuple(column[rank::world] for column in problem.batch(0, step))
        loss = problem.losses(parallel, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss, closure=partial(problem.losses, parallel, batch))
        if controller.done:
            break
    interval = controller.interval
    assert interval is not None
    return {
        "exponent": exponent, "factor": interval.suggestion / interval.rate,
        "reason": interval.reason, "cost": controller.cost,
    }  # fmt: skip


def run(workload: str, count: int, way: str, starts: Sequence[int]) -> Record:
    """One line of the results."""
    began = time.perf_counter()
    found = spawn(worker, count, workload, WAYS[way], starts)
    return {
        "benchmark": "ranks", "workload": workload, "count": count, "way": way, "found": found,
        "seconds": time.perf_counter() - began, "torch": torch.__version__,
    }  # fmt: skip


key = identity("workload", "count", "way")


def tasks(options: argparse.Namespace) -> list[Task]:
    return command.grid(
        count=options.counts, workload=options.workloads, way=list(WAYS), starts=[options.starts]
    )


def table(records: Sequence[Record]) -> str:
    """A line for each number of ranks and way.

    One process: from the trials of benchmarks.evidence.auto.
    """
    curves, rows = auto.curves(read(fixed_rates.RESULTS)), []
    workloads = {record["workload"] for record in records}
    cells = {
        (record["count"], record["way"], record["workload"], found["exponent"]): found
        for record in records
        for found in record["found"]
    }
    for line in read(auto.RESULTS):
        usual = line["level"] == "trial" and line["steps"] == STEPS and not line["whole"]
        if usual and line["workload"] in workloads and line["exponent"] in STARTS:
            cells[1, "", line["workload"], line["exponent"]] = line
    for kind in sorted({cell[:2] for cell in cells}):
        gaps, fixed, costs = list[float](), list[float](), list[float]()
        for (count, way, workload, exponent), found in cells.items():
            if (count, way) == kind:
                curve = curves[workload, STEPS, 0]
                gaps.append(curve.at(exponent + math.log2(found["factor"])))
                fixed.append(curve.gap(curve.losses[exponent]))
                costs.append(found["cost"])
        harm = [gap - before for gap, before in zip(gaps, fixed, strict=True)]
        worse = [h for h in harm if h > auto.NEAR]
        rows.append(
            [
                str(kind[0]),
                kind[1],
                str(len(gaps)),
                f"{mean(fixed):.1f} %",
                f"{mean(gaps):.1f} %",
                f"{len(worse)}" + (f", by {max(worse):.1f} %" if worse else ""),
                f"{mean(costs):.0f}",
            ]
        )
    return markdown(
        [
            "ranks",
            "arms",
            "runs",
            "gap, fixed rate",
            "gap, AutoLR",
            ("worse by over 0.5 %"),
            "steps' worth",
        ],
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, two ranks", seeds=1)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(CHOSEN))
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8])
    parser.set_defaults(jobs=1, starts=STARTS)
    options = command.parsed(
        parser, arguments, workloads=["mlp-friedman"], counts=[2], starts=[-4], seeds=1
    )
    print(table(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
