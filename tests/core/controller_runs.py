"""Two problems with known answers, on which every controller is run through the real engine. Pure Python, milliseconds a run.

`bowl`: the loss is a function of the rate alone, so nothing is greedy and the best rate is 1. `quadratic`: a descent with noisy
gradients, where what is good at once (a low rate: less noise) and what is good in the end differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hdet.core.clock import Clock
from hdet.core.controller import Controller
from hdet.core.engine import CycleOutcome, Engine, KnobSpec, ask_and_tell
from hdet.core.evidence import Evidence
from hdet.core.plan import Decision, Question
from hdet.core.rules import COSINES, PROBE

CHUNKS = 8


def decide(controller: Controller, evidence: Evidence, answer: Callable[[Question], Any] | None = None) -> list[Decision]:
    """What it makes of a cycle, by knob."""
    return list(ask_and_tell(controller, evidence, answer)[0].decisions)


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
    """Cycles of loss = ``depth`` * sum over knobs of ln(value)^2: yields the engine, the outcome and the values at peak, after each cycle.

    ``noise``: of each replica's loss; ``shared``: of the slope, common to all replicas, as from gradients they share; ``phase``: schedule
    over its peak, at each part of the run; ``spoil``: what becomes of the training losses; ``tail``: more noise of a replica's loss.
    """
    draw = random.Random(seed)
    engine = Engine([KnobSpec(f"k{i}", spread) for i in range(len(starts))], replicas, Clock(1, 0, cycles), controller, seed)
    for cycle in range(cycles):
        engine.tick()
        level, wrong = draw.gauss(0, 1), draw.gauss(0, shared)
        rows, shifts = engine.multipliers(), [draw.gauss(0, 0.3) for _ in range(CHUNKS)]
        at_peak = [start * c for start, c in zip(starts, engine.corrections, strict=True)]
        points = [[math.log(value * row[r]) for value, row in zip(at_peak, rows, strict=True)] for r in range(replicas)]
        losses: list[float | None] = [
            level + depth * sum(x * x for x in point) + wrong * sum(math.log(row[r]) for row in rows) + draw.gauss(0, noise) + tail(draw)
            for r, point in enumerate(points)
        ]
        probes = [[depth * sum((x - shift) ** 2 for x in point) for shift in shifts] for point in points]
        inner = [2 * depth * math.log(value) / (1 + abs(math.log(value))) + draw.gauss(0, 0.2) for value in at_peak for _ in range(CHUNKS)]
        now = phase((cycle + 1) / cycles)
        outcome = engine.close(
            spoil(cycle, losses), {PROBE: probes, COSINES: [inner] * replicas}, scheduled=[s * now for s in starts], peak=list(starts)
        )
        yield engine, outcome, [start * c for start, c in zip(starts, engine.corrections, strict=True)]


def end_of(run: Iterator[tuple[Engine, CycleOutcome, list[float]]]) -> list[float]:
    """The last values."""
    *_, (_, _, values) = run
    return values


def quadratic(
    controller: Any,
    start: float,
    *,
    cycles: int = 40,
    interval: int = 10,
    replicas: int = 4,
    spread: float = 0.3,
    noise: float = 0.3,
    seed: int = 0,
) -> Iterator[tuple[Engine, CycleOutcome, float]]:
    """sum_i h_i x_i^2 / 2 with curvatures h_i from 1 to 1/1000, each direction with the same loss at first and with noise as its root h_i, as
    in networks. Gradients are shared. The rate is ``start`` for half of the run and then falls to 0 in a straight line. Yields the engine,
    the outcome and the loss of the average after each cycle.

    A replica's loss is the mean over the cycle of its own point's; cosines are taken in the cycle's second half.
    """
    draw, curvatures = random.Random(seed), [10 ** (-3 * i / 7) for i in range(8)]
    steps = cycles * interval
    engine = Engine([KnobSpec("lr", spread)], replicas, Clock(interval, 0, steps), controller, seed)
    points = [[h**-0.5 for h in curvatures] for _ in range(replicas)]
    for _ in range(cycles):
        rhos, begin = engine.multipliers()[0], list(points[0])
        sums, cosines, ends = [0.0] * replicas, [], False
        while not ends:
            mean = [sum(column) / replicas for column in zip(*points, strict=True)]
            gradient = [h * x + draw.gauss(0, noise) * h**0.5 for h, x in zip(curvatures, mean, strict=True)]
            if 2 * engine.position >= interval:
                cosines.append(cosine(gradient, [x - b for x, b in zip(mean, begin, strict=True)]))
            scheduled = start * min(1.0, 2 * (1 - engine.step / steps))
            for r, rho in enumerate(rhos):
                points[r] = [x - engine.value(0, scheduled) * rho * g for x, g in zip(points[r], gradient, strict=True)]
                sums[r] += min(0.5 * sum(h * x * x for h, x in zip(curvatures, points[r], strict=True)), 1e30)
            ends = engine.tick()
        points = [[sum(column) / replicas for column in zip(*points, strict=True)]] * replicas
        losses: list[float | None] = [total / interval + draw.gauss(0, 1e-4) for total in sums]
        now = 0.5 * sum(h * x * x for h, x in zip(curvatures, points[0], strict=True))
        yield engine, engine.close(losses, {COSINES: [cosines] * replicas}, scheduled=[scheduled], peak=[start]), now


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    norms = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0
