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

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..tables import percent, spaced
from ..tables import table as markdown
from .auto import controller_of, parts_of
from .experiment import Column, Experiment, Record
from .problems import Problem
from .training import Parts, scheduled
from .workloads import OPTIMIZERS, SCHEDULES, WORKLOADS

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
    """From the workload's usual rate."""
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
    pieces = []
    for begin in range(0, steps, PIECE):
        piece, sides = range(begin, min(begin + PIECE, steps)), [fixed, auto]
        order = (0, 1) if begin // PIECE % 2 else (1, 0)
        took = {side: _trained(problem, sides[side], seed, piece) for side in order}
        pieces.append([took[0], took[1]])
    times = np.array(pieces)
    alone, beside = times.sum(0)
    return {
        "step_ms": 1000 * alone / steps,
        "added_percent": 100 * (beside / alone - 1),
        "between_percent": 100 * (float(np.median(times[:, 1] / times[:, 0])) - 1),
        "counted_percent": 100 * controller.cost / steps,
        "correction": ensemble.corrections["lr"],
    }


def table(records: Sequence[Record]) -> str:
    return markdown(
        ["workload", "steps", "a step", "added", "a step after the trial", "counted"],
        (
            [
                line["workload"],
                spaced(line["steps"]),
                f"{line['step_ms']:.1f} ms",
                *(percent(line[f"{name}_percent"]) for name in ("added", "between", "counted")),
            ]
            for line in records
        ),
    )


CHOSEN = ("llama-bytes", "resnet-digits-sgd", "tcn-bytes", "mlp-friedman")
EXPERIMENT = Experiment(
    "seconds", __doc__, run,
    (
        Column("steps", (10_000,), [200], option="steps"),
        Column("workload", CHOSEN, ["mlp-breast-cancer"], WORKLOADS),
    ),
    table,
    jobs=1,  # nothing beside it
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
