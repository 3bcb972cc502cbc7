"""AutoLR on N ranks at the same total batch: what do more replicas buy?

    python -m benchmarks.evidence.ranks [--workloads mlp-friedman ...] [--counts 1 2 4 8] [--starts -4 0 4] [--steps 10000] [--seeds 1]
                                        [--jobs 1] [--quick] [--json FILE]

N gloo processes, each with an N-th of every batch; the loop averages their gradients. An arm is spread over all ranks as the run is, so a trial costs the same
part of the run's compute whatever N is, and N scores of a batch's parts stand for one of the batch. The table has what was decided and the held-out loss.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import hdet

from ..harness import spawn
from . import auto, command
from .runs import Record, Task, finite, identity
from .training import in_parts
from .workloads import OPTIMIZERS, SCHEDULES, WORKLOADS

RESULTS = "benchmarks/results/evidence/ranks.jsonl"


def worker(
    rank: int, world: int, workload: str, exponent: int, seed: int, steps: int
) -> list[float]:
    """(held-out loss, correction, part of the run's compute in trials), which must be the same on all ranks."""
    chosen = WORKLOADS[workload]
    problem = replace(chosen.problem, steps=steps)
    model = problem.build(seed)
    optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), chosen.rate * 2.0**exponent)
    controller = auto.controller_of("trial", model)
    assert controller is not None
    ensemble = hdet.Ensemble(
        optimizer,
        SCHEDULES[chosen.schedule](optimizer, steps),
        total_steps=steps,
        controller=controller,
        seed=seed,
    )

    def average() -> None:
        """As one tensor: hundreds of small messages would cost more than the step."""
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= world
        for gradient, mean in zip(
            gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))

    loss = in_parts(problem, model, optimizer, ensemble, seed, rank, world, average=average)
    found = [loss, ensemble.corrections["lr"], controller.cost / steps]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    assert len(set(map(str, every))) == 1, every
    return found


def run(workload: str, count: int, exponent: int, seed: int, steps: int) -> Record:
    """One line of the results."""
    began = time.perf_counter()
    validation, correction, spent = spawn(worker, count, workload, exponent, seed, steps)
    return {
        "benchmark": "ranks", "workload": workload, "count": count, "exponent": exponent, "seed": seed, "steps": steps,
        "validation": finite(validation), "correction": finite(correction), "spent_percent": 100 * spent,
        "seconds": time.perf_counter() - began, "torch": torch.__version__,
    }  # fmt: skip


key = identity("workload", "count", "exponent", "seed", "steps")


def tasks(options: argparse.Namespace) -> list[Task]:
    return command.grid(
        seed=range(options.seeds), workload=options.workloads, exponent=options.starts, count=options.counts, steps=[options.steps],
    )  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """A line for each start, a column for each N: the loss, and the correction."""
    cells = {(r["workload"], r["exponent"], r["seed"], r["count"]): r for r in records}
    counts = sorted({cell[3] for cell in cells})
    lines = [
        "| workload | start | seed | " + " | ".join(f"N = {n}" for n in counts) + " |",
        "|---" * (3 + len(counts)) + "|",
    ]
    for workload, exponent, seed in dict.fromkeys(cell[:3] for cell in sorted(cells)):
        row = [cells.get((workload, exponent, seed, n)) for n in counts]
        shown = [
            ""
            if r is None
            else "broke"
            if r["validation"] is None
            else f"{r['validation']:.4g} (x {r['correction']:.3g})"
            for r in row
        ]
        lines.append(f"| {workload} | 2^{exponent} | {seed} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, two ranks, 400 steps", seeds=1)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=["mlp-friedman", "flow-spirals", "mlp-finetuned-clusters"],
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--starts", type=int, nargs="+", default=[-4, 0, 4])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.set_defaults(jobs=1)
    options = command.parsed(
        parser, arguments, workloads=["mlp-friedman"], counts=[2], starts=[-4], steps=1000, seeds=1
    )
    print(table(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
