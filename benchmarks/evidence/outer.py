"""Local gradients with an outer step (DiLoCo): all workers at one inner rate, or each at its own;
and the rate found from what they show.

    python -m benchmarks.evidence.outer [--workloads cnn-digits ...] [--methods local ...]

Four gloo processes, each on a quarter of the batch, averaged every `INTERVAL` steps. Starts are
exponents of 2 times the rate that people would write first. The table has the final held-out loss.

    local       the plain mean (local SGD)
    diloco      `hdet.converge.Outer()`
    spread      the same, the workers' inner rates spread around the base value
    probe       the same, and a `ProbeController` moves the base value
"""

from __future__ import annotations

from collections.abc import Sequence

import hdet
from hdet.converge import Outer, Plain

from ..harness import spawn
from ..tables import grouped
from ..tables import table as markdown
from .experiment import Column, Experiment, Record, finite
from .problems import Batch
from .training import on_ranks
from .workloads import WORKLOADS

WORKERS, INTERVAL, SPREAD, CHUNKS = 4, 50, 0.3, 8
METHODS = ("local", "diloco", "spread", "probe")


def worker(
    rank: int, world: int, workload: str, method: str, exponent: int, seed: int, steps: int
) -> tuple[float, float]:
    """(held-out loss, correction of the base value) after a run, the same on all ranks."""
    chosen = WORKLOADS[workload]
    problem = chosen.lasting(steps)
    model = problem.build(seed)
    optimizer = chosen.optimizer_for(model, exponent)

    def common(cycle: int) -> list[Batch]:
        step, several = (cycle + 1) * INTERVAL, CHUNKS // world
        whole = [problem.spare(seed, step, 2 * cycle + i) for i in range(several)]
        return [tuple(x[r::world] for x in batch) for batch in whole for r in range(world)]

    probe = hdet.ProbeController(
        lambda net, batch: problem.losses(net, batch).mean(), common, chunks=CHUNKS, model=model
    )
    average = Plain() if method == "local" else Outer()
    ensemble = hdet.Ensemble(
        optimizer,
        chosen.scheduler_for(optimizer, steps),
        total_steps=steps,
        controller=probe if method == "probe" else None,
        seed=seed,
        knobs=[hdet.LearningRate(SPREAD if method in ("spread", "probe") else 0.0)],
        sync=hdet.Sync(INTERVAL, converge=average, gradients="local", moments="keep"),
    )
    loss = on_ranks(problem, model, optimizer, ensemble, seed, rank, world)
    return loss, ensemble.corrections["lr"]


def run(workload: str, method: str, exponent: int, seed: int, steps: int) -> Record:
    validation, correction = spawn(worker, WORKERS, workload, method, exponent, seed, steps)
    return {"validation": finite(validation), "correction": finite(correction)}


def table(records: Sequence[Record]) -> str:
    methods = [method for method in METHODS if any(r["method"] == method for r in records)]
    rows = []
    for cell, lines in sorted(grouped(records, "workload", "exponent", "seed").items()):
        row = {line["method"]: line for line in lines}
        losses = ["" if m not in row else row[m]["validation"] for m in methods]
        shown = [
            f"{x:.4f}" if isinstance(x, float) else "broke" if x is None else x for x in losses
        ]
        moved = row.get("probe", {}).get("correction")
        rows.append([cell[0], f"2^{cell[1]}", cell[2], *shown, f"{moved:.2f}" if moved else ""])
    return markdown(["workload", "start", "seed", *methods, "probe's correction"], rows)


CHOSEN = ("cnn-digits", "gru-bytes", "vit-digits")
EXPERIMENT = Experiment(
    "outer", __doc__, run,
    (
        Column("workload", CHOSEN, ["mlp-breast-cancer"], WORKLOADS),
        Column("exponent", (-2, 0, 2), [0], option="starts"),
        Column("method", METHODS, ["probe"], METHODS),
        Column("steps", (2000,), [100], option="steps"),
    ),
    table,
    jobs=1,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
