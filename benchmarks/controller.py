"""The controller's own cost at the end of a cycle, on every rank: plain Python, no model, no
processes.

    python -m benchmarks.controller [--replicas 1024] [--repeats 30] [--json FILE]

In a cycle the rows of all replicas, as the all_reduce leaves them, become losses and probe scores;
then it is decided who has diverged, what becomes of each knob, and the next multipliers. Memory is
the rows' array and what is kept between two cycles, counted by tracemalloc.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tracemalloc
from collections.abc import Sequence
from typing import Any

import torch

from hdet.controllers.batch_losses import BatchLosses
from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.divergence import Divergence, judge
from hdet.core.engine import Engine
from hdet.core.value import Value
from hdet.run.cycle_stats import CycleStats, parse

from .harness import alternate, emit
from .tables import table

CHUNKS = 8
GOAL_MS, GOAL_BYTES = 5.0, 100e3
CONTROLLERS: dict[str, type[Controller]] = {"probe": ProbeRule, "softmax": SoftmaxController}


class Cycle:
    """The way of one cycle through the `Ensemble`, between the all_reduce and the next step.

    The schedule stays at its peak, where every vote counts."""

    def __init__(self, controller: str, replicas: int, knobs: int) -> None:
        specs = [Value(f"lr/{k}", 0.3) for k in range(knobs)]
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
        engine.close(stats.losses, rows)
        engine.multipliers()

    def __call__(self) -> None:
        self.control(*self.take_stats())


def milliseconds(cycle: Cycle, repeats: int) -> float:
    """Of a cycle, the median."""
    times = alternate({"it": cycle}, repeats, warmup=3)["it"]
    return 1e3 * statistics.median(times)


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", help="append the results to this file, as JSON lines")
    options = parser.parse_args(arguments)
    rows = []
    for controller in CONTROLLERS:
        for knobs in (1, 4):
            cycle = Cycle(controller, options.replicas, knobs)
            rows_bytes, kept = cycle.rows.nbytes, kept_bytes(controller, options.replicas, knobs)
            record = {
                "benchmark": "controller",
                "controller": controller,
                "replicas": options.replicas,
                "knobs": knobs,
                "sum_ms": milliseconds(cycle, options.repeats),
                "statistics_bytes": rows_bytes,
                "kept_bytes": kept,
                "sum_bytes": rows_bytes + kept,
            }
            emit(record, options.json)
            ms, size = record["sum_ms"], record["sum_bytes"]
            time = f"{ms:.1f} ms" + (", **missed**" if ms > GOAL_MS else "")
            memory = f"{size / 1e3:.0f} kB" + (", **missed**" if size > GOAL_BYTES else "")
            rows.append([f"{controller}, {knobs} knob{'s' * (knobs > 1)}", time, memory])
    heads = ["", f"time, goal {GOAL_MS:g} ms", f"memory, goal {GOAL_BYTES / 1e3:g} kB"]
    print(table(heads, rows), end="")


if __name__ == "__main__":
    main()
