"""Replicas with local gradients that differ in knobs, and hdet's probe, which decides from their
losses on validation examples: from starts too low and too high, where do values end?

    python -m benchmarks.evidence.votes [--workloads noisy-mlp ...] [--every 16 64]

Starts are powers of 2 times the values that `averages` has found for "local 16". The gap is the
loss beside the best start without a probe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.core.evidence import Evidence
from hdet.core.spread import Grid

from ..tables import grouped
from ..tables import table as markdown
from . import averages
from .experiment import Column, Experiment, Record, finite
from .problems.problem import seeded
from .small import WORKLOADS, tested
from .stack import Method, Stack, shape

STARTS, SEEDS, WORKERS, STEPS = (-4, -2, 0, 2, 4), (0, 1), 8, 2048
CHUNKS, CHUNK, AVERAGE_EVERY, SPREAD = 8, 32, 5, 0.3
SHOWN = (0, 2, 3)
"""Starts in the table."""
TOGETHER = "lr+weight_decay+dropout"
SETS = ("lr", "weight_decay", "dropout", TOGETHER)


class Probe:
    """What a `ProbeController` does, for each run of a stack: losses of common examples at the
    average of a replica's weights over the cycle, and a `ProbeRule`."""

    def __init__(self, stack: Stack) -> None:
        self.knobs = [*stack.method.spread]
        points, seeds, self.n_replicas = stack.shape
        self.rules = [ProbeRule() for _ in range(points * seeds)]
        stack.corrections = {name: torch.ones(len(stack.theta), 1) for name in self.knobs}
        self.n_samples, self.mean = 0, torch.zeros_like(stack.theta)

    def sample(self, stack: Stack, left: int) -> None:
        if left % AVERAGE_EVERY == 0:
            self.n_samples += 1
            self.mean.lerp_(stack.theta, 1 / self.n_samples)

    def _losses(self, stack: Stack) -> Tensor:
        """(runs, replicas, chunks)"""
        x, y = stack.val
        g = seeded("probe", stack.cycle)
        made = []
        for _ in range(CHUNKS):
            chosen = torch.randint(x.shape[1], (CHUNK,), generator=g)
            one, target = stack.fan(x[:, None, chosen]), stack.fan(y[:, None, chosen])
            z = stack.workload.net.forward(stack.workload.net.split(self.mean), one, lambda h: h)
            made.append(stack.workload.losses(z, target))
        return torch.stack(made, 1).view(len(self.rules), self.n_replicas, CHUNKS)

    def decide(self, stack: Stack) -> None:
        per_run = lambda x: x.view(len(self.rules), self.n_replicas).tolist()
        losses = self._losses(stack).tolist()
        multipliers = {name: per_run(stack.multipliers[name]) for name in self.knobs}
        corrections = {name: per_run(stack.corrections[name]) for name in self.knobs}
        base = {name: per_run(stack.base[name]) for name in self.knobs}
        steps = stack.workload.steps
        part = {name: shape(stack.step - 1, steps) if name == "lr" else 1.0 for name in self.knobs}
        for run, rule in enumerate(self.rules):
            peak = [base[name][run][0] for name in self.knobs]
            scheduled = [p * part[name] for p, name in zip(peak, self.knobs, strict=True)]
            known = [corrections[name][run][0] for name in self.knobs]
            rows = [row if all(map(math.isfinite, row)) else None for row in losses[run]]
            rho = [multipliers[name][run] for name in self.knobs]
            decisions = rule.decide(Evidence(
                cycle=stack.cycle, step=stack.step, total_steps=steps, warmup_steps=0,
                sync_interval=stack.method.every, knobs=self.knobs,
                multipliers=rho, planned=rho,
                losses=[row and fmean(row) for row in rows], scheduled=scheduled, peak=peak,
                floor=[0.0] * len(peak), corrections=known, local=True, measured={PROBE: rows},
                values=[a * b for a, b in zip(scheduled, known, strict=True)],
            ))  # fmt: skip
            at = slice(run * self.n_replicas, (run + 1) * self.n_replicas)
            for name, decision in zip(self.knobs, decisions, strict=True):
                stack.corrections[name][at] *= decision.factor
        self.n_samples = 0


def run(workload: str, knobs: str, every: int) -> Record:
    chosen, names = replace(WORKLOADS[workload], steps=STEPS), knobs.split("+")
    [known] = [
        r["point"] for r in averages.EXPERIMENT.read()
        if (r["workload"], r["method"], r["workers"]) == (workload, averages.LOCAL, 4)
    ]  # fmt: skip
    usual = {"weight_decay": averages.DECAYS[chosen.optimizer][2], "dropout": 0.1}
    best = {**known, **{name: known.get(name) or usual[name] for name in usual if name in names}}
    points = [{**best, **{n: best[n] * 2.0**e for n in names}} for e in STARTS]
    alike = Stack(chosen, Method(every=every), WORKERS, points, SEEDS).run()
    spread = {name: Grid(SPREAD) for name in names}
    stack = Stack(chosen, Method(every=every, spread=spread), WORKERS, points, SEEDS)
    voted = stack.run(Probe(stack))
    losses = [tested(workload, w.view(len(points), len(SEEDS), -1))[0] for w in (alike, voted)]
    moved = {name: stack.corrections[name].view(len(points), -1) for name in names}
    mean = lambda x: [finite(round(v, 5)) for v in x.mean(1).tolist()]
    return {
        "starts": [*STARTS], "best": best, "alike": mean(losses[0]), "probe": mean(losses[1]),
        "factors": {name: [round(v, 3) for v in m.log().mean(1).exp().tolist()]
                    for name, m in moved.items()},
    }  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """Means over workloads: gaps without and with the probe, and by how much it has multiplied the
    start's value."""
    rows = []
    for (knobs, every), lot in grouped(records, "knobs", "every").items():
        cells = []
        for i in SHOWN:
            gaps = [fmean(_gap(r, which, i) for r in lot) for which in ("alike", "probe")]
            moves = [math.log(of[i]) for r in lot for of in r["factors"].values()]
            cells.append(f"{gaps[0]:.0f}→{gaps[1]:.0f} ({math.exp(fmean(moves)):.2g})")
        rows.append([knobs, every, *cells])
    starts = [f"from {Fraction(2.0 ** STARTS[i])}" for i in SHOWN]
    return markdown(["knobs", "H", *starts], rows)


def _gap(record: Record, which: str, start: int) -> float:
    """Percent of the best loss without a probe; at most 100, also where the run broke."""
    best = min(loss for loss in record["alike"] if loss is not None)
    loss = record[which][start]
    return 100.0 if loss is None else 100 * min(loss / best - 1, 1.0)


EXPERIMENT = Experiment(
    "votes", __doc__, run,
    (
        Column("workload", ("noisy-mlp", "fine-tuning", "teacher"), ["cancer"], WORKLOADS),
        Column("knobs", SETS, [TOGETHER], SETS, option="knobs"),
        Column("every", (16, 64), [16], option="every"),
    ),
    table,
    jobs=1,
    same=("workload", "knobs", "every"),
    plan=lambda options: [
        {"workload": workload, "knobs": knobs, "every": every}
        for workload, knobs, every in product(options.workloads, options.knobs, options.every)
    ],
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
