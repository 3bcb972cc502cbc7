"""Whole runs under `hdet.AutoLR` on a small regression, whose best peaks are 0.01 to 0.1."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import hdet
from hdet.core.plan import Moment
from hdet.core.rules.trial.protocol import TRIALS
from tests.core.controller_runs import evidence
from tests.harness import Run, batch, loss_of, model, taught

from .runs import run

TOTAL = 1500


def auto(lr: float, **settings: Any) -> Run:
    """The trials of a run of 10 000 steps, in one of 1 500."""
    of_controller = {key: settings.pop(key) for key in ("judge", "before_step", "place") if key in settings}
    make = functools.partial(hdet.AutoLR, budget=settings.pop("budget", 0.2), **of_controller)
    return run(make, together=1, lr=lr, spread=0.0, **{"total": TOTAL, **settings})


@functools.cache
def fixed(lr: float) -> Run:
    return run(lambda model: None, together=1, lr=lr, spread=0.0, total=TOTAL).steps()


def above_best(ran: Run) -> float:
    """The part of what was to be gained that is missing."""
    untrained, best = Run(net=model()).validation(), fixed(0.03).validation()
    return (min(ran.validation(), untrained) - best) / (untrained - best)


def test_a_rate_that_is_kept_leaves_the_run_as_it_would_have_been_to_the_bit() -> None:
    ran = auto(0.03).steps()
    assert ran.ensemble.corrections == {"lr": 1.0} and torch.equal(ran.weights(), fixed(0.03).weights())
    assert any("kept" in note for note in ran.notes()) and 0.15 * TOTAL < ran.controller.rule.spent <= 0.2 * TOTAL


@pytest.mark.parametrize("lr", [0.01, 0.1, 0.03 * 2**7])
def test_near_the_best_or_far_above_it_ends_within_half_a_percent(lr: float) -> None:
    assert above_best(auto(lr).steps()) < 0.005
    assert 0.01 <= lr <= 0.1 or above_best(fixed(lr)) > 0.1


def test_from_far_below_most_of_what_is_missing_is_gained() -> None:
    """Not all: a rate that is the best one for a few steps is not trusted to be good for all."""
    low, ran = 0.03 / 2**7, auto(0.03 / 2**7).steps()
    assert above_best(fixed(low)) > 0.1 > 5 * above_best(ran) and ran.ensemble.corrections["lr"] >= 8


def test_a_raised_rate_is_taken_back_where_the_data_gets_harder() -> None:
    """Which no trial has tried it on."""

    def harder(key: int) -> Any:
        x, y = taught(key)
        return x, y * (20 if key >= 100 * TOTAL // 2 else 1)

    ran = auto(1e-4, data=harder).steps(TOTAL // 2)
    assert ran.ensemble.corrections["lr"] > 8 and not ran.controller.idle
    ran.steps()
    assert ran.ensemble.corrections == {"lr": 1.0} and ran.controller.idle
    assert any("the loss rose from" in note and "back to the rate of before" in note for note in ran.notes())
    assert "in force again" in ran.ensemble.report()


@pytest.mark.parametrize("broken", [100.0, math.nan])
def test_a_raised_rate_that_breaks_later_is_taken_back_with_all_that_it_did(broken: float) -> None:
    ran = auto(1e-4).steps(TOTAL // 2)
    assert ran.ensemble.corrections["lr"] > 8
    with torch.no_grad():
        for parameter in ran.net.parameters():
            parameter.mul_(broken)
    ran.steps()
    assert ran.ensemble.corrections == {"lr": 1.0} and any("weights of before" in note for note in ran.notes())
    assert above_best(ran) < above_best(fixed(1e-4))


HELD_OUT = (loss_of, [taught(10**6 + number) for number in range(8)])


def noisy(key: int) -> Any:
    """Three batches, again and again, whose noise can be learned by heart."""
    x, y = taught(key // 100 % 3, 16)
    return x, y + 2 * torch.randn(16, 1, generator=torch.Generator().manual_seed(key // 100 % 3))


def wide() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def overfits(lr: float, controller: Any) -> float:
    """The held-out loss at the end."""
    net = wide()
    ran = Run(net=net, lr=lr, total=TOTAL, every=10, spread=0.0, data=noisy, closure=True, controller=controller).steps()
    if controller is not None:
        assert ran.controller.rule.cost <= 0.1 * TOTAL and any("held-out loss rose" in note for note in ran.notes())
    with torch.no_grad():
        return sum(loss_of(net, data).item() for data in HELD_OUT[1]) / len(HELD_OUT[1])


@pytest.mark.parametrize("lr", [0.003, 0.01])
def test_with_a_judge_a_run_that_overfits_goes_back_to_its_best_weights(lr: float) -> None:
    assert 5 * overfits(lr, lambda net: hdet.AutoLR(net, budget=0.1, judge=HELD_OUT)) < overfits(lr, None)


def test_a_judge_of_too_many_batches_judges_the_run_by_some_of_them() -> None:
    """And there are no trials."""
    loss_fn, batches = HELD_OUT
    ran = Run(net=wide(), lr=0.01, total=TOTAL, every=10, spread=0.0, data=noisy, closure=True,
              controller=lambda net: hdet.AutoLR(net, budget=0.1, judge=(loss_fn, 8 * batches))).steps()  # fmt: skip
    assert any("held-out loss rose" in note for note in ran.notes()) and len(ran.controller.rule.judge.overfitting.best) == 30
    assert "now 0.00063, without a trial; the run itself is judged every 300 steps by 30 of the 64" in ran.controller.report()
    assert ran.controller.rule.cost == 6 * 30 / 3, "a third of the budget, and once at the beginning"


def test_what_goes_back_to_its_best_weights_is_not_taken_back_for_their_loss() -> None:
    """It is higher than that of the overfitted run. A resumed run is judged at the end of an ordinary cycle, for the same reason."""
    ran = Run(net=wide(), lr=0.02, total=TOTAL, every=10, spread=0.0, data=noisy, closure=True, divergence=hdet.Divergence(rollback="device"),
              controller=lambda net: hdet.AutoLR(net, budget=0.1, judge=HELD_OUT)).steps()  # fmt: skip
    assert any("held-out loss rose" in note for note in ran.notes()) and not any("taken back" in note for note in ran.notes())


def test_a_run_that_does_not_overfit_is_judged_without_a_trace() -> None:
    ran = auto(0.03, judge=HELD_OUT).steps()
    assert torch.equal(ran.weights(), fixed(0.03).weights()) and ran.controller.rule.cost <= 0.2 * TOTAL
    assert ran.controller.rule.judge.overfitting.at > 0.9 * TOTAL and not ran.controller.idle


def test_a_run_that_is_too_short_for_trials_is_left_alone() -> None:
    ran = auto(1e-4, budget=0.03).steps(50)
    assert torch.equal(ran.weights(), run(lambda model: None, together=1, lr=1e-4, spread=0.0, total=TOTAL).steps(50).weights())
    assert "too short" in ran.controller.report() and ran.controller.idle


def started(total: int, **settings: Any) -> hdet.AutoLR:
    """After its first step."""
    net = model()
    controller, optimizer = hdet.AutoLR(net, **settings), torch.optim.SGD(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, total_steps=total, controller=controller)
    loss_of(net, batch(0)).backward()
    optimizer.step()
    ensemble.step(1.0, closure=lambda: loss_of(net, batch(0)).view(1))
    return controller


@pytest.mark.parametrize(("settings", "total", "way_out"), [
    ({}, 300, "300 steps are below 2800. Train longer, or pass budget=0.28"),
    ({}, 2799, "2799 steps are below 2800. Train longer, or pass budget=0.04"),
    ({"budget": 0.01}, 300, "300 steps are below 8400. Train longer, or pass budget=0.28"),
    ({"judge": (loss_of, [batch(0)] * 30)}, 300, "300 steps are below 3956. Train longer, or pass budget=0.4; the run itself is not judged: that takes budget=0.067 or more"),
    ({}, 100, "100 steps are below 2800. Train longer"),
])  # fmt: skip
def test_a_run_that_is_too_short_is_warned_of_once_with_the_way_out(
    settings: dict[str, Any], total: int, way_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the levels that Python shows by default."""
    controller = started(total, **settings)
    controller.learn(evidence(step=50, total_steps=total, losses=[4.0]))
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "hdet" and record.getMessage().endswith(way_out)


@pytest.mark.parametrize(("total", "settings"), [(2800, {}), (300, {"budget": 0.28}), (178, {"budget": 0.48})])
def test_the_way_out_of_a_run_that_is_too_short_leads_to_a_trial(
    total: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    controller = started(total, **settings)
    assert not caplog.records
    plans = [controller.plan(Moment(0, step, step)) for step in (0, math.ceil(0.1 * total))]
    controller.learn(evidence(step=1, total_steps=total, losses=[4.0], highest=[1.0]))
    assert TRIALS not in plans[0].measure and TRIALS in controller.plan(Moment(1, math.ceil(0.1 * total), math.ceil(0.1 * total))).measure


def test_it_says_what_it_will_do_and_what_it_has_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hdet")
    ran = auto(0.03)
    assert ran.controller.report() == (
        "trials from step 0 at 0.125, 1, 128 times your rate, and from step 90 at 0.25, 1, 4 times your rate, of at most 20% of the run's compute"
    )
    said = ran.steps().controller.report()
    assert said.startswith("best peak ") and "; yours 0.03, kept, after trials" in said
    told = [record.getMessage() for record in caplog.records]
    reports = [line for line in told if line.startswith("hdet, auto: ")]
    assert reports[0].startswith("hdet, auto: trials from ") and reports[-1] == f"hdet, auto: {said}" and len(set(told)) == len(told)
    assert any(line.startswith("hdet, step ") and "kept" in line for line in told)
    caplog.clear()
    judged = auto(0.03, judge=HELD_OUT).steps()
    told = [record.getMessage() for record in caplog.records]
    assert judged.controller.rule.judge.overfitting.count > 5 and len(set(told)) == len(told) < 7, (
        "nothing is said of a judging of which nothing follows"
    )
    assert "yours 0.0001, now 0.0064" in auto(1e-4).steps().controller.report()


def test_a_closure_is_asked_for_in_the_first_step() -> None:
    """Though the first trial is to come at the three hundredth."""
    net = model()
    ensemble = hdet.Ensemble(torch.optim.SGD(net.parameters(), lr=1e-3), total_steps=3000, controller=hdet.AutoLR(net))
    with pytest.raises(TypeError, match="closure"):
        ensemble.step(1.0)


@pytest.mark.parametrize("lr", [100.0, 1e3])
def test_a_rate_that_breaks_in_the_first_steps_is_found_without_a_warm_up(lr: float) -> None:
    ran = auto(lr, optimizer=torch.optim.SGD, scheduler=None).steps()
    assert ran.ensemble.corrections["lr"] <= 2**-6 and ran.validation() < Run(net=model()).validation()
    with pytest.raises(hdet.ReplicasDiverged):
        run(lambda model: None, together=1, lr=lr, spread=0.0, optimizer=torch.optim.SGD, scheduler=None, total=TOTAL).steps(200)


@pytest.mark.parametrize("groups", [None, "each"])
def test_all_groups_move_together(groups: str | None) -> None:
    def two(parameters: Any, lr: float, **settings: Any) -> torch.optim.Optimizer:
        first, *rest = list(parameters)
        return hdet.FusedAdamW([{"params": rest}, {"params": [first], "lr": lr / 4}], lr=lr, **{**settings, "weight_decay": 0.01})

    ran = auto(1e-4, optimizer=two, scheduler=None, knobs=[hdet.LearningRate(0.0, groups), hdet.WeightDecay(0.0)]).steps(300)
    rates = {value for name, value in ran.ensemble.corrections.items() if name.startswith("lr")}
    assert len(rates) == 1 and rates != {1.0} and ran.ensemble.corrections["weight_decay"] == 1
    one, other = (group["lr"] for group in ran.optimizer.param_groups)
    assert one == pytest.approx(4 * other)


@pytest.mark.parametrize("resumed", [False, True])
def test_examples_that_come_again_are_known_also_where_the_first_trial_was_interrupted(resumed: bool) -> None:
    ran = auto(1e-4, data=lambda key: taught(key // 100 % 10)).steps(15)
    if resumed:
        ran = auto(1e-4, data=lambda key: taught(key // 100 % 10)).loaded(ran.saved())
    ran.steps(250)
    assert ran.ensemble.corrections == {"lr": 1.0} and ran.controller.rule.epochs > 12


@pytest.mark.parametrize("first", [0, 1])
def test_a_warm_up_may_begin_at_0(first: int) -> None:
    """As those of transformers and Megatron do. Arms were all of them at 0, and nothing was found."""

    def warmed(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + first) / 60, max(0.0, (TOTAL - s) / TOTAL)))

    assert auto(1e-4, scheduler=warmed).steps(200).ensemble.corrections["lr"] >= 8
    assert auto(3.0, scheduler=warmed, optimizer=torch.optim.AdamW).steps(200).ensemble.corrections["lr"] <= 1 / 8


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    whole = auto(1e-4).steps(400)
    part = auto(1e-4).steps(200)
    again = auto(1e-4).loaded(part.saved()).steps(200)
    assert whole.ensemble.corrections == again.ensemble.corrections != {"lr": 1.0}
    assert torch.equal(whole.weights(), again.weights())
