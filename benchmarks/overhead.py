"""What hdet itself takes of a run, on one core, in one process.

    python -m benchmarks.overhead [step trial decision] [--repeats 300] [--replicas 1024]
        [--json FILE]

step      what hdet adds to a training step of the main job: observe + step, beside the step itself
          and beside a plain scheduler's step, which a loop without hdet makes in the same place.
          The Ensemble believes in 4 replicas but no collective is made. The end of a cycle is not
          in it: see benchmarks.averages and the table of `hdet report`, which has it as a share of
          the run
trial     where the time of an arm's step goes, beside a plain step of the same run. Each arm is put
          in the place of the run, makes a forward and a backward pass and one optimizer step, a
          kernel call of its own, and is taken out again. One call for the steps of all arms could
          save a part of "optimizer step"
decision  the controller's own cost at the end of a cycle, on every rank: plain Python, no model.
          The rows of all replicas, as the all_reduce leaves them, become losses and probe scores;
          then it is decided who has diverged, what becomes of each knob, and the next multipliers.
          Memory is the rows' array and what is kept between two cycles, counted by tracemalloc
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from examples.bytes.data import load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig, cross_entropy
from hdet.controllers.batch_losses import BatchLosses
from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.divergence import Divergence, judge
from hdet.core.engine import Engine
from hdet.core.value import Value
from hdet.optim.snapshot import Snapshot
from hdet.run.cycle_stats import CycleStats, parse
from hdet.trial.arms import Arms
from hdet.trial.rule import STEPS

from .harness import alternate, emit, parser_of
from .tables import table


class Job:
    """The main job: its model, its optimizer, and its batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.text = GPT(GPTConfig()), load_corpus().train
        groups = self.model.parameter_groups(0.1)
        self.optimizer = hdet.FusedAdamW(groups, lr=3e-4, betas=(0.9, 0.95))

    def losses(self, index: int) -> Callable[[], Tensor]:
        context = self.model.config.context
        x, y = sample_batch(self.text, 8, context, seed=0, stream="bench", index=index)
        return lambda: cross_entropy(self.model(x), y)

    def trained(self, losses: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """The loss, and the seconds of a step."""
        start = time.perf_counter()
        loss = losses()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, time.perf_counter() - start


# -- a step ----------------------------------------------------------------------------------------


class FourReplicas(hdet.Replicas):
    def __init__(self) -> None:
        super().__init__(0, 4, None)


def step(options: argparse.Namespace) -> None:
    job, total = Job(), 10 * options.repeats
    schedule = lambda optimizer: OneCycleLR(optimizer, 3e-4, total, cycle_momentum=False)
    scheduler, sync, knobs = schedule(job.optimizer), hdet.Sync(total), [hdet.LearningRate(0.3)]
    four = FourReplicas()
    ensemble = hdet.Ensemble(job.optimizer, scheduler, knobs=knobs, replicas=four, sync=sync)
    # what a loop without hdet calls in the same place
    plain = schedule(torch.optim.SGD(job.model.parameters(), lr=0.1))
    # In turn: a training step has used the caches for something else, and what comes next pays.
    steps: list[float] = []
    calls: list[list[float]] = [[], []]
    for index in range(options.repeats):
        plain.optimizer.step()
        loss, took = job.trained(job.losses(index))
        steps.append(took)
        turn: list[Callable[[], object]] = [plain.step, lambda loss=loss: ensemble.step(loss)]  # type: ignore[misc]
        start = time.perf_counter()
        turn[index % 2]()
        calls[index % 2].append(time.perf_counter() - start)
        turn[1 - index % 2]()
    scheduler_us, ensemble_us, step_us = (1e6 * median(x[10:]) for x in (*calls, steps))
    own = 100 * (ensemble_us - scheduler_us) / step_us
    print(
        f"training step {step_us:.0f} us; observe + step {ensemble_us:.0f} us, a plain scheduler's "
        f"step {scheduler_us:.0f} us, so hdet's own part is {own:.2f} %"
    )
    us = {"step_us": step_us, "ensemble_us": ensemble_us, "scheduler_us": scheduler_us}
    emit({"benchmark": "engine", **us, "own_percent": own}, options.json)


# -- a trial ---------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Any, str]] = {
    "step of an arm": (Arms, "train"),
    "put in place": (Snapshot, "restore"),
    "forward, backward": (Arms, "_backward"),
    "optimizer step": (hdet.FusedAdamW, "step"),
    "taken out": (Snapshot, "take"),
}


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def trial(options: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {"plain step": [], **{name: [] for name in PARTS}}
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, timed(getattr(owner, method), found[name]))
    job = Job()
    ensemble = hdet.Ensemble(job.optimizer, total_steps=10_000, search=hdet.AutoLR(job.model))
    for index in range(STEPS):
        losses = job.losses(index)
        loss, took = job.trained(losses)
        found["plain step"].append(took)
        ensemble.step(loss, closure=losses)
    ms = {name: 1e3 * median(seconds) for name, seconds in found.items()}
    print(table([*ms], [[f"{x:.2f} ms" for x in ms.values()]]))
    counts = {name: len(seconds) for name, seconds in found.items()}
    print(
        f"{counts['step of an arm']} steps of arms in {STEPS} steps of the run; kernel calls: "
        f"{counts['optimizer step'] - STEPS} beside the run's own"
    )
    emit({"benchmark": "trial", "ms": ms, "counts": counts}, options.json)


# -- a decision ------------------------------------------------------------------------------------

CHUNKS = 8
GOAL_MS, GOAL_BYTES = 5.0, 100e3
CONTROLLERS: dict[str, type[Controller]] = {"probe": ProbeRule, "softmax": SoftmaxController}


class Cycle:
    """The way of one cycle through the `Ensemble`, between the all_reduce and the next step.

    The schedule stays at its peak, where every vote counts."""

    def __init__(self, controller: str, replicas: int, knobs: int) -> None:
        values, clock = [Value(f"lr/{k}", 0.3) for k in range(knobs)], Clock(1, total_steps=10**6)
        for value in values:
            value.simulated = [(1.0, 1e-3)]
        self.engine = Engine(values, replicas, clock, CONTROLLERS[controller]())
        # loss, weight, mark; ranks that saw the probe, its losses, their digest
        width = 3 + 1 + CHUNKS + 1 if controller == "probe" else 3
        generator = torch.Generator().manual_seed(0)
        self.rows = 2 + torch.rand(replicas, width, generator=generator, dtype=torch.float64)
        self.rows[:, -1] = 7.0
        self.losses = (
            BatchLosses(lambda model, batch: batch, [None] * CHUNKS, CHUNKS, torch.nn.Identity())
            if controller == "probe"
            else None
        )
        self.divergence = Divergence()

    def take_stats(self) -> tuple[CycleStats, dict[str, Any]]:
        widths = {} if self.losses is None else {PROBE: self.rows.shape[1] - 3}
        stats = parse(self.rows, marks=1, widths=widths)
        if self.losses is None:
            return stats, {}
        rows = zip(self.losses.split(stats.measured[PROBE]), stats.votes, strict=True)
        return stats, {PROBE: [row if vote else None for row, vote in rows]}

    def __call__(self) -> None:
        engine, (stats, rows) = self.engine, self.take_stats()
        engine.tick()
        verdict = judge(self.divergence, stats.finite, stats.raw_losses, engine.level)
        engine.accept(verdict.level, engine.replicas - len(verdict.healthy))
        engine.close(stats.losses, rows)
        engine.multipliers()


def kept_bytes(controller: str, replicas: int, knobs: int) -> int:
    """By a fresh engine between cycles."""
    Cycle(controller, replicas, knobs)()  # makes what is made once for all engines
    gc.collect()
    tracemalloc.start()
    try:
        cycle = Cycle(controller, replicas, knobs)
        cycle()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def decision(options: argparse.Namespace) -> None:
    rows = []
    for controller in CONTROLLERS:
        for knobs in (1, 4):
            what = controller, options.replicas, knobs
            cycle = Cycle(*what)
            times = alternate({"it": cycle}, max(2, options.repeats // 10), warmup=3)["it"]
            ms, size = 1e3 * median(times), cycle.rows.nbytes
            kept = kept_bytes(*what)
            record = dict(zip(("controller", "replicas", "knobs"), what, strict=True))
            bytes_of = {"statistics_bytes": size, "kept_bytes": kept, "sum_bytes": size + kept}
            emit({"benchmark": "controller", **record, "sum_ms": ms, **bytes_of}, options.json)
            time_cell = f"{ms:.1f} ms" + (", **missed**" if ms > GOAL_MS else "")
            memory = f"{(size + kept) / 1e3:.0f} kB"
            memory += ", **missed**" if size + kept > GOAL_BYTES else ""
            rows.append([f"{controller}, {knobs} knob{'s' * (knobs > 1)}", time_cell, memory])
    heads = ["", f"time, goal {GOAL_MS:g} ms", f"memory, goal {GOAL_BYTES / 1e3:g} kB"]
    print(table(heads, rows), end="")


SECTIONS = {"step": step, "trial": trial, "decision": decision}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="; without, all of them")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=1024)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.sections or SECTIONS:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
