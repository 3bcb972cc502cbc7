"""The quality that matters: does a run from a wrong learning rate end as if it had been right?

    python -m benchmarks.evidence.quality [--rates 3e-4 1e-2 ...] [--methods fixed probe]

Every start is trained by examples.bytes with the fixed schedule and with a controller: same steps,
batches and seeds, four gloo processes.

    gap recovered = (fixed(start) - probe(start)) / (fixed(start) - best fixed); the goal is 85 %
    from 3e-4. Loss at the best rate = probe(best) - fixed(best); at most 0.03 nats per byte
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from ..tables import grouped, read
from ..tables import table as markdown
from .experiment import Column, Experiment, Record, Task

ROOT = Path(__file__).resolve().parents[2]
FIXED, PROBE, REPLICAS = "fixed", "probe", 4
BETWEEN = 3e-3
"""A rate of the fixed schedule alone, which looks for the best one."""


def run(method: str, rate: float, seed: int, steps: int) -> Record:
    """The end of a run, and where the rate went."""
    given = {"steps": steps, "batch-size": 8, "sync-interval": 50, "spread": 0.3, "seed": seed}
    options = [f"--{name}={value}" for name, value in given.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}"]
        job = ["-m", "examples.bytes", f"--method={method}", f"--max-lr={rate}", *options]
        words = [*torchrun, *job, "--device=cpu", f"--out={out}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
        events = read(out / "history.jsonl")
    cycles = [event for event in events if event["event"] == "cycle"]
    return {
        "validation": [e["loss"] for e in events if e["event"] == "validation"][-1],
        **{
            f"{cost}_percent": 0.1 * sum(c[f"{cost}_ms"] for c in cycles) / events[-1]["seconds"]
            for cost in ("probe", "converge")
        },
        "corrections": [round(next(iter(cycle["corrections"].values())), 4) for cycle in cycles],
    }


def plan(options: argparse.Namespace) -> Iterator[Task]:
    """Seeds from 1 on: 0 is the demo's."""
    for task in EXPERIMENT.grid(options):
        if task["method"] == FIXED or task["rate"] != BETWEEN:
            yield {**task, "seed": 1 + task["seed"], "steps": 20 if options.quick else 2000}


def table(records: Sequence[Record]) -> str:
    """Means over seeds, with the range where there are several."""
    found = grouped(records, "rate", "method")
    losses = {cell: [line["validation"] for line in lines] for cell, lines in found.items()}
    fixed = {rate: fmean(own) for (rate, method), own in losses.items() if method == FIXED}
    best, rows = min(fixed, key=fixed.__getitem__), []
    for rate in sorted(fixed):
        rows.append([f"{rate:g}" + " (best)" * (rate == best), ranged(losses[rate, FIXED])])
        if (rate, PROBE) not in found:
            rows[-1] += [""] * 4
            continue
        gained = fixed[rate] - fmean(losses[rate, PROBE])
        gap = fixed[rate] - fixed[best]
        recovered = f"{100 * gained / gap:.0f} %" if gap > 0.02 else "-"
        ends = [rate * [1.0, *line["corrections"]][-1] for line in found[rate, PROBE]]
        went = f"{min(ends):.2g} ... {max(ends):.2g}"
        rows[-1] += [ranged(losses[rate, PROBE]), f"{-gained:+.3f}", recovered, went]
    heads = ["start max_lr", "fixed OneCycle", PROBE, f"{PROBE} - fixed", "gap recovered",
             "peak rate at the end"]  # fmt: skip
    return markdown(heads, rows)


def ranged(values: Sequence[float]) -> str:
    ends = f" ({min(values):.3f} ... {max(values):.3f})" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{ends}"


EXPERIMENT = Experiment(
    "quality", __doc__, run,
    (
        Column("rate", (3e-4, BETWEEN, 1e-2, 1.7e-2, 3e-2, 0.1), [3e-4, 1e-2]),
        Column("method", (FIXED, PROBE), [FIXED, PROBE]),
    ),
    table,
    seeds=3,
    jobs=1,
    plan=plan,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
