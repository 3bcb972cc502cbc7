"""AutoLR against the fixed rate of the same start, on every workload.

    python -m benchmarks.evidence.auto [--workloads llama-bytes ...] [--group development|...]
        [--levels trial free] [--lengths 10000] [--starts -4 -2 0 2 4] [--whole | --drawn 80]
        [--jobs 2] [--quick] [--json FILE]

Starts are exponents of 2 times the rate that people would write first. A search is over after 28
or 56 steps, and what follows is a run at a fixed rate. So by default a run ends with its search,
and its final loss is *read off* the curve of fixed rates of the workload
(benchmarks.evidence.fixed_rates), between whose points it is interpolated. ``--whole`` trains to
the end; ``--drawn N`` does that for N pairs of workload and start that a seed draws. On data that
is seen many times the lowest of 60 validation losses is recorded, too, which is the loss of the
best checkpoint; there ``--levels fixed`` trains at the fixed rate.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hdet
from hdet.trial.rule import Trial

from . import command, fixed_rates
from .problems import Batch, Problem
from .runs import Record, Task, identity, read
from .training import Method, Parts, plain, scheduled, train
from .workloads import (
    CHANGING,
    DEVELOPMENT,
    FROM_ZERO,
    MISLEADING,
    NOT_TO_ZERO,
    OPTIMIZERS,
    REPEATED,
    SCHEDULES,
    TEST,
    WORKLOADS,
)  # fmt: skip

RESULTS = "benchmarks/results/evidence/auto.jsonl"
GROUPS = {
    "development": DEVELOPMENT,
    "test": TEST,
    "repeated": REPEATED,
    "not-to-zero": NOT_TO_ZERO,
    "from-zero": FROM_ZERO,
    "changing": CHANGING,
    "misleading": MISLEADING,
}
STARTS = (-4, -2, 0, 2, 4)
VALIDATIONS = 60
SEED_OF_DRAW = 41


class Searched(Exception):
    """The search is over, and nobody wants the rest of the run."""


def controller_of(level: str, model: nn.Module) -> hdet.AutoLR | None:
    """``level``: "trial", "free" or "fixed"."""
    if level == "fixed":
        return None
    return hdet.AutoLR(model, budget=0.0 if level == "free" else None)


def parts_of(
    problem: Problem,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    controller: Any,
    seed: int = 0,
    log: Any = None,
) -> tuple[Parts, hdet.Ensemble]:
    """A training loop with a controller; its closure has the losses of the batch."""
    ensemble = hdet.Ensemble(
        optimizer, scheduler, total_steps=problem.steps, controller=controller, seed=seed, log=log
    )
    backward, last = plain(problem, model), [0.0]

    def step(batch: Batch) -> float:
        last[0] = backward(batch)
        return last[0]

    def after(batch: Batch) -> None:
        ensemble.step(last[0], closure=lambda: problem.losses(model, batch))

    rate = lambda: float(optimizer.param_groups[0]["lr"])
    return Parts(
        optimizer, step, after, rate, heals=True, crashes=(hdet.ReplicasDiverged,)
    ), ensemble


def run(workload: str, exponent: int, seed: int, steps: int, level: str, whole: bool) -> Record:
    """One line of the results."""
    chosen = WORKLOADS[workload]
    rate, best, controllers = chosen.rate * 2.0**exponent, math.inf, list[Any]()

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), rate)
        scheduler = SCHEDULES[chosen.schedule](optimizer, steps)
        controller = controller_of(level, model)
        controllers.append(controller)
        if controller is None:
            return scheduled(problem, model, optimizer, scheduler)
        parts, _ = parts_of(problem, model, optimizer, scheduler, controller, seed)

        def after(batch: Batch) -> None:
            parts.after(batch)
            if controller.done and not whole:
                raise Searched

        return replace(parts, after=after, crashes=(*parts.crashes, Searched))

    def watch(step: int, validate: Any) -> None:
        nonlocal best
        if whole and workload in REPEATED and step and step % (steps // VALIDATIONS) == 0:
            loss = validate()
            best = min(best, loss if math.isfinite(loss) else math.inf)

    problem = replace(chosen.problem, steps=steps)
    outcome = train(problem, Method(chosen.optimizer, build, rate, None), rate, seed, watch)
    controller = controllers[0]
    found = None if controller is None else controller.interval
    if outcome.validation is not None:
        best = min(best, outcome.validation)
    return {
        "benchmark": "auto", "workload": workload, "exponent": exponent, "rate": rate, "seed": seed,
        "steps": steps, "level": level, "whole": whole, "validation": outcome.validation,
        "best": best if math.isfinite(best) else None,
        "untrained": fixed_rates.untrained(workload, seed),
        "factor": 1.0 if found is None else found.suggestion / rate,
        "low": None if found is None else found.low or None,
        "high": found.high if found is not None and math.isfinite(found.high) else None,
        "reason": "" if found is None else found.reason,
        "cost": 0.0 if controller is None else controller.cost,
        "trial": None if found is None or level == "free" else _short(found.to_dict()["trial"]),
        "seconds": outcome.seconds, "torch": torch.__version__,
    }  # fmt: skip


def _short(trial: Any) -> Any:
    """With six digits, for benchmarks.evidence.ablation."""
    if isinstance(trial, dict):
        return {name: _short(value) for name, value in trial.items()}
    if isinstance(trial, (list, tuple)):
        return [_short(value) for value in trial]
    return float(f"{trial:.6g}") if isinstance(trial, float) else trial


def of_length(record: Record, steps: int) -> Record:
    """What the same trial says of a run of another length: its arms would be the same ones."""
    found = Trial.from_dict(record["trial"]).interval(steps)
    high = found.high if math.isfinite(found.high) else None
    return {
        **record,
        "steps": steps,
        "factor": found.suggestion / record["rate"],
        "low": found.low or None,
        "high": high,
        "reason": found.reason,
    }


key = identity("workload", "exponent", "seed", "steps", "level", "whole")


# -- how far a run ends from the best one ----------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Final losses of one workload and length at fixed rates."""

    losses: dict[float, float]
    """By exponent."""
    untrained: float

    @property
    def best(self) -> float:
        return min(self.losses.values())

    def gap(self, loss: float | None) -> float:
        """To the best fixed rate, in percent of what that one learns."""
        reached = fixed_rates.reached(loss, self.untrained)
        return 100 * (reached - self.best) / (self.untrained - self.best)

    def at(self, exponent: float) -> float:
        """The gap at a rate: interpolated, beyond the ends that of the nearest one."""
        known = sorted(self.losses)
        exponent = min(max(exponent, known[0]), known[-1])
        for low, high in pairwise(known):
            if low <= exponent <= high:
                part = (exponent - low) / (high - low)
                loss = (1 - part) * self.losses[low] + part * self.losses[high]
                return self.gap(loss)
        return self.gap(self.losses[known[0]])


def curves(fixed: Sequence[Record]) -> dict[tuple[str, int, int], Curve]:
    """By workload, steps and seed; those of at least four rates."""
    losses: dict[tuple[str, int, int], dict[float, float]] = {}
    untrained: dict[tuple[str, int, int], float] = {}
    for line in fixed:
        cell = (line["workload"], line["steps"], line["seed"])
        loss = fixed_rates.reached(line["validation"], line["untrained"])
        losses.setdefault(cell, {})[line["exponent"]] = loss
        untrained[cell] = line["untrained"]
    return {cell: Curve(row, untrained[cell]) for cell, row in losses.items() if len(row) >= 4}


@dataclass(frozen=True)
class Compared:
    """A run beside the fixed rate of its start."""

    record: Record
    fixed: float
    """The fixed rate's gap to the best run, in percent."""
    read_off: float
    """AutoLR's, read off the fixed rates' curve."""
    real: float | None
    """AutoLR's, of a run to the end; None: there was none."""
    holds: bool
    """Is a rate of the curve within 0.5 % of the best in the interval?"""

    @property
    def auto(self) -> float:
        """The real gap, where there is one."""
        return self.read_off if self.real is None else self.real


NEAR = 0.5
"""Percent of what the best run learns."""


def compared(records: Sequence[Record], fixed: Sequence[Record]) -> list[Compared]:
    """In the order of the workloads."""
    found, known = dict[Any, Compared](), curves(fixed)
    order = list(WORKLOADS)
    for line in sorted(records, key=lambda line: line["whole"]):
        curve = known.get((line["workload"], line["steps"], line["seed"]))
        if curve is None or line["exponent"] not in curve.losses or line["level"] == "fixed":
            continue
        usual = WORKLOADS[line["workload"]].rate
        low = math.log2((line["low"] or 1e-30) / usual)
        high = math.log2((line["high"] or 1e30) / usual)
        near = [e for e, loss in curve.losses.items() if curve.gap(loss) <= NEAR]
        cell = (line["workload"], line["steps"], line["seed"], line["level"], line["exponent"])
        found[cell] = Compared(
            line,
            curve.gap(curve.losses[line["exponent"]]),
            curve.at(line["exponent"] + math.log2(line["factor"])),
            curve.gap(line["validation"]) if line["whole"] else None,
            any(low - 0.01 <= e <= high + 0.01 for e in near),
        )
    return [
        found[cell] for cell in sorted(found, key=lambda cell: (order.index(cell[0]), *cell[1:]))
    ]


def tasks(options: argparse.Namespace) -> list[Task]:
    grid = command.grid(
        seed=range(options.seeds), steps=options.lengths, workload=options.workloads,
        exponent=options.starts, level=options.levels, whole=[options.whole],
    )  # fmt: skip
    if options.drawn:
        drawn = random.Random(SEED_OF_DRAW).sample(grid, min(options.drawn, len(grid)))
        grid = [{**task, "whole": True} for task in drawn]
    return grid


def table(runs: Sequence[Compared]) -> str:
    """A line for each run."""
    lines = [
        "| workload | steps | start | level | fixed | read off | real | factor | reason |",
        "|---" * 9 + "|",
    ]
    for one in runs:
        line = one.record
        real = "" if one.real is None else f"{one.real:.1f} %"
        lines.append(
            f"| {line['workload']} | {line['steps']} | 2^{line['exponent']} | {line['level']} | "
            f"{one.fixed:.1f} % | {one.read_off:.1f} % | {real} | {line['factor']:.3g} | "
            f"{line['reason']} |"
        )
    return "\n".join(lines) + "\n"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser(__doc__, RESULTS, "one workload, 200 steps, two starts", seeds=1)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="in the place of a group")
    parser.add_argument("--group", choices=GROUPS, default="development")
    parser.add_argument(
        "--levels", nargs="+", choices=("trial", "free", "fixed"), default=["trial", "free"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000])
    parser.add_argument("--starts", type=int, nargs="+", default=list(STARTS))
    parser.add_argument("--whole", action="store_true", help="train to the end")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="N whole runs that a seed draws"
    )
    options = command.parsed(
        parser,
        arguments,
        lengths=[1000],
        starts=[-4, 0],
        levels=["free"],
        workloads=list(DEVELOPMENT)[:1],
    )
    options.workloads = options.workloads or list(GROUPS[options.group])
    return options


def drawn() -> set[Any]:
    """Keys of the runs to the end that a seed has drawn."""
    starts = map(str, (-6, *STARTS, 6))
    return {key(task) for task in tasks(options_of(["--drawn", "80", "--starts", *starts]))}


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    records = command.complete(run, tasks(options), key, options)
    print(table(compared(records, read(fixed_rates.RESULTS))), end="")


if __name__ == "__main__":
    main()
