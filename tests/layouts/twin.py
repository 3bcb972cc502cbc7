"""What the golden trajectories should be, in float64 and from the equations alone (tests/reference): no process, no layout, no hdet.

The gradients and losses are fixed numbers of (step, replica). Under shared gradients every layout of the same replicas then has the same
trajectory, whatever ranks its parameters lie on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from tests.reference import method, simulator, toy
from tests.reference.method import Vector
from tests.reference.schedule import AdamW, one_cycle
from tests.reference.simulator import Settings

SIZE = 12
ORDERS = [[0, 1], [1, 0], [1, 0], [0, 1]]
"""Eq. 8 leaves the order open: any will do, and the same is given to hdet."""

COMMON = Settings(
    replicas=2, interval=4, steps=14, peak=0.05, weight_decay=0.1, decay=None, sigma=0.1, step_size=2.0, momentum=0.5, orders=ORDERS
)
SETTINGS = {
    "ddp": replace(COMMON, decay="floor", steps=12),  # K of Eq. 7 is a whole number of intervals; the others end with a short one
    "hsdp": COMMON,
    "tp_pp_dp": replace(COMMON, spread=1 / 9),
    "groups": replace(COMMON, average="softmax", controller=False),
    "local": COMMON,
}


def start() -> Vector:
    return toy.uniforms(3, SIZE)


def gradient(step: int, replica: int) -> Vector:
    return toy.uniforms(5000 + 64 * step + replica, SIZE)


def loss(step: int, replica: int) -> float:
    return 2 + 0.3 * toy.uniforms(9000 + 64 * step + replica, 1)[0]


def trajectory(name: str) -> dict[str, Any]:
    """ "rates": the base value of each step; "cycles": step, multipliers, losses, correction, and the parameters after each average."""
    run = local(SETTINGS[name]) if name == "local" else shared(SETTINGS[name])
    return {
        "rates": run["rates"],
        "cycles": [{key: cycle[key] for key in ("step", "multipliers", "losses", "correction", "after")} for cycle in run["cycles"]],
    }


def shared(settings: Settings) -> dict[str, Any]:
    """The reference's simulator with these gradients in place of its least-squares problem's."""
    problem = {
        "SIZE": SIZE,
        "start": start,
        "batch": lambda step, replica: (step, replica),
        "loss_and_gradient": lambda theta, place: (loss(*place), gradient(*place)),
    }
    with mock.patch.multiple(toy, **problem):
        return simulator.simulate(settings)


def local(settings: Settings) -> dict[str, Any]:
    """Each replica its own gradient and moments; moments averaged with the parameters. The rest is the simulator's."""
    count, interval = settings.replicas, settings.interval
    grid = method.multipliers(count, settings.spread)
    thetas, optimizers = [start() for _ in range(count)], [AdamW(SIZE) for _ in range(count)]
    controls, rates, cycles = simulator.Controls(), [], []
    scheduled = [one_cycle(t, settings.steps, settings.peak) for t in range(settings.steps)]
    for t, rate_now in enumerate(scheduled):
        rho = [grid[place] for place in simulator.order(settings, len(cycles))]
        rate = controls.value(rate_now)
        rates.append(rate)
        for r, optimizer in enumerate(optimizers):
            decayed = [x * (1 - rate * rho[r] * settings.weight_decay) for x in thetas[r]]
            thetas[r] = method.replica_update(decayed, rate, rho[r], optimizer.direction(gradient(t, r)))
        done = t + 1
        if done % interval and done != settings.steps:
            continue
        first = (done - 1) // interval * interval
        losses = [sum(loss(i, r) for i in range(first, done)) / (done - first) for r in range(count)]
        weights = method.uniform_weights(count)
        mean = method.converge(thetas, weights)
        thetas = [list(mean) for _ in range(count)]
        for moment in ("first", "second"):
            average = method.converge([getattr(optimizer, moment) for optimizer in optimizers], weights)
            for optimizer in optimizers:
                setattr(optimizer, moment, list(average))
        if settings.controller and done - interval >= settings.warmup:
            simulator.decide(controls, settings, losses, rho, done, scheduled[min(done, settings.steps - 1)], 0.0)
        cycles.append({"step": done, "multipliers": rho, "losses": losses, "correction": controls.correction, "after": mean})
    return {"rates": rates, "cycles": cycles}
