"""Local gradients with an outer step (DiLoCo): all workers at one inner rate, or each at its own;
and the rate found from what they show.

    python -m benchmarks.evidence.outer [--workloads cnn-digits ...] [--methods ...] [--starts -2 0
                                        2] [--steps 2000] [--seeds 1] [--jobs 1] [--quick] [--json
                                        FILE]

Four gloo processes, each on a quarter of the batch, averaged every `INTERVAL` steps. Starts are
exponents of 2 times the rate that people would write first. The table has the final held-out loss.

    local       the plain mean (local SGD)
    diloco      `hdet.converge.Outer()`
    spread      the same, the workers' inner rates spread around the base value
    probe       the same, and a `ProbeController` moves the base value
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import hdet
from hdet.converge import Outer, Plain

from ..harness import spawn
from . import command
from .problems import Batch
from .runs import Record, Task, finite, identity
from .training import in_parts
from .workloads import OPTIMIZERS, SCHEDULES, WORKLOADS

RESULTS = "benchmarks/results/evidence/outer.jsonl"
WORKERS, INTERVAL, SPREAD, CHUNKS = 4, 50, 0.3, 8
METHODS = ("local", "diloco", "spread", "probe")


def worker(
    rank: int, world: int, workload: str, method: str, exponent: int, seed: int, steps: int
) -> Any:
    """(held-out loss, correction of the base value) after a run, the same on all ranks."""
    chosen = WORKLOADS[workload]
    problem = replace(chosen.problem, steps=steps)
    model = problem.build(seed)
    optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), chosen.rate * 2.0**exponent)

    def common(cycle: int) -> list[Batch]:
        whole = [
            problem.spare(seed, (cycle + 1) * INTERVAL, 2 * cycle + i)
            for i in range(CHUNKS // world)
        ]
        return [
            tuple(column[r::world] for column in batch) for batch in whole for r in range(world)
        ]

    probe = hdet.ProbeController(
        lambda net, batch: problem.losses(net, batch).mean(), common, chunks=CHUNKS, model=model
    )
    ensemble = hdet.Ensemble(
        optimizer,
        SCHEDULES[chosen.schedule](optimizer, steps),
        total_steps=steps,
        controller=probe if method == "probe" else None,
        seed=seed,
        knobs=[hdet.LearningRate(SPREAD if method in ("spread", "probe") else 0.0)],
        sync=hdet.Sync(
            INTERVAL,
            converge=Plain() if method == "local" else Outer(),
            gradients="local",
            moments="keep",
        ),
    )
    loss = in_parts(problem, model, optimizer, ensemble, seed, rank, world)
    return loss, ensemble.corrections["lr"]


def run(workload: str, method: str, exponent: int, seed: int, steps: int) -> Record:
    """One line of the results."""
    began = time.perf_counter()
    validation, correction = spawn(worker, WORKERS, workload, method, exponent, seed, steps)
    return {
        "benchmark": "outer",
        "workload": workload,
        "method": method,
        "exponent": exponent,
        "seed": seed,
        "steps": steps,
        "validation": finite(validation),
        "correction": finite(correction),
        "seconds": time.perf_counter() - began,
        "torch": torch.__version__,
    }


key = identity("workload", "method", "exponent", "seed", "steps")


def tasks(options: argparse.Namespace) -> list[Task]:
    return command.grid(
        seed=range(options.seeds),
        workload=options.workloads,
        exponent=options.starts,
        method=options.methods,
        steps=[options.steps],
    )


def table(records: Sequence[Record]) -> str:
    cells = {(r["workload"], r["exponent"], r["seed"], r["method"]): r for r in records}
    methods = [method for method in METHODS if any(cell[3] == method for cell in cells)]
    lines = [
        "| workload | start | seed | " + " | ".join(methods) + " | probe's correction |",
        "|---" * (len(methods) + 4) + "|",
    ]
    for workload, exponent, seed in dict.fromkeys(cell[:3] for cell in sorted(cells)):
        row = {method: cells.get((workload, exponent, seed, method)) for method in methods}
        losses = [
            "broke" if r and r["validation"] is None else f"{r['validation']:.4f}" if r else ""
            for r in row.values()
        ]
        moved = row.get("probe")
        shown = f"{moved['correction']:.2f}" if moved and moved["correction"] is not None else ""
        lines.append(
            f"| {workload} | 2^{exponent} | {seed} | " + " | ".join(losses) + f" | {shown} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, 100 steps, one method", seeds=1)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=["cnn-digits", "gru-bytes", "vit-digits"],
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--starts", type=int, nargs="+", default=[-2, 0, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.set_defaults(jobs=1)
    options = command.parsed(
        parser,
        arguments,
        workloads=["mlp-breast-cancer"],
        methods=["probe"],
        starts=[0],
        steps=100,
        seeds=1,
    )
    print(table(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
