"""The controller's own cost at the end of a cycle, on every rank: plain Python, no model, no
processes.

    python -m benchmarks.controller [--replicas 1024] [--repeats 30] [--json FILE]

*controller*: who has diverged, the decisions on all knobs, the next cycle's multipliers. *stats*:
the rows of all replicas, as the all_reduce leaves them, become losses and probe scores. The goals,
5 ms a cycle and 100 kB a rank at 1 024 replicas, are those of the sums: of both times, and of the
stats' array with what is kept between two cycles. What a cycle needs beside that for a moment, as
Python numbers made of the stats, is shown apart. Memory is counted by tracemalloc.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from typing import Any

import torch

from hdet.controllers.batch_losses import BatchLosses
from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.divergence import Divergence, judge
from hdet.core.engine import Engine, KnobSpec
from hdet.run.cycle_stats import CycleStats, parse

from .harness import emit

CHUNKS = 8
GOAL_MS, GOAL_BYTES = 5.0, 100e3
CONTROLLERS: dict[str, type[Controller]] = {"probe": ProbeRule, "softmax": SoftmaxController}


class Cycle:
    """The way of one cycle through the `Ensemble`, between the all_reduce and the next step.

    The schedule stays at its peak, where every vote counts."""

    def __init__(self, controller: str, replicas: int, knobs: int) -> None:
        specs = [KnobSpec(f"lr/{k}", 0.3) for k in range(knobs)]
        self.engine = Engine(
            specs, replicas, Clock(1, total_steps=10**6), CONTROLLERS[controller]()
        )
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

    def control(self, stats: CycleStats, rows: dict[str, Any]) -> None:
        engine = self.engine
        engine.tick()
        verdict = judge(self.divergence, stats.finite, stats.raw_losses, engine.level)
        engine.accept(verdict.level, engine.replicas - len(verdict.healthy))
        one = [1.0] * len(engine.knobs)
        engine.close(stats.losses, rows, scheduled=one, floor=[1e-3] * len(engine.knobs))
        engine.multipliers()

    def __call__(self) -> None:
        self.control(*self.take_stats())


def measure_time(cycle: Cycle, repeats: int) -> dict[str, float]:
    """Milliseconds of a cycle, medians and the best."""
    stats, controller = [], []
    for turn in range(-3, repeats):
        start = time.perf_counter()
        evidence = cycle.take_stats()
        between = time.perf_counter()
        cycle.control(*evidence)
        if turn >= 0:
            stats.append(1e3 * (between - start))
            controller.append(1e3 * (time.perf_counter() - between))
    times = {
        "controller": controller,
        "statistics": stats,
        "sum": [a + b for a, b in zip(controller, stats, strict=True)],
    }
    return {
        f"{name}{which}_ms": take(values)
        for name, values in times.items()
        for which, take in (("", statistics.median), ("_best", min))
    }


def measure_memory(controller: str, replicas: int, knobs: int) -> dict[str, float]:
    """Bytes: of the stats' array, kept by a fresh engine between cycles, and in Python objects at
    the height of one beside that."""
    cycle = Cycle(controller, replicas, knobs)
    cycle()  # makes what is made once for all engines
    gc.collect()
    tracemalloc.start()
    try:
        cycle = Cycle(controller, replicas, knobs)
        cycle()
        gc.collect()
        tracemalloc.reset_peak()
        kept = tracemalloc.get_traced_memory()[0]
        cycle()
        stats, moment = cycle.rows.nbytes, tracemalloc.get_traced_memory()[1] - kept
        return {"statistics": stats, "kept": kept, "sum": stats + kept, "for_a_moment": moment}
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", help="append the results to this file, as JSON lines")
    options = parser.parse_args()
    print(
        f"{options.replicas} replicas    controller (best)        stats (best)      their sum "
        "(best)   stats' array       kept        sum   for a moment"
    )
    for controller in CONTROLLERS:
        for knobs in (1, 4):
            times = measure_time(Cycle(controller, options.replicas, knobs), options.repeats)
            memory = measure_memory(controller, options.replicas, knobs)
            missed = {
                f"{GOAL_MS:g} ms": times["sum_ms"] > GOAL_MS,
                f"{GOAL_BYTES / 1e3:g} kB": memory["sum"] > GOAL_BYTES,
            }
            print(
                f"  {controller:8} {knobs} knob{'s' * (knobs > 1):1}"
                + "".join(
                    f"{times[f'{name}_ms']:7.2f} ms ({times[f'{name}_best_ms']:5.2f} ms)"
                    for name in ("controller", "statistics", "sum")
                )
                + "".join(
                    f"{memory[name] / 1e3:10.1f} kB"
                    for name in ("statistics", "kept", "sum", "for_a_moment")
                )
                + "".join(f"   {what}: missed" for what, bad in missed.items() if bad)
            )
            record = {
                "benchmark": "controller",
                "controller": controller,
                "replicas": options.replicas,
                "knobs": knobs,
            }
            emit(
                {**record, **times, **{f"{name}_bytes": value for name, value in memory.items()}},
                options.json,
            )


if __name__ == "__main__":
    main()
