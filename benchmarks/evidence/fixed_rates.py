"""Fixed rates on every workload: the final held-out loss against the peak, for runs of several
lengths, each with a schedule of its own.

    python -m benchmarks.evidence.fixed_rates [--workloads llama-bytes ...] [--lengths 60 ... 10000]

Rates are 2^exponent times the one that people would write first. A short run with its own warm-up
and fall is what an annealed trial is; so the same table tells what trials would have said, and what
was right for the whole run. From its curves of 10 000 steps other benchmarks read losses off.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from torch import nn

from ..tables import crossed, grouped, reached, spaced
from .experiment import Column, Experiment, Record
from .problems import Problem
from .training import Parts, scheduled, train, untrained
from .workloads import DEVELOPMENT, WORKLOADS


def run(workload: str, exponent: int, seed: int, steps: int) -> Record:
    chosen = WORKLOADS[workload]

    def build(problem: Problem, model: nn.Module, exponent: float, seed: int) -> Parts:
        optimizer = chosen.optimizer_for(model, exponent)
        return scheduled(problem, model, optimizer, chosen.scheduler_for(optimizer, steps))

    outcome = train(chosen.lasting(steps), build, exponent, seed)
    return {
        "rate": chosen.rate * 2.0**exponent,
        "validation": outcome["validation"],
        "untrained": untrained(chosen.problem, seed),
    }


def table(records: Sequence[Record]) -> str:
    """Each rate's loss, a mean over the seeds, the best one marked; then the best exponent by
    length."""
    losses = {
        cell: {
            exponent: fmean(reached(line["validation"], line["untrained"]) for line in lines)
            for exponent, lines in sorted(grouped(row, "exponent").items())
        }
        for cell, row in sorted(grouped(records, "workload", "steps").items())
    }
    best = {cell: min(row, key=row.__getitem__) for cell, row in losses.items()}
    lines = []
    for cell, row in losses.items():
        shown = (f"{'*' if e == best[cell] else ''}{e:+d}: {loss:.4g}" for e, loss in row.items())
        lines.append(f"{cell[0]:30s} {cell[1]:6d}  " + "  ".join(shown) + "\n")
    names = {name: name for name, _ in best}
    lengths = {spaced(steps): steps for steps in sorted({steps for _, steps in best})}
    shown_best = crossed(
        "best exponent after",
        names,
        lengths,
        lambda name, steps: f"{best[name, steps]:+d}" if (name, steps) in best else "",
    )
    return "".join(lines) + "\n" + shown_best


EXPERIMENT = Experiment(
    "fixed-rates", __doc__, run,
    (
        Column("steps", (60, 120, 240, 480, 1500), [20], option="lengths"),
        Column("workload", list(DEVELOPMENT), ["mlp-breast-cancer"], WORKLOADS),
        Column("exponent", range(-6, 7), [0, 3]),
    ),
    table,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
