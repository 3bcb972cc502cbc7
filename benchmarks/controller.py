"""The controller's own cost at the end of a cycle: pure Python on every rank, no tensors, no processes.

    python benchmarks/controller.py [--replicas 1024] [--repeats 30] [--json FILE]

A cycle is what an Ensemble asks of the engine: the multipliers of the cycle, and `close` with the losses of all replicas (and 8 probe
losses each). The goals are 5 ms a cycle and 100 kB a rank at 1 024 replicas. Memory is counted by tracemalloc: what stays between two
cycles, and what a cycle needs beside that for a moment, the Python numbers made of the slots included.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array

from harness import emit

from hdet.core.clock import Clock
from hdet.core.controllers import Controller, ProbeRule, SoftmaxController
from hdet.core.engine import Engine, KnobSpec

CHUNKS = 8
CONTROLLERS: dict[str, type[Controller]] = {"probe": ProbeRule, "softmax": SoftmaxController}


class Cycle:
    """One engine whose schedule stays at its peak, where every vote counts; the slots are an array, as they come from the all_reduce."""

    def __init__(self, controller: str, replicas: int, knobs: int) -> None:
        specs = [KnobSpec(f"lr/{k}", 0.3) for k in range(knobs)]
        self.engine = Engine(specs, replicas, Clock(1, total_steps=10**6), CONTROLLERS[controller]())
        self.width = 4 + CHUNKS if controller == "probe" else 2
        numbers = random.Random(0)
        self.slots = array("d", (2 + numbers.random() / 10 for _ in range(replicas * self.width)))

    def __call__(self) -> None:
        engine, width = self.engine, self.width
        engine.multipliers()
        engine.tick()
        rows = [self.slots[r * width : (r + 1) * width].tolist() for r in range(engine.replicas)]
        losses = [row[0] / row[1] for row in rows]
        one = [1.0] * len(engine.knobs)
        probes = [row[2 : 2 + CHUNKS] for row in rows] if width > 2 else None
        engine.close(losses, probes, scheduled=one, peak=one, floor=[1e-3] * len(engine.knobs))


def measure_time(cycle: Cycle, repeats: int) -> dict[str, float]:
    """Milliseconds of a cycle; the slots' way into Python lists is in it."""
    times = []
    for turn in range(-3, repeats):
        start = time.perf_counter()
        cycle()
        if turn >= 0:
            times.append(1e3 * (time.perf_counter() - start))
    return {"median_ms": statistics.median(times), "best_ms": min(times)}


def measure_memory(controller: str, replicas: int, knobs: int) -> dict[str, float]:
    """Bytes of a fresh engine: kept between cycles, and at the height of one beside that. The slots themselves are reckoned apart."""
    cycle = Cycle(controller, replicas, knobs)
    cycle()  # makes what is made once for all engines
    gc.collect()
    tracemalloc.start()
    try:
        cycle = Cycle(controller, replicas, knobs)
        slots = len(cycle.slots) * cycle.slots.itemsize
        cycle()
        gc.collect()
        tracemalloc.reset_peak()
        kept = tracemalloc.get_traced_memory()[0]
        cycle()
        return {"slots": slots, "kept": kept - slots, "for_a_moment": tracemalloc.get_traced_memory()[1] - kept}
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", help="append the results to this file, as JSON lines")
    options = parser.parse_args()
    print(f"{options.replicas} replicas        a cycle (best)         slots      kept   for a moment")
    for controller in CONTROLLERS:
        for knobs in (1, 4):
            times = measure_time(Cycle(controller, options.replicas, knobs), options.repeats)
            memory = measure_memory(controller, options.replicas, knobs)
            print(
                f"  {controller:8} {knobs} knob{'s' * (knobs > 1):1} {times['median_ms']:8.2f} ms ({times['best_ms']:.2f} ms)"
                + "".join(f"{memory[name] / 1e3:9.1f} kB" for name in ("slots", "kept", "for_a_moment"))
            )
            record = {"benchmark": "controller", "controller": controller, "replicas": options.replicas, "knobs": knobs}
            emit({**record, **times, **{f"{name}_bytes": value for name, value in memory.items()}}, options.json)


if __name__ == "__main__":
    main()
