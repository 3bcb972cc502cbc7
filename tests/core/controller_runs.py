"""A problem with a known answer, on which every controller is run through the real engine.

The loss is a function of the rate alone, so nothing is greedy, and the best rate is 1. Pure Python,
milliseconds a run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hdet.controllers.probe_rule import PROBE
from hdet.core.clock import Clock
from hdet.core.engine import CycleOutcome, Engine
from hdet.core.evidence import Evidence
from hdet.core.value import Value

CHUNKS = 8
RHO = [0.7, 0.9, 1.1, 1.3]


def evidence(probes: Any = None, **given: Any) -> Evidence:
    """Of one knob with four replicas, or what is given; rates at their peak."""
    knobs = given.get("knobs", ["lr"])
    usual = {key: [1.0] * len(knobs) for key in ("scheduled", "peak", "values", "corrections")}
    usual |= {"cycle": 0, "step": 1, "total_steps": 100, "warmup_steps": 0, "sync_interval": 1}
    usual |= {"multipliers": [RHO] * len(knobs), "floor": [0.1] * len(knobs), "losses": [1.0] * 4}
    usual |= {"knobs": knobs, "measured": {} if probes is None else {PROBE: probes}}
    usual["planned"] = given.get("multipliers", usual["multipliers"])
    return Evidence(**{**usual, **given})


def value_of(engine: Engine, scheduled: float) -> float:
    """The base value of the first knob, where its schedule stands there."""
    engine.values[0].follow([scheduled])
    return engine.values[0].base_value()


def close(
    engine: Engine, losses: Sequence[float | None], measured: Any = None, *, scheduled: Any = None,
    peak: Any = None, floor: Any = None,
) -> CycleOutcome:  # fmt: skip
    """The end of a cycle at these values of the schedule, by knob; 1 and without a floor."""
    one = [1.0] * len(engine.values)
    scheduled = one if scheduled is None else scheduled
    ranges = zip(peak or scheduled, floor or [0.0] * len(one), strict=True)
    for value, now, (high, low) in zip(engine.values, scheduled, ranges, strict=True):
        value.simulated = [(high, low)]
        value.follow([now])
    return engine.close(losses, measured)


def rows(slope: float) -> list[list[float]]:
    """The probe's, of a loss with this slope that scatters a little."""
    return [[slope * math.log(rho) * (1 + c / 100) for c in range(CHUNKS)] for rho in RHO]


def bowl(
    controller: Any,
    starts: Sequence[float] = (1.0,),
    *,
    cycles: int = 60,
    replicas: int = 4,
    depth: float = 1.0,
    shared: float = 0.0,
    seed: int = 0,
    phase: Callable[[float], float] = lambda part: 1.0,
    spoil: Callable[[int, list[float | None]], list[float | None]] = lambda cycle, losses: losses,
) -> Iterator[tuple[Engine, CycleOutcome, list[float]]]:
    """Cycles of loss = ``depth`` * sum over knobs of ln(value)^2: yields the engine, the outcome
    and the values at peak, after each cycle.

    ``shared``: noise of the slope, common to all replicas, as from gradients they share; ``phase``:
    schedule over its peak, at each part of the run; ``spoil``: what becomes of the training losses.
    """
    draw = random.Random(seed)
    knobs = [Value(f"k{i}", 0.3) for i in range(len(starts))]
    engine = Engine(knobs, replicas, Clock(1, 0, cycles), controller, seed)

    def values() -> list[float]:
        return [start * knob.correction for start, knob in zip(starts, knobs, strict=True)]

    for cycle in range(cycles):
        engine.tick()
        level, wrong = draw.gauss(0, 1), draw.gauss(0, shared)
        table, shifts = engine.multipliers(), [draw.gauss(0, 0.3) for _ in range(CHUNKS)]
        points = [
            [math.log(value * row[r]) for value, row in zip(values(), table, strict=True)]
            for r in range(replicas)
        ]
        losses: list[float | None] = [
            level
            + depth * sum(x * x for x in point)
            + wrong * sum(math.log(row[r]) for row in table)
            + draw.gauss(0, 0.05)
            for r, point in enumerate(points)
        ]
        probes = [
            [depth * sum((x - shift) ** 2 for x in point) for shift in shifts] for point in points
        ]
        scheduled = [start * phase((cycle + 1) / cycles) for start in starts]
        outcome = close(
            engine, spoil(cycle, losses), {PROBE: probes}, scheduled=scheduled, peak=list(starts)
        )
        yield engine, outcome, values()


def end_of(run: Iterator[tuple[Engine, CycleOutcome, list[float]]]) -> list[float]:
    """The last values."""
    *_, (_, _, values) = run
    return values
