"""What AutoLR takes of the time: a run with it beside the same run with its fixed rate and the
scheduler alone.

    python -m benchmarks.evidence.seconds [--workloads llama-bytes ...] [--steps 10000]

Both train in one process of one thread, `PIECE` steps at a time in turn, so that a busy machine
slows both. ``added`` is what the whole run takes more, in percent: the trial, and what each step
costs, which is ``between``: the same of the median piece. ``counted`` is what `AutoLR.cost` counts,
in steps of the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from ..tables import percent, spaced
from ..tables import table as markdown
from .experiment import Column, Experiment, Record
from .problems import Problem
from .training import Parts, scheduled, search_of, with_ensemble
from .workloads import WORKLOADS

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
    problem = chosen.lasting(steps)
    models = [problem.build(seed) for _ in range(2)]
    optimizers = [chosen.optimizer_for(model) for model in models]
    schedulers = [chosen.scheduler_for(optimizer, steps) for optimizer in optimizers]
    plain, searching = zip(models, optimizers, schedulers, strict=True)
    fixed, search = scheduled(problem, *plain), search_of("trial", models[1])
    auto, ensemble = with_ensemble(problem, *searching, search, seed)
    assert search is not None
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
        "counted_percent": 100 * search.cost / steps,
        "correction": ensemble.corrections["lr"],
    }


def table(records: Sequence[Record]) -> str:
    def row(line: Record) -> list[object]:
        cells = (percent(line[f"{name}_percent"]) for name in ("added", "between", "counted"))
        return [line["workload"], spaced(line["steps"]), f"{line['step_ms']:.1f} ms", *cells]

    heads = ["workload", "steps", "a step", "added", "a step after the trial", "counted"]
    return markdown(heads, map(row, records))


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
