"""A problem with a known answer, on which every controller is run through the real engine.

Pure Python, milliseconds a run.

The loss is a function of the rate alone, so nothing is greedy, and the best rate is 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hdet.controllers.probe_rule import PROBE
from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import CycleOutcome, Engine, KnobSpec
from hdet.core.evidence import Evidence
from hdet.core.plan import Decision

CHUNKS = 8


def decide(controller: Controller, evidence: Evidence) -> list[Decision]:
    """What it makes of a cycle, by knob."""
    return controller.learn(evidence)


def evidence(**given: Any) -> Evidence:
    """Of one knob with four replicas, or what is given; rates at their peak.

    ``probes``: rows of losses.
    """
    rows = {PROBE: given.pop("probes", None)}
    knobs = given.get("knobs", ["lr"])
    return Evidence(
        **{
            "cycle": 0,
            "step": 1,
            "total_steps": 100,
            "warmup_steps": 0,
            "sync_interval": 1,
            "knobs": knobs,
            "multipliers": [[0.7, 0.9, 1.1, 1.3]] * len(knobs),
            "losses": [1.0] * 4,
            "measured": {k: row for k, row in rows.items() if row is not None},
            "floor": [0.1] * len(knobs),
            **{key: [1.0] * len(knobs) for key in ("scheduled", "peak", "values", "corrections")},
            **given,
        }
    )


def bowl(
    controller: Any,
    starts: Sequence[float] = (1.0,),
    *,
    cycles: int = 60,
    replicas: int = 4,
    spread: float = 0.3,
    depth: float = 1.0,
    noise: float = 0.05,
    shared: float = 0.0,
    seed: int = 0,
    phase: Callable[[float], float] = lambda part: 1.0,
    spoil: Callable[[int, list[float | None]], list[float | None]] = lambda cycle, losses: losses,
    tail: Callable[[random.Random], float] = lambda r: 0.0,
) -> Iterator[tuple[Engine, CycleOutcome, list[float]]]:
    """Cycles of loss = ``depth`` * sum over knobs of ln(value)^2: yields the engine, the outcome
    and the values at peak, after each cycle.

    ``noise``: of each replica's loss; ``shared``: of the slope, common to all replicas, as from
    gradients they share; ``phase``: schedule over its peak, at each part of the run; ``spoil``:
    what becomes of the training losses; ``tail``: more noise of a replica's loss.
    """
    draw = random.Random(seed)
    engine = Engine(
        [KnobSpec(f"k{i}", spread) for i in range(len(starts))],
        replicas,
        Clock(1, 0, cycles),
        controller,
        seed,
    )
    for cycle in range(cycles):
        engine.tick()
        level, wrong = draw.gauss(0, 1), draw.gauss(0, shared)
        rows, shifts = engine.multipliers(), [draw.gauss(0, 0.3) for _ in range(CHUNKS)]
        at_peak = [start * c for start, c in zip(starts, engine.corrections, strict=True)]
        points = [
            [math.log(value * row[r]) for value, row in zip(at_peak, rows, strict=True)]
            for r in range(replicas)
        ]
        losses: list[float | None] = [
            level
            + depth * sum(x * x for x in point)
            + wrong * sum(math.log(row[r]) for row in rows)
            + draw.gauss(0, noise)
            + tail(draw)
            for r, point in enumerate(points)
        ]
        probes = [
            [depth * sum((x - shift) ** 2 for x in point) for shift in shifts] for point in points
        ]
        now = phase((cycle + 1) / cycles)
        outcome = engine.close(
            spoil(cycle, losses),
            {PROBE: probes},
            scheduled=[s * now for s in starts],
            peak=list(starts),
        )
        yield (
            engine,
            outcome,
            [start * c for start, c in zip(starts, engine.corrections, strict=True)],
        )


def end_of(run: Iterator[tuple[Engine, CycleOutcome, list[float]]]) -> list[float]:
    """The last values."""
    *_, (_, _, values) = run
    return values
