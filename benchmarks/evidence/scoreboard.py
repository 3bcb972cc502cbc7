"""One default of each method, from its usual rate and from far away: who learns the most?

    python -m benchmarks.evidence.scoreboard [--workloads mlp-clusters ...] [--methods autolr ...]
    python -m benchmarks.evidence.scoreboard --steps 10000 --exponents 0 --seeds 1 --methods ...

No method has a setting for a workload. All begin at 2^exponent times the rate that their framework
or their README has as its default; those of `WITHOUT_START` have none. The tables have what is
missing of (untrained - best) at the end.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.trial.rule import SCORES, STEPS

from ..tables import crossed, gap, grouped, reached
from .experiment import Column, Experiment, Record, Task
from .peers import prodigy
from .peers import schedule_free as free_of_schedule
from .problems import Problem
from .training import SCHEDULES, Build, Parts, Plain, scheduled, train, untrained, with_ensemble
from .workloads import WORKLOADS

CHEAP = ("mlp-clusters", "mlp-word-tags", "mlp-friedman", "poisson-counts")
"""On the first two, of one half by a hash of the names, the average over time was chosen."""
STARTS = (-6, -3, 0, 3, 6)
DEFAULT = 1e-3
"""torch's AdamW"""
FREE, RISE = 2.5e-3, 0.05
"""schedulefree's rate, and the part of a run in which it rises, as those of schedules do."""
CALIBRATED = 2e-3
"""NadamW's: of the fixed rates of AdamW that have been run for 10 000 steps on cnn-digits,
recommender-clicks, gru-bytes and mlp-friedman, the one that is never more than 0.8 % behind the
best; 1e-3 lacks up to 3.1 %, 4e-3 0.8 %, and 8e-3 1.9 %."""
Make = Callable[[Problem, nn.Module, float], Optimizer]
"""(problem, model, multiple of the default rate)"""
Cell = tuple[str, str, int]  # workload, method, exponent of the start


def of_groups(kind: Callable[..., Optimizer], rate: float, **settings: Any) -> Make:
    """An optimizer over the workload's groups."""
    return lambda problem, model, start: kind(problem.groups(model), lr=rate * start, **settings)


def muon(problem: Problem, model: nn.Module, start: float) -> Optimizer:
    """Matrices by Muon, the rest by AdamW, both at the rate of AdamW."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rate = DEFAULT * start
    settings: Any = {"adjust_lr_fn": "match_rms_adamw", "ns_dtype": torch.float32}
    return hdet.FusedMuon(trained, lr=rate, adamw_lr=rate, **settings)


def annealed(make: Make, problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    """Cosine with 5 % warm-up."""
    optimizer = make(problem, model, start)
    return scheduled(problem, model, optimizer, SCHEDULES["cosine"](optimizer, problem.steps))


def greedy(problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    """transformers' GreedyLR, smoothed, told the training loss of each step; as low as a hundredth
    of the start."""
    from transformers.optimization import GreedyLR

    optimizer = torch.optim.AdamW(problem.groups(model), lr=DEFAULT * start)
    scheduler = GreedyLR(optimizer, smooth=True, min_lr=DEFAULT * start / 100)
    backward = Plain(problem, model)
    return Parts(
        optimizer,
        backward,
        lambda batch: scheduler.step(backward.loss),
        rate=lambda: optimizer.param_groups[0]["lr"],
    )


def range_test(problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    """Cosine from the rate that Lightning's lr_find would suggest.

    In 100 steps rates rise from 1e-8 to 1 by equal factors; it is the one at which the smoothed
    loss falls the fastest (Smith 2015, arXiv 1506.01186), with Lightning's defaults: smoothing
    0.98, an end at 4 times the least loss, 10 losses left out at the beginning and one at the end.
    """
    tried = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(problem.groups(tried))
    step, smooth, losses = Plain(problem, tried), 0.0, list[float]()
    rates = np.geomspace(1e-8, 1.0, 100)
    for k, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        smooth = 0.98 * smooth + 0.02 * step(problem.spare(seed, 0, k))
        losses.append(smooth / (1 - 0.98 ** (k + 1)))
        optimizer.step()
        optimizer.zero_grad()
        if not math.isfinite(losses[-1]) or (k > 1 and losses[-1] > 4 * min(losses)):
            break
    kept = torch.tensor([loss for loss in losses[10:-1] if math.isfinite(loss)])
    steepest = rates[10 + int(torch.gradient(kept)[0].argmin())] if len(kept) > 1 else DEFAULT
    adamw = of_groups(torch.optim.AdamW, float(steepest))
    return annealed(adamw, problem, model, 1.0, seed)


def auto(make: Make, problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    """As `annealed`, with an AutoLR around it."""
    optimizer = make(problem, model, start)
    scheduler = SCHEDULES["cosine"](optimizer, problem.steps)
    return with_ensemble(problem, model, optimizer, scheduler, hdet.AutoLR(model), seed)[0]


def auto_schedule_free(problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    optimizer = hdet.FusedScheduleFreeAdamW(
        problem.groups(model), lr=FREE * start, warmup_steps=round(RISE * problem.steps)
    )
    parts, _ = with_ensemble(problem, model, optimizer, None, hdet.AutoLR(model), seed)

    def final() -> nn.Module:
        optimizer.eval()
        return model

    return replace(parts, final=final)


def averaged(steers: bool, problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    """AdamW at a constant rate after 5 % of warm-up; the average over the last tenth of the steps
    is evaluated."""
    decay = 1 - 10 / problem.steps
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=DEFAULT * start, ema=decay)
    scheduler = SCHEDULES["constant"](optimizer, problem.steps)
    search = hdet.AutoLR(model) if steers else None
    parts, _ = with_ensemble(problem, model, optimizer, scheduler, search, seed)

    def final() -> nn.Module:
        with optimizer.averaged():
            return copy.deepcopy(model)

    return replace(parts, final=final)


def best_guess(problem: Problem, model: nn.Module, start: float, seed: int) -> Parts:
    """As `averaged`, at what `find_rate` gives to those who have no rate: with another trial from
    the highest arm where that one is the best."""
    batches = [problem.batch(seed, step) for step in range(STEPS + SCORES)]
    for _ in range(3):
        optimizer = hdet.FusedAdamW(problem.groups(model), lr=DEFAULT * start)
        found = hdet.find_rate(model, optimizer, problem.losses, batches, total_steps=problem.steps)
        *others, top = found.trial.arms
        if min(arm.loss for arm in others) <= top.loss:
            break
        start = top.rate / DEFAULT
    rate = found.best or found.suggestion
    return averaged(False, problem, model, rate / DEFAULT, seed)


nadamw = of_groups(torch.optim.NAdam, CALIBRATED, decoupled_weight_decay=True)
ENTRIES: dict[str, Build] = {
    "nadamw": partial(annealed, nadamw),
    "adamw": partial(annealed, of_groups(torch.optim.AdamW, DEFAULT)),
    "greedy": greedy,
    "lr-find": range_test,
    "schedule-free": lambda problem, model, start, seed: free_of_schedule(
        problem, model, FREE * start, seed, betas=(0.9, 0.999), warmup=RISE
    ),
    "prodigy": lambda problem, model, start, seed: prodigy(problem, model, 1.0, seed),
    "ema": partial(averaged, False),
    "autolr": partial(auto, of_groups(hdet.FusedAdamW, DEFAULT)),
    "autolr-nadamw": partial(auto, nadamw),
    "autolr-muon": partial(auto, muon),
    "autolr-schedule-free": auto_schedule_free,
    "autolr-ema": partial(averaged, True),
    "best-guess-ema": best_guess,
}
WITHOUT_START = ("lr-find", "prodigy")
AT_DEFAULT = ("nadamw", "greedy", "autolr-nadamw", "autolr-muon")
"""Not run from far away, for the time that they take."""


def run(method: str, workload: str, exponent: int, seed: int, steps: int) -> Record:
    return ended(ENTRIES[method], workload, exponent, seed, steps)


def ended(build: Build, workload: str, exponent: int, seed: int, steps: int) -> Record:
    chosen = WORKLOADS[workload]
    outcome = train(chosen.lasting(steps), build, 2.0**exponent, seed)
    return {**outcome, "untrained": untrained(chosen.problem, seed)}


def gaps_of(records: Sequence[Record]) -> dict[Cell, float]:
    """What is missing of the best end on this workload and seed, in percent of what that one
    learns; means over the seeds."""
    found: dict[Cell, list[float]] = {}
    for lot in grouped(records, "workload", "seed").values():
        worst = lot[0]["untrained"]
        best = min(reached(record["validation"], worst) for record in lot)
        for record in lot:
            # if nobody has learned anything, all lack everything
            lack = gap(record["validation"], best, worst) if best < worst else 100
            cell = record["workload"], record["method"], record["exponent"]
            found.setdefault(cell, []).append(lack)
    return {cell: fmean(lacks) for cell, lacks in found.items()}


def by_workload(gaps: dict[Cell, float]) -> str:
    workloads = {workload: workload for workload, _, _ in gaps}
    shown = lambda workload, method: f"{gaps[workload, method, 0]:.1f}"
    return crossed("workload", workloads, _methods(gaps), shown)


def by_start(gaps: dict[Cell, float]) -> str:
    """Means over the workloads; the worst one from the worst start."""
    starts = sorted({exponent for _, _, exponent in gaps})
    columns: dict[str, Any] = {f"2^{exponent}": ([exponent], fmean) for exponent in starts}
    columns |= {"mean": (starts, fmean), "worst": (starts, max)}

    def cell(method: str, column: tuple[list[int], Callable[[list[float]], float]]) -> str:
        among, of = column
        found = [gaps[key] for key in gaps if key[1] == method and key[2] in among]
        return f"{of(found):.1f}" if found else ""

    return crossed("", _methods(gaps), columns, cell)


def _methods(gaps: dict[Cell, float]) -> dict[str, str]:
    ran = {method for _, method, _ in gaps}
    return {method: method for method in ENTRIES if method in ran}


def table(records: Sequence[Record]) -> str:
    """Runs of each length, by start where there are several."""
    lots = map(gaps_of, grouped(records, "steps").values())
    return "\n".join((by_start if any(e for _, _, e in lot) else by_workload)(lot) for lot in lots)


def plan(options: argparse.Namespace) -> Iterator[Task]:
    for task in EXPERIMENT.grid(options):
        if task["exponent"] == 0 or task["method"] not in WITHOUT_START:
            yield task


EXPERIMENT = Experiment(
    "scoreboard", __doc__, run,
    (
        Column("workload", CHEAP, CHEAP[:1], WORKLOADS),
        Column("method", [m for m in ENTRIES if m not in AT_DEFAULT], ["adamw", "autolr"], ENTRIES),
        Column("exponent", STARTS, [0]),
        Column("steps", (1500,), [100], option="steps"),
    ),
    table,
    seeds=3,
    plan=plan,
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
