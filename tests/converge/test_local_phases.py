"""Local gradients from some step on (post-local SGD, SWAP), and periods that grow as the rate
falls (QSR)."""

from __future__ import annotations

import math
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as torchs

import hdet
from hdet import checkpoint
from hdet.converge import Outer
from hdet.core.clock import Clock
from hdet.core.engine import Engine
from hdet.core.value import Value

from ..adversary.common import bits, trial
from ..distributed import RankError, run_ranks
from ..harness import Run
from ..trial.common import auto_run, searched

LOCAL = {"gradients": "local", "moments": "keep"}
TOTAL, BEGIN = 24, 9
slow = pytest.mark.slow


# -- from Sync.begin on ----------------------------------------------------------------------------


def run_of(rank: int, **settings: Any) -> Run:
    given = {"total": TOTAL, "every": 5, "begin": BEGIN, **LOCAL, **settings}
    return Run(rank, **given)


def course(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """After each step, and what plain training comes to: data parallel, then alone, averaged where
    cycles end."""
    if "moments" in settings:  # they are kept before, also where something is averaged
        settings["buffers"] = [torch.full((1,), float(rank))]
    run = run_of(rank, spread=0.0, **settings)
    plain = Run(rank, total=TOTAL, every=10**6, spread=0.0)
    plain.ensemble.close()
    found = []
    for step in range(1, TOTAL + 1):
        run.step()
        if step == BEGIN + 1:
            plain.wrapped = plain.net
        plain.backward()
        plain.optimizer.step()
        plain.scheduler.step() if step < TOTAL else None
        plain.index += 1
        own = plain.weights()
        if step > BEGIN and ((step - BEGIN) % run.ensemble.sync.every == 0 or step == TOTAL):
            dist.all_reduce(own)
            nn.utils.vector_to_parameters(own / world, plain.net.parameters())
            if "moments" in settings:
                plain.optimizer.state.clear()
        found.append((run.weights(), plain.weights()))
    ends = [record["step"] for record in run.records]
    run.ensemble.close()
    return found, ends, run.wrapped.require_backward_grad_sync


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [5, 9, 14, 19, 24]),
        ({"moments": "reset"}, [5, 9, 14, 19, 24]),
        ({"begin": BEGIN / TOTAL, "every": TOTAL}, [9, 24]),
    ],
)
def test_data_parallel_then_each_by_itself(settings: dict[str, Any], ends: list[int]) -> None:
    """Bitwise data parallel before; once, at the end, where cycles are as long as the run."""
    ranks = run_ranks(course, 2, settings)
    for found, cycles, is_shared in ranks:
        assert cycles == ends and is_shared
        for step, (own, plain) in enumerate(found, 1):
            assert (
                torch.equal(own, plain) if step <= BEGIN else torch.allclose(own, plain, atol=1e-6)
            )
    (one, *_), (two, *_) = ranks
    equal = [torch.equal(a, b) for (a, _), (b, _) in zip(one, two, strict=True)]
    assert [step for step, same in enumerate(equal, 1) if same] == [
        *range(1, BEGIN + 1), *(end for end in ends if end > BEGIN)
    ]  # fmt: skip


def interrupted(rank: int, world: int, root: str, at: int, settings: dict[str, Any]) -> Any:
    """The weights and moments of a run that goes on after a save, and of one that begins there."""

    def facts(run: Run) -> Any:
        return bits([run.weights(), run.optimizer.state_dict()["state"]]), run.ensemble.state_dict()

    run = run_of(rank, **settings).steps(at)
    checkpoint.save(root, checkpoint.RunState(run.net, run.ensemble))
    straight = facts(run.steps(7))
    run.ensemble.close()
    other = run_of(rank, **settings)
    other.backward()  # after the first one DDP orders its buckets anew
    other.index = checkpoint.load(root, checkpoint.RunState(other.net, other.ensemble))
    return straight, facts(other.steps(7))


@pytest.mark.parametrize("at", [3, 9, 12])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="keep"),
        pytest.param({"moments": "average", "converge": Outer()}, id="outer", marks=slow),
        pytest.param({"moments": "reset", "begin": 9 / 24}, id="reset", marks=slow),
    ],
)
def test_a_run_resumes_bitwise_in_both_phases(
    tmp_path: Path, at: int, settings: dict[str, Any]
) -> None:
    for straight, resumed in run_ranks(interrupted, 2, str(tmp_path), at, settings):
        assert straight == resumed


def gone_on(rank: int, world: int, root: str) -> Any:
    run = run_of(rank)
    run.index = checkpoint.load(root, checkpoint.RunState(run.net, run.ensemble))
    phases = []
    while run.index < TOTAL:
        phases.append(run.wrapped.require_backward_grad_sync if world > 1 else None)
        run.step()
    return phases, run.ensemble.cycle, run.weights()


def saved(rank: int, world: int, root: str, at: int) -> None:
    run = run_of(rank).steps(at)
    checkpoint.save(root, checkpoint.RunState(run.net, run.ensemble))


@pytest.mark.parametrize("at", [3, pytest.param(12, marks=slow)])
def test_another_number_of_replicas_goes_on_where_the_run_was(tmp_path: Path, at: int) -> None:
    run_ranks(saved, 2, str(tmp_path), at)
    for world in (1, 3):
        for phases, cycle, weights in run_ranks(gone_on, world, str(tmp_path)):
            assert cycle == 5 and weights.isfinite().all()
            assert world == 1 or phases == [step < BEGIN for step in range(at, TOTAL)]


def begun_elsewhere(rank: int, world: int, root: str, first: int, second: int, kind: str) -> Any:
    """By step: are gradients shared, the weights, the optimizer's state."""
    run = run_of(rank, begin=first, moments=kind).steps(12)
    checkpoint.save(root, checkpoint.RunState(run.net, run.ensemble))
    run.ensemble.close()
    run = run_of(rank, begin=second, moments=kind)
    run.index, found = checkpoint.load(root, checkpoint.RunState(run.net, run.ensemble)), []
    while run.index < TOTAL:
        shares = run.wrapped.require_backward_grad_sync
        found.append((shares, bits([run.weights(), run.optimizer.state_dict()["state"]])))
        run.step()
        if run.index == 16:  # refused where replicas differ that should not
            checkpoint.save(root, checkpoint.RunState(run.net, run.ensemble))
    return found


@slow
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("keep", 9, 20), ("keep", 9, 11), ("keep", 20, 9), ("average", 9, 20), ("reset", 9, 20)],
)
def test_a_run_that_is_loaded_with_another_begin_shares_all_until_then(
    tmp_path: Path, kind: str, first: int, second: int
) -> None:
    """A cycle that ran over it ends at once."""
    one, two = run_ranks(begun_elsewhere, 2, str(tmp_path), first, second, kind)
    for step, ((shares, own), (_, other)) in enumerate(zip(one, two, strict=True), 12):
        assert shares == (step < second or (step == 12 and second == 11))
        assert not shares or own == other
    assert any(own != other for (_, own), (_, other) in zip(one, two, strict=True))


@trial(100)
@given(*4 * [st.integers(0, 40)], *2 * [st.booleans()])
def test_what_a_state_says_of_a_phase_holds_once_it_is_loaded(
    begin: int, step: int, position: int, least: int, searches: bool, searching: bool
) -> None:
    clock = Clock(least + 1, 0, 100, begin=begin)
    engine = Engine([Value("lr", 0.1)], 2, clock, searches=searches)
    own = {"step": max(step, position), "position": position, "is_searching": searching}
    state = {**engine.state_dict(), **own}
    promised = engine.may_differ_after(state)
    with engine.taken_over(state):
        pass
    assert engine.may_differ == promised


def what_parts(rank: int, world: int, case: str) -> Any:
    """By step, are replicas alike? And what comes of the run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if case == "search":
            run = auto_run(0.03, rank, every=20, begin=30, **LOCAL)
            searched(run)
            found = run.index, run.wrapped.require_backward_grad_sync
            run.steps(20)
            return found, run.wrapped.require_backward_grad_sync, run.ensemble.corrections
        run = run_of(rank, controller="probe" if case == "controller" else None)
        moved = []
        for _ in range(TOTAL):
            run.step()
            moved.append(run.ensemble.multipliers["lr"])
    return moved, [r["probe"] for r in run.records], [str(w.message) for w in caught]


def test_nothing_differs_and_nothing_decides_before_it() -> None:
    for moved, probed, said in run_ranks(what_parts, 2, "controller"):
        assert all(rho == 1 for rho in moved[: BEGIN - 1]) and any(
            rho != 1 for rho in moved[BEGIN:]
        )
        assert probed[:2] == [None, None] and probed[2] is not None
        assert not any("the same on all replicas" in line for line in said)


def test_a_search_puts_it_off() -> None:
    """Its copies train with shared gradients."""
    for (steps, was_shared), is_shared, corrections in run_ranks(what_parts, 2, "search"):
        assert steps > 30 and was_shared and not is_shared and corrections == {"lr": 1.0}


def refused(rank: int, world: int, what: str) -> None:
    run = run_of(rank, ddp=what != "no DDP")
    if what == "all in no_sync":
        with run.wrapped.no_sync():
            run.step()
    if what == "no_sync":
        with run.wrapped.no_sync():
            run.backward()
        run.optimizer.step()
        run.ensemble.step()
    run.step()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no DDP", "wrap the model in it"),
        ("no_sync", r"shared until begin, without no_sync\(\), but"),
        ("all in no_sync", r"step\(\) and ensemble.step\(\) outside of `with model.no_sync"),
    ],
)
def test_gradients_that_nobody_averages_are_refused(what: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, 2, what)


def test_what_cannot_be_is_refused_by_name() -> None:
    for settings, message in (
        ({"gradients": "shared", "moments": None}, "pass gradients='local'"),
        ({"begin": 1.5}, r"begin must be a number in \(0, 1\)"),
        ({"begin": -1}, "begin must be a whole number of steps >= 0"),
        ({"begin": TOTAL}, "would never be local"),
        ({"begin": 0.5, "scheduler": None, "total_steps": None}, "pass total_steps"),
        ({"every": hdet.QuadraticPeriod(4, 0.1), "begin": 0, "scheduler": None,
          "total_steps": None}, "pass total_steps"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run_of(0, **settings)
    for period in ((0, 0.1), (4, 0.0), (4, math.nan)):
        with pytest.raises(ValueError, match="least must|alpha must"):
            hdet.QuadraticPeriod(*period)


# -- periods that grow -----------------------------------------------------------------------------


@trial(100)
@given(st.integers(1, 50), st.floats(1e-6, 10), st.floats(0, 10))
def test_the_rule(least: int, alpha: float, rate: float) -> None:
    steps = hdet.QuadraticPeriod(least, alpha).steps(rate)
    expected = min(alpha / rate if rate else math.inf, 2.0**26) ** 2
    assert steps == max(least, int(expected))


def cosine(warm_up: int, total: int) -> Any:
    def make(optimizer: Any) -> Any:
        if not warm_up:
            return torchs.CosineAnnealingLR(optimizer, total)
        rises = torchs.LinearLR(optimizer, 1e-3, total_iters=warm_up)
        falls = torchs.CosineAnnealingLR(optimizer, total - warm_up)
        return torchs.SequentialLR(optimizer, [rises, falls], [warm_up])

    return make


@pytest.mark.parametrize(("warm_up", "alpha"), [(0, 0.02), (30, 0.02), (30, 0.05)])
def test_cycles_follow_the_rate_that_they_begin_with(warm_up: int, alpha: float) -> None:
    """In a warm-up that of the peak; the last one ends with the run."""
    period = hdet.QuadraticPeriod(4, alpha)
    total, peak = 200, 0.01
    run = Run(lr=peak, total=total, every=period, scheduler=cosine(warm_up, total), **LOCAL)
    rates = [run.rate]
    for _ in range(total):
        run.step()
        rates.append(run.rate)
    first = 0
    for record in run.records:
        steps = period.steps(peak if first < warm_up else rates[first])
        assert record["step"] == min(first + steps, total)
        first = record["step"]
    lengths = [
        b["step"] - a["step"] for a, b in zip(run.records[:-2], run.records[1:-1], strict=True)
    ]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0]


def check_cycles(ends: list[int], rates: list[float], period: hdet.QuadraticPeriod) -> None:
    """None outlasts T of a rate that has held for `least` steps, nor ends before the shortest T."""
    for first, end in pairwise([0, *ends]):
        for step in range(first + period.least - 1, end):
            held = min(rates[step - period.least + 1 : step + 1])
            assert step - first < period.steps(held)
        shortest = min(map(period.steps, rates[first : end + 1]))
        assert end - first >= shortest or end == len(rates) - 1


@trial(100)
@given(st.integers(1, 8), st.lists(st.floats(0, 1), min_size=2, max_size=200))
def test_a_cycle_keeps_the_shortest_period_of_its_rates(least: int, rates: list[float]) -> None:
    period, ends = hdet.QuadraticPeriod(least, 0.5), []
    clock = Clock(least, 0, len(rates) - 1, period)
    engine = Engine([Value("lr", 0)], 2, clock, coming_rate=rates.__getitem__)
    for step in range(1, len(rates)):
        assert engine.steps_left > 0
        if engine.tick():
            engine.close([None, None])
            ends.append(step)
    check_cycles(ends, rates, period)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(torchs.CosineAnnealingWarmRestarts, T_0=50),
        partial(torchs.CosineAnnealingWarmRestarts, T_0=20, T_mult=2),
        partial(torchs.CyclicLR, base_lr=1e-4, max_lr=0.01, cycle_momentum=False, step_size_up=30),
    ],
)
@pytest.mark.parametrize(("least", "alpha"), [(4, 0.02), (7, 0.05)])
def test_cycles_are_short_again_where_the_rate_has_risen(
    schedule: Any, least: int, alpha: float
) -> None:
    period = hdet.QuadraticPeriod(least, alpha)
    run = Run(lr=0.01, total=200, every=period, scheduler=schedule, **LOCAL)
    rates = [run.rate]
    for _ in range(200):
        run.step()
        rates.append(run.rate)
    warm_up = next(step for step, rate in enumerate(rates) if rate > 0.00999)
    ends = [record["step"] for record in run.records]
    check_cycles(ends, [0.01] * warm_up + rates[warm_up:], period)
    assert any(end - first < 50 for first, end in pairwise(ends[-3:]))


def test_a_correction_counts_and_a_rate_that_is_moved_in_mid_cycle() -> None:
    every = hdet.QuadraticPeriod(4, 0.1)
    run = Run(lr=0.01, total=400, every=every, scheduler=cosine(0, 400), **LOCAL)
    run.steps(10).ensemble.set_value("lr", 0.02)  # 100 steps become 25
    assert not run.records and run.steps(15).records[-1]["step"] == 25
    low = auto_run(1e-6, total=1500, every=hdet.QuadraticPeriod(4, 0.005), **LOCAL)
    searched(low).steps(40)  # at 1e-6 the first cycle would never end
    assert low.ensemble.cycle > 1 and low.ensemble.corrections["lr"] > 100


def of_two_rates(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    low, high = list(parameters)[:2], list(parameters)[2:]
    return torch.optim.AdamW([{"params": low, "lr": 1e-4}, {"params": high}], **settings)


@pytest.mark.parametrize(
    ("knobs", "moved"),
    [
        ([hdet.LearningRate(0)], "lr"),
        ([hdet.LearningRate(0, groups=[0])], "lr/0"),
        ([hdet.LearningRate(0, groups=[1])], "lr/1"),
        ([hdet.LearningRate(0, groups=[1], bounds=(0, 0.011))], "lr/1"),
        ([hdet.LearningRate(0, groups="each")], "lr/0"),
        ([hdet.WeightDecay(0)], "weight_decay"),
    ],
)
@pytest.mark.parametrize("factor", [1, 1.1, 250])
def test_the_highest_rate_counts_whoever_explores_it(
    knobs: list[Any], moved: str, factor: float
) -> None:
    """And where it is set to another value."""
    period = hdet.QuadraticPeriod(4, 0.03)
    run = Run(lr=0.01, weight_decay=0.1, total=200, every=period, scheduler=cosine(0, 200),
              optimizer=of_two_rates, **LOCAL, knobs=knobs)  # fmt: skip
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(200):
            if step == 5 and not (knobs[0].bounds and factor > 1.1):
                run.ensemble.set_value(moved, factor * run.ensemble.value(moved))
            rates.append(max(group["lr"] for group in run.optimizer.param_groups))
            run.step()
    ends = [record["step"] for record in run.records]
    assert ends[0] == (8 if rates[5] > rates[0] else 9)
    for first, end in pairwise(ends):
        assert end == min(first + period.steps(rates[first]), 200)


def restarts(optimizer: Any) -> Any:
    return torchs.CosineAnnealingWarmRestarts(optimizer, 45)


@pytest.mark.parametrize("at", [10, 44, 57, 150])
@pytest.mark.parametrize("scheduler", [cosine(20, 200), restarts])
def test_a_run_resumes_bitwise_in_a_period_that_grows(
    tmp_path: Path, at: int, scheduler: Any
) -> None:
    """Loaded into one that is elsewhere; the running cycle keeps its length."""
    make = partial(
        Run, lr=0.01, total=200, every=hdet.QuadraticPeriod(4, 0.03), scheduler=scheduler,
        converge=Outer(), **LOCAL,
    )  # fmt: skip
    run, other = make().steps(at), make().steps(3)
    checkpoint.save(tmp_path, checkpoint.RunState(run.net, run.ensemble))
    other.index = checkpoint.load(tmp_path, checkpoint.RunState(other.net, other.ensemble))
    assert torch.equal(run.steps(40).weights(), other.steps(40).weights())
    assert run.ensemble.state_dict() == other.ensemble.state_dict()


def on_ranks(rank: int, world: int, scheduler: Any) -> Any:
    run = Run(rank, lr=0.01, total=100, every=hdet.QuadraticPeriod(4, 0.03), ddp=False,
              scheduler=scheduler, **LOCAL)  # fmt: skip
    equal = []
    for _ in range(100):
        run.step()
        equal.append(run.ensemble.in_sync)
    return run.weights(), [r["step"] for r in run.records], equal


def test_replicas_average_where_cycles_end() -> None:
    (one, ends, equal), (two, others, _) = run_ranks(on_ranks, 2, restarts)
    assert torch.equal(one, two) and ends == others
    assert [step for step, same in enumerate(equal, 1) if same] == ends


def test_without_a_schedule_it_stays_at_the_least_and_says_so() -> None:
    run = Run(every=hdet.QuadraticPeriod(4, 1.0), scheduler=None, **LOCAL)
    with pytest.warns(UserWarning, match="T stays at 4: give the scheduler"):
        run.steps(8)
    assert run.ensemble.cycle == 2


def test_the_engine_keeps_the_state_of_a_cycle_that_grows() -> None:
    rates = [0.01]
    clock = Clock(4, 0, 1000, hdet.QuadraticPeriod(4, 0.1))
    engine = Engine([Value("lr", 0.1)], 2, clock, coming_rate=lambda step: rates[-1])
    assert engine.interval == engine.steps_left == 100
    state = engine.state_dict()
    rates.append(0.001)
    with engine.taken_over(state):
        pass
    assert engine.interval == 100
