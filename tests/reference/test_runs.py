"""Whole runs beside the equations: the losses and multipliers that a run has recorded give its
corrections, and the rate of each of its steps. (Weights and averages of whole runs: tests/layouts.)
"""

import math

import pytest
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.harness import Run, sgd
from tests.reference import method

PEAK, DIV, FINAL, SPREAD, INTERVAL = 0.05, 25.0, 1e4, 0.3, 5


def one_cycle(optimizer, steps):
    own = {"div_factor": DIV, "final_div_factor": FINAL, "cycle_momentum": False}
    return OneCycleLR(optimizer, PEAK, steps, **own)


def trained(steps, warmup, sigma, step_size, momentum, decay, drop_in):
    """The run, the rate of each step, and the base value that is held after each cycle."""
    rule = sigma, step_size, momentum, decay
    controller = None if drop_in else hdet.SoftmaxController(*rule)
    run = Run(
        together=4, total=steps, every=INTERVAL, spread=SPREAD, warmup_steps=warmup,
        controller=controller, scheduler=lambda optimizer: one_cycle(optimizer, steps),
    )  # fmt: skip
    clock = run.ensemble
    if drop_in:
        clock.close()
        run.replicas.attach(run.optimizer)
        clock = hdet.OneCycleAutoLR(
            run.optimizer, PEAK, steps, auto_lr_warmup_steps=warmup, replicas=run.replicas,
            ensemble_lr_spread_ratio=SPREAD, model_sync_interval=INTERVAL, enable_auto_lr=True,
            loss_scale=sigma, lr_of_lr=step_size, momentum_of_lr=momentum,
        )  # fmt: skip
        run.ensemble = clock.ensemble
    rates, held = [], []
    for _ in range(steps):
        rates.append(run.rate)
        run.backward()
        run.optimizer.step()
        clock.step()
        run.index += 1
        held += (
            [run.ensemble._schedule.knobs[0].off_schedule] if run.ensemble.cycle > len(held) else []
        )
    return run, rates, held


def by_hand(records, scheduled, warmup, sigma, step_size, momentum, decay):
    """The rate of each step, and after each cycle the correction and the base value that is held.

    A decision at the end of a cycle acts from the next one on; the first one ends the first cycle
    that lies wholly after the warm-up. With a decay the schedule is left there; without one the
    correction multiplies it, and Eq. 5 and 6 run on relative rates: rho, and 1 for the base.
    """
    correction, base, velocity, gamma = 1.0, None, 0.0, 0.0
    floor, steps, rates, found = PEAK / (DIV * FINAL), len(scheduled), [], []
    for record in records:
        begun, done = len(rates), record["step"]
        rates += [rate * correction if base is None else base for rate in scheduled[begun:done]]
        if begun >= warmup:
            if decay and base is None:  # K counts this decision and those still to come
                base = scheduled[done] * correction
                left = method.intervals_left(steps, begun, INTERVAL)
                gamma = method.gamma_corrected(floor, base, left)
            weights = method.softmax(method.scores(record["losses"], sigma))
            own = [(base or 1.0) * rho for rho in record["multipliers"]["lr"]]
            velocity = method.velocity_update(velocity, method.signal(weights, own), momentum)
            if base is None:
                correction *= math.exp(step_size * velocity)
            else:
                base = max(floor, method.base_update(base, gamma, step_size, velocity))
        found.append((correction, base))
    return rates, found


@pytest.mark.parametrize(
    ("steps", "warmup", "sigma", "step_size", "momentum", "decay", "drop_in"),
    [(40, 10, 0.02, 2.0, 0.5, None, False), (40, 10, 0.1, 0.5, 0.9, "floor", False),
     (38, 0, 0.05, 0.5, 0.0, None, False), (38, 0, 0.05, 0.5, 0.0, None, True)],
)  # fmt: skip
def test_a_run_is_what_the_equations_make_of_its_losses(
    steps, warmup, sigma, step_size, momentum, decay, drop_in
):
    """Also where the last cycle is short."""
    rule = sigma, step_size, momentum, decay
    run, rates, held = trained(steps, warmup, *rule, drop_in)
    plain, scheduled = one_cycle(optimizer := sgd(), steps), []
    for _ in range(steps):
        scheduled.append(optimizer.param_groups[0]["lr"])
        optimizer.step(), plain.step()
    records = run.ensemble.history
    expected, found = by_hand(records, scheduled, warmup, *rule)
    assert rates == pytest.approx(expected, rel=1e-9)
    assert [record["step"] for record in records] == [*range(5, steps, 5), steps]
    grid = pytest.approx(method.multipliers(4, SPREAD), rel=1e-14)
    for record, base, (correction, expected_base) in zip(records, held, found, strict=True):
        assert sorted(record["multipliers"]["lr"]) == grid
        assert record["corrections"]["lr"] == pytest.approx(correction, rel=1e-9)
        assert base == (expected_base and pytest.approx(expected_base, rel=1e-8))
    assert found[-1] != (1.0, None)


def test_where_the_drop_in_differs_from_the_published_class():
    """On purpose: corrections multiply OneCycle, which goes on (published: a decay of its own takes
    its place, with a gamma that is negative for torch's factors), and Eq. 6 moves the base value in
    the logarithm. Without that decay both moves are equal to first order in lambda v / base."""
    sigma, step_size, momentum = 0.02, 0.05, 0.5
    run, rates, _ = trained(40, 0, sigma, step_size, momentum, None, drop_in=True)
    assert method.gamma_printed(DIV, FINAL, method.intervals_left(40, 0, INTERVAL)) < 0
    velocity, correction = 0.0, 1.0
    for record in run.ensemble.history:
        base = rates[record["step"] - 1]
        weights = method.softmax(method.scores(record["losses"], sigma))
        own = [base * rho for rho in record["multipliers"]["lr"]]
        # the published velocity is in the unit of rates, ours in parts of the base value
        relative = method.signal(weights, own) / base
        velocity = method.velocity_update(velocity, relative, momentum)
        published = method.base_update(base, 0.0, step_size, velocity * base) / base
        moved = record["corrections"]["lr"] / correction
        assert moved - published == pytest.approx(0, abs=(step_size * velocity) ** 2)
        assert moved != 1
        correction = record["corrections"]["lr"]
