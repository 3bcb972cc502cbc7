"""The line's sweep, and then another controller: who decides when, replicas that part only then, co-resident ones, resume, refusals."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet import checkpoint
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from tests.distributed import run_ranks
from tests.harness import Run, losses_of, model, taught

from .test_line import line_run, plain_validation

TOTAL, FOUND = 400, 0.03
"""The best peaks are 0.01 to 0.1 (test_line)."""


class Listener(hdet.Controller):
    """Writes down when it was asked, and doubles the rate once, at its third cycle."""

    name = "listener"
    needs_replicas = False
    state_keys = ("steps",)

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        self.steps.append(float(evidence.step))
        return [hdet.Decision(factor=2.0 if len(self.steps) == 3 else 1.0) for _ in evidence.knobs]


def followed(net: nn.Module, then: Any) -> hdet.SequentialController:
    return hdet.SequentialController(hdet.LineController(net, late=False), then)


def chained(then: Any, lr: float = 1e-3, **settings: Any) -> Run:
    net = settings.pop("net", None) or model()
    return line_run(lr, total=TOTAL, net=net, line=followed(net, then), **settings)


def sweep(run: Run) -> int:
    """Until the run has begun again; at which step."""
    limit = run.index + 0.17 * TOTAL
    while run.ensemble.sweeping:
        run.steps(1)
        assert run.index < limit
    return run.index


def test_the_other_decides_when_the_rate_has_risen_and_the_line_is_read_no_more() -> None:
    then = Listener()
    run = chained(then)
    back = sweep(run)
    found = run.ensemble.corrections["lr"]
    assert then.steps == [] and not run.controller.handed_over
    run.closure = None  # nobody asks for it any more
    run.steps(TOTAL - back)
    risen = run.controller.first.rule.risen
    assert back < risen <= back + 0.08 * TOTAL + 1
    assert then.steps == [float(step) for step in range(4, TOTAL + 1, 4) if step > risen]
    assert run.ensemble.corrections["lr"] == pytest.approx(2 * found)
    assert run.validation() < 2 * plain_validation(FOUND)


def test_a_line_alone_and_one_before_another_sweep_alike() -> None:
    alone, before = line_run(1e-3, total=TOTAL), chained(Listener())
    back = sweep(alone)
    assert sweep(before) == back and torch.equal(alone.weights(), before.weights())
    assert alone.ensemble.corrections == before.ensemble.corrections


def together(lr: float, **probe: Any) -> tuple[Run, list[int]]:
    """Four co-resident replicas, and a probe after the sweep; the steps at which that has scored."""
    asked: list[int] = []

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        asked.append(run.index)
        return losses_of(net, batch).mean()

    def controller(net: nn.Module) -> hdet.Controller:
        batches = [taught(20_000 + i) for i in range(8)]
        return followed(net, hdet.ProbeController(loss, batches, chunks=4, model=net, interval=5, **probe))

    run = Run(together=4, lr=lr, total=TOTAL, every=4, controller=controller, data=lambda key: taught(key, 8), closure=True)
    return run, asked


def test_co_resident_replicas_train_alike_until_the_probe_acts_and_all_are_taken_back() -> None:
    run, asked = together(30 * FOUND)  # breaks training at once
    begin = run.weights()
    while run.ensemble.sweeping:
        assert run.steps(1).equal()
    assert torch.equal(run.weights(), begin)
    while not run.controller.handed_over:
        assert not asked and not run.ensemble.engine.explores
        assert run.steps(1).equal()
    run.steps(3)
    assert not run.equal() and run.ensemble.engine.explores
    run.steps()
    assert asked and run.controller.idle and run.equal()
    assert run.validation() < 2 * plain_validation(FOUND)


def test_a_replica_that_is_nan_in_the_sweep_is_taken_back_too() -> None:
    run, _ = together(FOUND)
    run.steps(6)
    with run.replica(2), torch.no_grad():
        next(run.net.parameters()).fill_(math.nan)
    while run.ensemble.sweeping:
        run.steps(1)
    assert run.equal() and run.weights().isfinite().all()


def test_a_probe_after_the_sweep_votes_and_freezes() -> None:
    """It votes: at a 256th of what was found, for more."""
    run, _ = together(FOUND, freeze_after=0.5)
    while not run.controller.handed_over:
        run.steps(1)
    run.ensemble.engine.corrections = [run.ensemble.engine.corrections[0] / 256]
    low = run.ensemble.corrections["lr"]
    run.steps()
    assert run.ensemble.corrections["lr"] > low and run.controller.then.rule.frozen


@pytest.mark.filterwarnings("ignore:.*in the middle of a sweep")
@pytest.mark.parametrize("when", ["in the sweep", "while it rises", "after"])
def test_resumed_it_goes_on_where_it_was(when: str) -> None:
    first = chained(Listener())
    first.steps(10)
    if when != "in the sweep":
        sweep(first)
        first.steps(4 if when == "while it rises" else 80)
    state = first.ensemble.state_dict()
    second = chained(Listener())
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.ensemble.load_state_dict(state)
    second.index = first.index
    assert second.controller.handed_over is first.controller.handed_over is (when == "after")
    assert second.controller.then.steps == first.controller.then.steps
    if when != "in the sweep":  # which begins anew
        assert second.ensemble.values() == first.ensemble.values()
    for run in (first, second):
        run.steps(TOTAL - run.index)
    if when != "in the sweep":
        assert torch.equal(first.weights(), second.weights()) and first.controller.then.steps == second.controller.then.steps
    with pytest.raises(ValueError, match="controller"):
        line_run(1e-3, total=TOTAL).ensemble.load_state_dict(state)


def test_a_schedule_that_falls_from_the_beginning_has_had_its_peak() -> None:
    """By the time of the hand-over a cosine is at 0.9: a probe that had not seen its peak would wait for it, and probe, to the end."""
    net = model()
    probe = hdet.ProbeController(
        lambda net, batch: losses_of(net, batch).mean(), [taught(20_000 + i) for i in range(4)], chunks=4, model=net
    )
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=TOTAL)
    with pytest.warns(UserWarning, match="one replica"):
        run = line_run(
            FOUND, total=TOTAL, net=net, line=followed(net, probe), optimizer=hdet.FusedAdamW, scheduler=cosine, total_steps=TOTAL
        )
    run.steps(TOTAL // 2)
    assert run.controller.handed_over and probe.rule.warm == [True] and run.controller.idle


def test_a_damaged_state_changes_nothing() -> None:
    run = chained(Listener())
    state = run.ensemble.state_dict()
    broken = {"first": {}, "then": {"steps": [1.0], "frozen": True}, "handed_over": True}
    with pytest.raises(ValueError, match="LineRule's state lacks"):
        run.ensemble.load_state_dict({**state, "controller_state": broken})
    with pytest.raises(ValueError, match="SequentialController's state lacks"):
        run.ensemble.load_state_dict({**state, "controller_state": {"first": {}}})
    assert run.controller.then.steps == [] and not run.controller.then.frozen and not run.controller.handed_over


def test_what_is_no_other_controller_is_refused() -> None:
    line = hdet.LineController(late=False)
    for other in (Listener, 3, None):
        with pytest.raises(TypeError, match="then must be a controller"):
            hdet.SequentialController(line, other)
        with pytest.raises(TypeError, match="first must be a controller"):
            hdet.SequentialController(other, line)
    with pytest.raises(ValueError, match="both controllers have a measurement 'line'"):
        hdet.SequentialController(line, hdet.LineController())
    with pytest.raises(ValueError, match="pass decay=None"):
        hdet.SequentialController(line, hdet.SoftmaxController(decay="floor"))


def test_what_follows_asks_for_what_it_needs() -> None:
    """As if it were alone: a run that suits it; what it measures with; replicas, of which one explores nothing."""

    class Fussy(Listener):
        def start(self, run: hdet.Run) -> None:
            raise ValueError(f"{run.total_steps} steps are too few")

    with pytest.raises(ValueError, match=f"{TOTAL} steps are too few"):
        chained(Fussy())
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        chained(hdet.SoftmaxController(decay=None))
    line = hdet.SequentialController(hdet.LineController(late=False), hdet.SoftmaxController(decay=None))
    assert line.name == "line, then softmax" and line.needs_replicas and not line.idle


@pytest.mark.filterwarnings("ignore:one replica")
def test_a_rule_without_what_it_measures_is_refused_before_anything_is_touched() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    for controller in (hdet.ProbeRule(), hdet.HypergradientRule()):
        with pytest.raises(ValueError, match=r"measures '(probe|cosines)', and has no measurement of that name.*ProbeController\(rule="):
            hdet.Ensemble(optimizer, controller=controller, total_steps=100)
    hdet.Ensemble(optimizer)  # nobody drives it


# -- replicas in processes of their own ------------------------------------------------------------------------------------


def two_processes(rank: int, world: int) -> Any:
    """[(step, handed over, weights differ between ranks)], and the corrections in the end."""
    net = model()
    run = Run(
        rank,
        net=net,
        lr=30 * FOUND,
        total=TOTAL,
        every=4,
        controller=followed(net, hdet.SoftmaxController(decay=None)),
        data=lambda key: taught(key, 16),
        closure=True,
    )
    run.closure = lambda data: losses_of(net, data)
    seen: list[tuple[int, bool, bool]] = []
    step = run.ensemble.step

    def looked_at(loss: torch.Tensor, closure: Any) -> None:
        seen.append((run.index, run.controller.handed_over, not equal(run.weights())))
        step(loss, closure=closure)

    run.ensemble.step = looked_at
    run.steps(100)
    return seen, run.ensemble.corrections


def equal(weights: torch.Tensor) -> bool:
    """On all ranks?"""
    everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weights)
    return all(torch.equal(weights, other) for other in everyones)


def test_processes_part_when_the_other_acts_and_agree_on_everything() -> None:
    (seen, corrections), (others, same) = run_ranks(two_processes, 2)
    assert seen == others and corrections == same and corrections["lr"] < 0.2
    assert {differ for _, handed, differ in seen if not handed} == {False} and any(handed for _, handed, _ in seen)
    assert all(differ for _, handed, differ in seen if handed)


# -- other knobs, and gradients of their own --------------------------------------------------------------------------------


def local_gradients(rank: int, world: int) -> Any:
    """Whether each rank is back at the beginning when it begins again, who decided on what, and the corrections in the end."""
    then, knobs = Listener(), [hdet.Eps(), hdet.LearningRate(0.3)]
    run = chained(then, 1e-4, knobs=knobs, every=4, gradients="local", moments="keep")
    run.data = lambda key: taught(key // 50 + rank)
    begin = run.weights()
    swept = []
    while run.ensemble.sweeping:
        run.steps(1)
        swept.append(run.ensemble.corrections)
    back = torch.equal(run.weights(), begin) and not any(bool(state["exp_avg"].any()) for state in run.optimizer.state.values())
    run.steps(TOTAL // 2 - run.index)
    return back, swept, then.steps, run.ensemble.corrections, list(run.ensemble.corrections)


def test_replicas_with_gradients_of_their_own_sweep_the_rate_alone_and_the_other_decides_on_all() -> None:
    first, second = run_ranks(local_gradients, 2)
    assert first == second
    back, swept, asked, corrections, names = first
    assert back and asked and names == ["lr", "eps"]  # rates come first
    assert {row["eps"] for row in swept} == {1.0} and len({row["lr"] for row in swept}) > 5
    assert corrections["eps"] == 2.0  # by the Listener, which is asked for a decision on each
    assert 0.01 < 1e-4 * corrections["lr"] / 2 < 0.1  # the best peaks


def test_knobs_that_are_no_rates_need_another_controller_and_a_rate_beside_them() -> None:
    def build(knobs: Any, **settings: Any) -> hdet.Ensemble:
        net = nn.Sequential(nn.Dropout(0.1), model())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        batches = [taught(20_000 + i) for i in range(8)]
        probe = hdet.ProbeController(
            lambda net, batch: losses_of(net, batch).mean(), batches, model=net, held_out=settings.pop("held_out", True)
        )
        line = followed(net, probe) if settings.pop("then", True) else hdet.LineController(net)
        return hdet.Ensemble(
            optimizer, knobs=[hdet.Dropout(net) if knob == "dropout" else knob for knob in knobs], controller=line, total_steps=100,
            sync=hdet.Sync(1, gradients="local", moments="keep"),
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"'eps' is no learning rate.*SequentialController\(LineController"):
        build([hdet.LearningRate(), hdet.Eps()], then=False)
    with pytest.raises(ValueError, match=r"none of the knobs \['eps'\] is a learning rate"):
        build([hdet.Eps()])
    with pytest.raises(ValueError, match="'dropout'.*held_out=True"):
        build([hdet.LearningRate(), "dropout"], held_out=False)
    with pytest.warns(UserWarning, match="one replica"):
        build([hdet.LearningRate(), "dropout"])


def test_a_cycle_taken_back_lowers_rates_alone() -> None:
    engine = Engine([KnobSpec("lr", 0.1), KnobSpec("eps", 0.1, rate=False)], 2, Clock(2))
    engine.roll_back(0.5)
    assert engine.corrections == [0.5, 1.0]


def one_breaks(rank: int, world: int) -> Any:
    """Rank 1's gradient is NaN once, in the coarse scan; ranks begin with different weights. [equal after each take-back?], the rate in the end."""
    net = model()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.01 * (rank + 1))
    run = chained(
        Listener(), 3e-3, rank=rank, net=net, every=4, gradients="local", moments="keep", data=lambda key: taught(key // 50 + rank)
    )
    step = run.optimizer.step

    def broken() -> None:
        if rank == 1 and run.index == 3:
            net[0].weight.grad.fill_(math.nan)
        if not (rank == 1 and run.index == 0):  # as a scaler leaves it out
            step()

    run.optimizer.step = broken
    taken_back, rule = [], run.controller.first.rule
    for _ in range(80):
        phase, doublings = rule.phase, len(rule.doublings)
        run.step()
        if (rule.phase, len(rule.doublings)) != (phase, doublings) and not rule.doublings:
            taken_back.append(equal(run.weights()) and bool(run.weights().isfinite().all()))
    return taken_back, 3e-3 * run.ensemble.corrections["lr"], run.ensemble.sweeping


def test_one_replica_that_breaks_breaks_the_sweep_and_all_begin_again_from_the_same_weights() -> None:
    first, second = run_ranks(one_breaks, 2)
    assert first == second
    equal, rate, sweeping = first
    assert equal and all(equal) and not sweeping
    assert 0.005 < rate < 0.1  # the best peaks are 0.01 to 0.1


def test_a_product_of_rate_and_decay_and_a_bound_beside_other_rates_are_refused() -> None:
    def build(*knobs: Any) -> hdet.Ensemble:
        net = model()
        first, *others = net.parameters()
        optimizer = torch.optim.AdamW([{"params": [first], "name": "a"}, {"params": others, "name": "b"}], lr=1e-3)
        probe = hdet.ProbeController(lambda net, batch: losses_of(net, batch).mean(), [taught(9)] * 8, model=net, held_out=True)
        return hdet.Ensemble(optimizer, knobs=knobs, controller=followed(net, probe), total_steps=100, sync=hdet.Sync(1))

    with pytest.warns(UserWarning, match="one replica"):
        build(hdet.LearningRate(bounds=(1e-4, 1e-2)), hdet.WeightDecay())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"'weight_decay' is rate . decay.*product=False"):
            build(hdet.LearningRate(), hdet.WeightDecay(product=True))
        with pytest.raises(ValueError, match="'lr/a' has bounds"):
            build(hdet.LearningRate(groups="each", bounds=(1e-4, 1e-2)))


@pytest.mark.filterwarnings("ignore:.*in the middle of a sweep")
def test_buffers_that_are_loaded_after_the_state_are_what_a_sweep_goes_back_to(tmp_path: Path) -> None:
    def build() -> Run:
        net = nn.Sequential(nn.BatchNorm1d(6), model())
        return line_run(1e-3, total=TOTAL, net=net, line=followed(net, Listener()))

    first, second = build(), build()
    first.steps(8)
    norm = first.net[0]
    saved = norm.running_mean.clone()
    path = checkpoint.save(tmp_path, checkpoint.RunState(first.net, first.ensemble))
    checkpoint.load(path, checkpoint.RunState(second.net, second.ensemble))
    second.index = first.index
    sweep(second)
    assert torch.equal(second.net[0].running_mean, saved) and int(second.net[0].num_batches_tracked) == int(norm.num_batches_tracked)
