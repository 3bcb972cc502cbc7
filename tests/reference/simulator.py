"""The whole method on the least-squares toy: fan out, shared-gradient AdamW, converge, softmax
controller. All of it float64.

Timing, as the project reads the paper: the base value follows the schedule until the controller's
first decision, which is the end of the first cycle that lies wholly after S_warm. A decision at the
end of a cycle acts from the next cycle on. With a decay ("floor") the schedule is left
at the first decision, from the value that the schedule has then; without one the correction
multiplies the schedule, and Eq. 5 and 6 run on relative rates (rho instead of eta, 1 instead of the
base), the new correction being the old one times exp(lambda v).
"""

import math
from dataclasses import dataclass, field

from tests.reference import method, toy
from tests.reference.method import Vector


def one_cycle(
    step: int, total: int, peak: float, pct_start: float = 0.3, div: float = 25.0,
    final_div: float = 1e4, shape: str = "cos",
) -> float:  # fmt: skip
    """Rate used by optimizer step number `step` (from 0): up from peak/div to peak, then down to
    peak/(div*final_div) at step total-1."""
    turn, end = pct_start * total - 1, total - 1
    low, floor = peak / div, peak / (div * final_div)
    if step <= turn:
        return _between(low, peak, step / turn, shape)
    return _between(peak, floor, (step - turn) / (end - turn), shape)


def _between(start: float, end: float, share: float, shape: str) -> float:
    if shape == "cos":
        share = (1 - math.cos(math.pi * share)) / 2
    return start + (end - start) * share


class AdamW:
    """Moments and direction of AdamW for one vector; the step itself is Eq. 2. Decay multiplies
    by 1 - (its rate) * weight_decay."""

    def __init__(
        self, size: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.betas, self.eps, self.count = betas, eps, 0
        self.first, self.second = [0.0] * size, [0.0] * size

    def direction(self, gradient: Vector) -> Vector:
        """u(t) = m_hat / (sqrt(v_hat) + eps)."""
        (one, two), self.count = self.betas, self.count + 1
        self.first = [one * m + (1 - one) * g for m, g in zip(self.first, gradient, strict=True)]
        self.second = [
            two * v + (1 - two) * g * g for v, g in zip(self.second, gradient, strict=True)
        ]
        one_hat, two_hat = 1 - one**self.count, 1 - two**self.count
        return [
            (m / one_hat) / (math.sqrt(v / two_hat) + self.eps)
            for m, v in zip(self.first, self.second, strict=True)
        ]


@dataclass
class Settings:
    replicas: int = 4
    spread: float = 0.3
    interval: int = 5  # T
    steps: int = 40  # S
    warmup: int = 0  # S_warm
    peak: float = 0.05
    weight_decay: float = 0.0
    controller: bool = True
    decay: str | None = None  # None or "floor"
    sigma: float = 0.1
    step_size: float = 0.5
    momentum: float = 0.9
    div: float = 25.0
    final_div: float = 1e4
    # [cycle][replica]: position on the grid (Eq. 8); missing: rotate
    orders: list[list[int]] = field(default_factory=list)


@dataclass
class Controls:
    """What the controller has learned, for one knob."""

    correction: float = 1.0
    base: float | None = None
    velocity: float = 0.0
    gamma: float | None = None

    def value(self, scheduled: float) -> float:
        return scheduled * self.correction if self.base is None else self.base


def order(settings: Settings, cycle: int) -> list[int]:
    if cycle < len(settings.orders):
        return settings.orders[cycle]
    return [(replica + cycle) % settings.replicas for replica in range(settings.replicas)]


def decide(
    controls: Controls, settings: Settings, losses: Vector, rho: Vector, done: int,
    scheduled: float, floor: float,
) -> None:  # fmt: skip
    """One decision at the end of a cycle, after `done` steps; changes `controls`."""
    weights = method.softmax(method.scores(losses, settings.sigma))
    if settings.decay is None:
        delta = method.signal(weights, rho)
        controls.velocity = method.velocity_update(controls.velocity, delta, settings.momentum)
        controls.correction *= math.exp(settings.step_size * controls.velocity)
        return
    if controls.gamma is None:
        controls.base = controls.value(scheduled)
        # K counts this decision and those still to come: S_warm of Eq. 7 is where this cycle began.
        intervals = method.intervals_left(
            settings.steps, done - settings.interval, settings.interval
        )
        controls.gamma = method.gamma_corrected(floor, controls.base, intervals)
    base = controls.base
    assert base is not None
    delta = method.signal(weights, [base * r for r in rho])
    controls.velocity = method.velocity_update(controls.velocity, delta, settings.momentum)
    controls.base = max(
        floor, method.base_update(base, controls.gamma, settings.step_size, controls.velocity)
    )


def simulate(settings: Settings) -> dict[str, list]:
    """Returns "rates" (one per step: the base value in force) and "cycles" (what each converge saw
    and left)."""
    count = settings.replicas
    scheduled = [
        one_cycle(t, settings.steps, settings.peak, div=settings.div, final_div=settings.final_div)
        for t in range(settings.steps)
    ]
    floor = settings.peak / (settings.div * settings.final_div)
    grid = method.multipliers(count, settings.spread)
    thetas = [toy.start() for _ in range(count)]
    optimizer, controls = AdamW(toy.SIZE), Controls()
    rates: Vector = []
    cycles: list[dict] = []
    rho = [grid[place] for place in order(settings, 0)]
    sums = [0.0] * count
    for t in range(settings.steps):
        rate = controls.value(scheduled[t])
        rates.append(rate)
        pairs = [toy.loss_and_gradient(theta, toy.batch(t, r)) for r, theta in enumerate(thetas)]
        sums = [total + loss for total, (loss, _) in zip(sums, pairs, strict=True)]
        shared = method.converge([gradient for _, gradient in pairs], method.uniform_weights(count))
        direction = optimizer.direction(shared)
        for r in range(count):
            decayed = [x * (1 - rate * rho[r] * settings.weight_decay) for x in thetas[r]]
            thetas[r] = method.replica_update(decayed, rate, rho[r], direction)
        done = t + 1
        if done % settings.interval and done != settings.steps:
            continue
        losses = [total / (done % settings.interval or settings.interval) for total in sums]
        mean = method.converge(thetas, method.uniform_weights(count))
        cycles.append(
            {"step": done, "multipliers": rho, "losses": losses, "before": thetas, "after": mean}
        )
        thetas = [list(mean) for _ in range(count)]
        if settings.controller and done - settings.interval >= settings.warmup:
            now = scheduled[min(done, settings.steps - 1)]
            decide(controls, settings, losses, rho, done, now, floor)
        cycles[-1] |= {"correction": controls.correction, "base": controls.base}
        rho = [grid[place] for place in order(settings, len(cycles))]
        sums = [0.0] * count
    return {"rates": rates, "cycles": cycles}


RUNS = {
    "one_replica": Settings(replicas=1, controller=False, weight_decay=0.1),
    "no_spread": Settings(spread=0.0, controller=False),
    "spread_only": Settings(spread=0.3, controller=False),
    "two_replicas_decayed_weights": Settings(
        replicas=2, spread=1 / 9, weight_decay=0.1, controller=False
    ),
    "softmax_multiplies_the_schedule": Settings(
        decay=None, warmup=10, sigma=0.02, step_size=2.0, momentum=0.5
    ),
    "softmax_floor": Settings(decay="floor", warmup=10),
    "last_cycle_is_short": Settings(steps=38, decay=None, sigma=0.05, momentum=0.0),
}
