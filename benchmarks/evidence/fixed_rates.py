"""Fixed rates on every workload: the final held-out loss against the peak, for runs of several
lengths, each with a schedule of its own.

    python -m benchmarks.evidence.fixed_rates [--workloads llama-bytes ...] [--lengths 60 ... 10000]
                                              [--exponents -6 ... 6] [--seeds 1] [--jobs 2]
                                              [--quick] [--json FILE]

Rates are 2^exponent times the one that people would write first. A short run with its own warm-up
and fall is what an annealed trial is; so the same table tells what trials would have said, and what
was right for the whole run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from . import command
from .problems import Problem
from .runs import Record, Task, identity, spaced
from .training import Method, Parts, scheduled, train
from .workloads import DEVELOPMENT, OPTIMIZERS, SCHEDULES, WORKLOADS

RESULTS = "benchmarks/results/evidence/fixed-rates.jsonl"
LENGTHS = (60, 120, 240, 480, 1500)


def run(workload: str, exponent: int, seed: int, steps: int) -> Record:
    """One line of the results."""
    chosen = WORKLOADS[workload]
    rate = chosen.rate * 2.0**exponent

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), rate)
        return scheduled(problem, model, optimizer, SCHEDULES[chosen.schedule](optimizer, steps))

    outcome = train(
        replace(chosen.problem, steps=steps),
        Method(chosen.optimizer, build, rate, None),
        rate,
        seed,
    )
    return {
        "benchmark": "fixed-rates",
        "workload": workload,
        "exponent": exponent,
        "rate": rate,
        "seed": seed,
        "steps": steps,
        "validation": outcome.validation,
        "untrained": untrained(workload, seed),
        "seconds": outcome.seconds,
        "torch": torch.__version__,
    }


@cache
def untrained(workload: str, seed: int) -> float:
    problem = WORKLOADS[workload].problem
    return problem.validate(problem.build(seed))


key = identity("workload", "exponent", "seed", "steps")


def tasks(options: argparse.Namespace) -> list[Task]:
    """The short ones first."""
    return command.grid(
        seed=range(options.seeds),
        steps=options.lengths,
        workload=options.workloads,
        exponent=options.exponents,
    )


def reached(loss: float | None, untrained: float) -> float:
    """The final loss; a run that broke, or got worse, counts as untrained."""
    return untrained if loss is None else min(loss, untrained)


def means(records: Sequence[Record]) -> dict[tuple[str, int], dict[int, float]]:
    """(workload, length) -> exponent -> mean over the seeds of the loss that was `reached`."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for record in records:
        loss = reached(record["validation"], record["untrained"])
        found.setdefault((record["workload"], record["steps"]), {}).setdefault(
            record["exponent"], []
        ).append(loss)
    return {
        cell: {e: statistics.mean(losses) for e, losses in sorted(row.items())}
        for cell, row in sorted(found.items())
    }


def table(records: Sequence[Record]) -> str:
    """Each rate's loss, the best one marked; then the best exponent by length."""
    of_cells = means(records)
    best = {cell: min(row, key=row.__getitem__) for cell, row in of_cells.items()}
    lines = [
        f"{name:30s} {steps:6d}  "
        + "  ".join(
            f"{'*' if e == best[name, steps] else ''}{e:+d}: {loss:.4g}" for e, loss in row.items()
        )
        for (name, steps), row in of_cells.items()
    ]
    lengths = sorted({steps for _, steps in best})
    lines += [
        "",
        "| best exponent after | " + " | ".join(spaced(steps) for steps in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for name in dict.fromkeys(name for name, _ in best):
        lines.append(
            f"| {name} | "
            + " | ".join(
                f"{best[name, steps]:+d}" if (name, steps) in best else "" for steps in lengths
            )
            + " |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, 20 steps, two rates", seeds=1)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(DEVELOPMENT))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--exponents", type=int, nargs="+", default=list(range(-6, 7)))
    options = command.parsed(
        parser, arguments, workloads=["mlp-breast-cancer"], lengths=[20], exponents=[0, 3], seeds=1
    )
    print(table(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
