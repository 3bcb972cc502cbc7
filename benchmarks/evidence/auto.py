"""AutoLR against the same start's fixed rate, each seed by itself: where does it help, and does it ever harm?

    python -m benchmarks.evidence.auto [--workloads llama ...] [--half development|test|high|repeated|judged|harder|zero|misleading] [--lengths 10000] [--starts -4 0 4] [--seeds 1]
                                       [--budget 0.03] [--jobs 2] [--quick] [--json FILE]

Starts are exponents of 2 times the rate that people would write first. The table has, for each start, what is missing of (untrained - best): of
the fixed rate, and of AutoLR from there. Best is the lowest loss of any run of this workload, length and seed, those of
benchmarks.evidence.fixed_rates included, of which this runs what is missing at the same starts. Lines of the test half are written once.

A run whose rate AutoLR has left alone is the fixed run, to the bit (tests/controllers/test_auto.py). So it ends here with the last trial, its line says
"kept", and the table takes the fixed run's loss.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import hdet

from . import command, fixed_rates
from .problems import Batch, Problem
from .runs import Record, Task, identity, read, spaced
from .training import Method, Parts, plain, train
from .workloads import DEVELOPMENT, HARDER, HIGH, JUDGED, MISLEADING, OPTIMIZERS, REPEATED, SCHEDULES, TEST, WORKLOADS, ZERO

RESULTS = "benchmarks/results/evidence/auto.jsonl"


class Kept(Exception):
    """No trial is to come, and none has changed anything."""


HALVES = {
    "development": DEVELOPMENT,
    "test": TEST,
    "high": HIGH,
    "repeated": REPEATED,
    "judged": JUDGED,
    "harder": HARDER,
    "zero": ZERO,
    "misleading": MISLEADING,
}
HARM = 0.5
"""Percent of (untrained - best) by which a run may be worse than the fixed one of its start."""


def auto_lr(problem: Problem, model: nn.Module, budget: float) -> hdet.AutoLR:
    """With the workload's judge, where there is one."""
    chosen = WORKLOADS[problem.name]
    judge = (lambda net, data: problem.losses(net, data).mean(), chosen.judge()) if chosen.judge else None
    return hdet.AutoLR(model, budget=budget, judge=judge)


def beside(
    problem: Problem,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    seed: int,
    controller: hdet.Controller,
    log: Any = None,
) -> tuple[Parts, hdet.Ensemble]:
    """A training loop with any controller; the closure has the losses of the batch."""
    ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=problem.steps, controller=controller, seed=seed, log=log)
    step, last = plain(problem, model), [0.0]

    def backward(batch: Batch) -> float:
        last[0] = step(batch)
        return last[0]

    def after(batch: Batch) -> None:
        ensemble.step(last[0], closure=lambda: problem.losses(model, batch))

    return Parts(
        optimizer, backward, after, rate=lambda: optimizer.param_groups[0]["lr"], heals=True, crashes=(hdet.ReplicasDiverged,)
    ), ensemble


def around(
    problem: Problem, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, seed: int, *, budget: float = 0.03, log: Any = None
) -> tuple[Parts, hdet.AutoLR, hdet.Ensemble]:
    """A training loop with the workload's AutoLR."""
    chosen = auto_lr(problem, model, budget)
    parts, ensemble = beside(problem, model, optimizer, scheduler, seed, chosen, log)
    return parts, chosen, ensemble


def run(workload: str, exponent: int, seed: int, steps: int, budget: float) -> Record:
    """One line of the results."""
    chosen = WORKLOADS[workload]
    rate = chosen.rate * 2.0**exponent
    seen: list[Any] = []

    def build(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
        optimizer = OPTIMIZERS[chosen.optimizer](problem.groups(model), rate)
        records: list[dict[str, Any]] = []
        parts, controller, ensemble = around(
            problem, model, optimizer, SCHEDULES[chosen.schedule](optimizer, steps), seed, budget=budget,
            log=lambda record, step: records.append(record),
        )  # fmt: skip
        seen.extend((controller, ensemble, records))

        def after(batch: Batch) -> None:
            parts.after(batch)
            if kept(controller):
                raise Kept

        return replace(parts, after=after, crashes=(*parts.crashes, Kept))

    outcome = train(replace(chosen.problem, steps=steps), Method(chosen.optimizer, build, rate, None), rate, seed)
    controller, ensemble, records = seen
    return {
        "benchmark": "auto", "workload": workload, "exponent": exponent, "rate": rate, "seed": seed, "steps": steps, "budget": budget,
        "kept": kept(controller), "validation": outcome.validation, "untrained": fixed_rates.untrained(workload, seed), "correction": ensemble.corrections["lr"],
        "spent_percent": 100 * controller.rule.cost / steps, "report": controller.report(),
        "notes": [[record["step"], note] for record in records for note in record["notes"]],
        "seconds": outcome.seconds, "torch": torch.__version__,
    }  # fmt: skip


def kept(controller: hdet.AutoLR) -> bool:
    """From now on the run is the one without it."""
    return controller.idle and all(now == yours for yours, now in controller.rule.peaks)


key = identity("workload", "exponent", "seed", "steps", "budget")


def tasks(options: argparse.Namespace) -> list[Task]:
    """The short ones first."""
    return command.grid(
        seed=range(options.seeds), steps=options.lengths, workload=options.workloads, exponent=options.starts, budget=[options.budget]
    )


def missing(loss: float | None, untrained: float, best: float) -> float:
    """Percent of (untrained - best) that the loss which was `fixed_rates.reached` lacks."""
    return 100 * (fixed_rates.reached(loss, untrained) - best) / (untrained - best)


@dataclass(frozen=True)
class Compared:
    """A run with AutoLR beside the fixed rate of its start. Percent of (untrained - best)."""

    record: Record
    fixed: float
    auto: float
    held: bool | None
    """Is a rate of the grid that is within `HARM` of the best in the interval that AutoLR tells? None: it tells none."""

    @property
    def harm(self) -> float:
        return self.auto - self.fixed


ROUNDED = 1.03
"""What two digits of a report may be off."""


def told(report: str) -> tuple[float, float] | None:
    """The interval of peaks in it, without an end where it says "or less", "or more"; None: there is none."""
    found = re.search(r"best peak ([\d.e+-]+) to ([\d.e+-]+)( or more| or less)?", report)
    if found is None:
        return None
    low, high, beyond = float(found[1]), float(found[2]), found[3]
    return 0.0 if beyond == " or less" else low / ROUNDED, math.inf if beyond == " or more" else high * ROUNDED


def compared(records: Sequence[Record], fixed: Sequence[Record]) -> list[Compared]:
    """By workload, length, seed and start. Best is the lowest loss of any run of a workload, length and seed."""
    cell, order = identity("workload", "steps", "seed"), list(WORKLOADS)
    same = {fixed_rates.key(line): line for line in fixed}
    lines = [{**line, "validation": same[fixed_rates.key(line)]["validation"]} if line.get("kept") else line for line in records]
    every: dict[Any, list[float]] = {}
    for line in (*lines, *fixed):
        if line["validation"] is not None:
            every.setdefault(cell(line), []).append(line["validation"])
    found = []
    for line in sorted(lines, key=lambda line: (order.index(line["workload"]), line["steps"], line["seed"], line["exponent"])):
        best, untrained = min(every[cell(line)]), line["untrained"]
        near = [one["rate"] for one in fixed if cell(one) == cell(line) and missing(one["validation"], untrained, best) <= HARM]
        interval = told(line["report"])
        held = None if interval is None else any(interval[0] <= rate <= interval[1] for rate in near)
        alone = missing(same[fixed_rates.key(line)]["validation"], untrained, best)
        found.append(Compared(line, alone, missing(line["validation"], untrained, best), held))
    return found


def table(runs: Sequence[Compared]) -> str:
    """How many runs are well, and a line for each."""
    return f"{counted({'these': runs})}\n{each(runs)}"


def each(runs: Sequence[Compared]) -> str:
    lines = ["| workload | steps | seed | start | fixed: missing | AutoLR: missing | difference | correction | compute |", "|---" * 9 + "|"]
    for run in runs:
        line = run.record
        lines.append(
            f"| {line['workload']} | {spaced(line['steps'])} | {line['seed']} | 2^{line['exponent']} | {run.fixed:.1f} % | {run.auto:.1f} % | "
            f"{run.harm:+.1f} | {line['correction']:.3g} | {line['spent_percent']:.1f} % |"
        )
    return "\n".join(lines) + "\n"


def counted(kinds: Mapping[str, Sequence[Compared]]) -> str:
    """How many runs of each kind are worse than their start's fixed rate, and how near to the best they end."""
    heads = [
        "runs", "", f"worse by more than {HARM} %", "worst difference", "mean missing: fixed, AutoLR",
        f"within {HARM} % of the best: fixed, AutoLR", "within 2 %: fixed, AutoLR", "interval: told, held",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in kinds.items():
        near = {within: f"{sum(r.fixed <= within for r in runs)}, {sum(r.auto <= within for r in runs)}" for within in (HARM, 2)}
        lines.append(
            f"| {name} | {len(runs)} | {sum(r.harm > HARM for r in runs)} | {max(r.harm for r in runs):+.1f} % | "
            f"{fmean(r.fixed for r in runs):.1f} %, {fmean(r.auto for r in runs):.1f} % | {near[HARM]} | {near[2]} | "
            f"{sum(r.held is not None for r in runs)}, {sum(r.held is True for r in runs)} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, "one workload, 400 steps, two starts", seeds=1)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="in the place of a half")
    parser.add_argument(
        "--half",
        choices=HALVES,
        default="development",
        help="high: schedules that do not fall to zero; repeated: examples that are seen many times, without a judge; judged: others, with a judge; harder: data that changes; zero: warm-ups from 0; misleading: data in blocks, a loss that rises at first",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000])
    parser.add_argument("--starts", type=int, nargs="+", default=[-4, 0, 4])
    parser.add_argument("--budget", type=float, default=0.03)
    options = command.parsed(parser, arguments, workloads=["small"], lengths=[400], starts=[-4, 0], seeds=1, budget=0.3)
    options.workloads = options.workloads or list(HALVES[options.half])
    wanted = list(tasks(options))
    alone = argparse.Namespace(json=None if options.quick else fixed_rates.RESULTS, jobs=options.jobs)
    fixed = command.complete(fixed_rates.run, [{k: task[k] for k in task if k != "budget"} for task in wanted], fixed_rates.key, alone)
    records = command.complete(run, wanted, key, options)
    chosen = {(task["workload"], task["steps"], task["seed"]) for task in wanted}
    fixed = [line for line in read(alone.json) if (line["workload"], line["steps"], line["seed"]) in chosen] or fixed
    print(table(compared(records, fixed)), end="")


if __name__ == "__main__":
    main()
