"""The engine without training: the real `Engine` and `ProbeRule` on a noisy quadratic. Pure Python, a second.

The loss is sum_i h_i x_i^2 / 2 with curvatures h_i = 1/i; gradients carry noise, so the best rate is a compromise between
speed along the flat directions and noise along the steep ones, as in a network. Replicas share one gradient (Eq. 2).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator

from hdet.controllers.probe_rule import PROBE, ProbeRule
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec

DIRECTIONS, NOISE, INTERVAL, CHUNKS = 30, 0.3, 25, 8
CURVATURES = [1 / (i + 1) for i in range(DIRECTIONS)]

Vector = list[float]


def run(options: argparse.Namespace) -> int:
    for line in _lines(options.start, options.cycles, options.replicas, options.spread, options.seed):
        print(line)
    return 0


def _lines(start: float, cycles: int, replicas: int, spread: float, seed: int) -> Iterator[str]:
    """They show the base rate's way from ``start`` times the best fixed peak rate. Raises ValueError for an argument out of its range."""
    if not 1e-6 <= start <= 1e6:  # also refuses NaN
        raise ValueError(f"start is {start!r}: it must be a factor from 1e-6 to 1e6, e.g. 0.03 for a rate 30 times too low")
    for name, value, least in (("cycles", cycles, 2), ("replicas", replicas, 2)):
        if value < least:
            raise ValueError(f"{name} is {value!r}: it must be at least {least}")
    if not 0 < spread < 1:
        raise ValueError(f"spread is {spread!r}: it must lie between 0 and 1, e.g. 0.3")
    steps = cycles * INTERVAL
    grid = [2 ** (k / 2) for k in range(-12, 3)]
    losses = {peak: _Run(peak, steps, 1, 0.0, seed).finish() for peak in grid}
    best = min(grid, key=lambda peak: losses[peak])
    peak = best * start
    yield f"noisy quadratic, {DIRECTIONS} directions, {steps} steps; best fixed peak rate {best:.3g}, start {peak:.3g}; {replicas} replicas, spread {spread:g}"
    yield f"{'cycle':>6} {'peak rate':>10} {'slope ± error':>22} {'t':>9}   {'start':<10}(| is the best fixed peak)"
    run = _Run(peak, steps, replicas, spread, seed)
    for cycle in range(cycles):
        run.cycle()
        if cycle % max(1, cycles // 12) == 0 or cycle == cycles - 1:
            decision = run.last
            now = peak * run.engine.corrections[0]
            measured = "-" if decision.slope is None or decision.error is None else f"{decision.slope:+.3g} ± {decision.error:.2g}"
            yield f"{cycle + 1:6d} {now:10.3g} {measured:>22} {'-' if decision.t is None else f'{decision.t:+.3g}':>9}   {_ruler(now / best, start)}"
    fixed = _Run(peak, steps, 1, 0.0, seed).finish()
    yield f"loss at the end: fixed start {fixed:.4f}, best fixed {losses[best]:.4f}, with the controller {run.loss():.4f}"


def _ruler(factor: float, start: float) -> str:
    """A mark on a logarithmic ruler from a third of the lower of start and best to ten times the higher."""
    low, high = min(start, 1.0) / 3, max(start, 1.0) * 10
    width = 44

    def place(value: float) -> int:
        return round((width - 1) * min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0))

    cells = ["."] * width
    cells[place(1.0)] = "|"
    cells[place(factor)] = "o"
    return "".join(cells)


class _Run:
    """N replicas on the quadratic, driven by the engine."""

    def __init__(self, peak: float, steps: int, replicas: int, spread: float, seed: int) -> None:
        self.peak, self.steps = peak, steps
        controller = ProbeRule() if replicas > 1 else None
        self.engine = Engine([KnobSpec("lr", spread)], replicas, Clock(INTERVAL, total_steps=steps), controller, seed)
        self.random = random.Random(seed)
        self.points: list[Vector] = [[1.0] * DIRECTIONS for _ in range(replicas)]

    def scheduled(self, step: int) -> float:
        """A tenth of the run up, then a cosine down to nothing."""
        rise = 0.1 * self.steps
        return self.peak * (step / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / (self.steps - rise))))

    def cycle(self) -> None:
        count = self.engine.replicas
        multipliers = self.engine.multipliers()[0]
        sums = [[0.0] * DIRECTIONS for _ in range(count)]
        for _ in range(INTERVAL):
            rate = self.engine.value(0, self.scheduled(self.engine.step + 1))
            noise = [self.random.gauss(0, NOISE) for _ in CURVATURES]
            gradient = [h * (sum(x[i] for x in self.points) / count + n) for i, (h, n) in enumerate(zip(CURVATURES, noise, strict=True))]
            for point, total, rho in zip(self.points, sums, multipliers, strict=True):
                for i, g in enumerate(gradient):
                    point[i] -= rate * rho * g  # Eq. 2
                    total[i] += point[i]
            self.engine.tick()
        probes = self._probe([[x / INTERVAL for x in total] for total in sums])
        mean = [sum(column) / count for column in zip(*self.points, strict=True)]
        self.points = [list(mean) for _ in range(count)]  # Eq. 3
        outcome = self.engine.close([_loss(mean)] * count, {PROBE: probes}, scheduled=[self.scheduled(self.engine.step)], peak=[self.peak])
        self.last = outcome.decisions[0]

    def _probe(self, averages: list[Vector]) -> list[list[float]]:
        """[replica][chunk]: a mini-batch moves the optimum a little, for all replicas alike."""
        shifts = [[self.random.gauss(0, NOISE / 2) for _ in CURVATURES] for _ in range(CHUNKS)]
        return [[_loss([x - s for x, s in zip(point, shift, strict=True)]) for shift in shifts] for point in averages]

    def loss(self) -> float:
        return _loss(self.points[0])

    def finish(self) -> float:
        while self.engine.step < self.steps:
            self.cycle()
        return self.loss()


def _loss(point: Vector) -> float:
    loss = 0.5 * sum(h * x * x for h, x in zip(CURVATURES, point, strict=True))
    return loss if math.isfinite(loss) else math.inf
