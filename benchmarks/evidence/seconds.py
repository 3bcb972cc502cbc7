"""What AutoLR takes of the time: a run with it beside the same run with its fixed rate and the
scheduler alone.

    python -m benchmarks.evidence.seconds [--workloads llama-bytes ...] [--steps 10000] [--seeds 1]
    [--quick] [--json FILE]

Both train in one process of one thread, `PIECE` steps at a time in turn, so that a busy machine
slows both. ``added`` is what the whole run takes more, in percent: the trial, and what each step
costs, which is ``between``: the same of the median piece. ``counted`` is what `AutoLR.cost` counts,
in steps of the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from . import command
from .auto import controller_of, parts_of
from .problems import Problem
from .runs import Record, identity, spaced
from .training import Parts, scheduled
from .workloads import OPTIMIZERS, SCHEDULES, WORKLOADS

RESULTS = "benchmarks/results/evidence/seconds.jsonl"
PIECE = 25


def _trained(problem: Problem, parts: Parts, seed: int, steps: range) -> float:
    """Seconds of these steps."""
    batches = [problem.batch(seed, step) for step in steps]
    began = time.perf_counter()
    for batch in batches:
        parts.backward(batch)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        parts.after(batch)
    return time.perf_counter() - began


def run(workload: str, seed: int, steps: int) -> Record:
    """One line of the results, from the workload's usual rate."""
    torch.set_num_threads(1)
    chosen = WORKLOADS[workload]
    problem = replace(chosen.problem, steps=steps)
    models = [problem.build(seed) for _ in range(2)]
    optimizers = [
        OPTIMIZERS[chosen.optimizer](problem.groups(model), chosen.rate) for model in models
    ]
    schedulers = [SCHEDULES[chosen.schedule](optimizer, steps) for optimizer in optimizers]
    fixed = scheduled(problem, models[0], optimizers[0], schedulers[0])
    controller = controller_of("trial", models[1])
    assert controller is not None
    auto, ensemble = parts_of(problem, models[1], optimizers[1], schedulers[1], controller, seed)
    pieces: list[list[float]] = []
    for begin in range(0, steps, PIECE):
        piece, sides = range(begin, min(begin + PIECE, steps)), [fixed, auto]
        order = (0, 1) if begin // PIECE % 2 else (1, 0)
        took = {side: _trained(problem, sides[side], seed, piece) for side in order}
        pieces.append([took[0], took[1]])
    alone, beside = (sum(column) for column in zip(*pieces, strict=True))
    return {
        "benchmark": "seconds",
        "workload": workload,
        "seed": seed,
        "steps": steps,
        "step_ms": 1000 * alone / steps,
        "added_percent": 100 * (beside / alone - 1),
        "between_percent": 100
        * (statistics.median(with_it / without for without, with_it in pieces) - 1),
        "counted_percent": 100 * controller.cost / steps,
        "correction": ensemble.corrections["lr"],
        "seconds": alone + beside,
        "torch": torch.__version__,
    }


key = identity("workload", "seed", "steps")


def table(records: Sequence[Record]) -> str:
    lines = [
        "| workload | steps | a step | added | a step after the trial | counted |",
        "|---" * 6 + "|",
    ]
    for line in records:
        lines.append(
            f"| {line['workload']} | {spaced(line['steps'])} | {line['step_ms']:.1f} ms | "
            f"{line['added_percent']:.1f} % | "
            f"{line['between_percent']:.1f} % | {line['counted_percent']:.1f} % |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, 200 steps", seeds=1)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=["llama-bytes", "resnet-digits-sgd", "tcn-bytes", "mlp-friedman"],
    )
    parser.add_argument("--steps", type=int, default=10_000)
    options = command.parsed(parser, arguments, workloads=["mlp-breast-cancer"], steps=200)
    options.jobs = 1  # nothing beside it
    wanted = command.grid(
        seed=range(options.seeds), steps=[options.steps], workload=options.workloads
    )
    print(table(command.complete(run, wanted, key, options)), end="")


if __name__ == "__main__":
    main()
