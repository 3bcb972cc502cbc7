"""The line on real tensors: what is left untouched, weights taken back, closures, refusals, whole runs, resume."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.core.plan import Compare, Level
from hdet.core.rules.line_rule import BEGINNING, FROM, LINE, PATIENCE
from hdet.core.rules.line_search import Asking
from tests.harness import Run, TwoReplicas, losses_of, model, policies, taught

# -- whole runs ----------------------------------------------------------------------------------------------------------


def line_run(lr: float = 3e-4, *, total: int = 200, net: nn.Module | None = None, line: Any = "line", **settings: Any) -> Run:
    """One replica under a `LineController` of its own, or under what ``line`` is, with batches that the model can learn."""
    net = model() if net is None else net
    defaults = {"every": max(1, total // 100), "closure": True, "ddp": False, "data": lambda key: taught(key // 100)}
    return Run(lr=lr, total=total, net=net, controller=hdet.LineController(net) if line == "line" else line, **{**defaults, **settings})


@functools.cache
def plain_validation(lr: float) -> float:
    """Of 400 steps without a controller."""
    return line_run(lr, total=400, line=None).steps().validation()


class Fixed(hdet.LineRule):
    """Scores at 0, 1 and 2 and says this at the first end, after four cycles, and nothing later; and goes ``back`` to the beginning."""

    state_keys = ("said",)

    def __init__(self, back: bool = False, **decision: Any) -> None:
        super().__init__()
        self.decision, self.end, self.said = hdet.Decision(**decision), hdet.Restore(BEGINNING) if back else None, False

    @property
    def sweeping(self) -> bool:
        return not self.said

    @property
    def idle(self) -> bool:
        return self.said

    def decide(self, evidence: hdet.Evidence) -> Asking[hdet.Learned]:
        self.shape = evidence.mean[0] / evidence.peak[0]
        if self.said or evidence.step < 4 * evidence.sync_interval:
            return hdet.Learned([hdet.Decision()] * len(evidence.knobs))
        self.said = True
        yield Compare(LINE, 2.0, 1.0)
        yield Compare(LINE, 1.0, 0.0)
        yield Level(LINE, 1.0)
        return hdet.Learned([self.decision] * len(evidence.knobs), self.end)


@pytest.mark.parametrize("off", [1 / 256, 1 / 30, 1.0, 30.0])
def test_wherever_it_starts_it_ends_near_the_right_rate(off: float) -> None:
    """Fixed schedules of 400 steps with peaks 0.01 to 0.1 are the best ones here."""
    run = line_run(0.03 * off, total=400).steps(400)
    found = 0.03 * off * run.ensemble.corrections["lr"]
    assert 0.03 / 5 < found < 0.03 * 5
    assert run.validation() < 2 * plain_validation(0.03)
    if off != 1:
        assert run.validation() < 0.5 * plain_validation(0.03 * off)


def test_a_run_that_is_begun_in_the_middle_sweeps_there() -> None:
    """Of 400 steps 200 are done: from then on a whole sweep, and no late search while the rate rises."""
    first = line_run(1e-3, total=400, line=None).steps(200)

    def continued(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, **settings)
        optimizer.param_groups[0]["initial_lr"] = settings["lr"]
        return optimizer

    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=400, last_epoch=200)
    run = line_run(1e-3, net=first.net, optimizer=continued, scheduler=cosine, total_steps=400, every=1)
    start, rule = run.ensemble.engine.step, run.controller.rule
    assert start >= 200 and rule.began == start
    while run.ensemble.sweeping:
        doublings = len(rule.doublings)
        run.steps(1)
    assert doublings >= 3
    while run.index < 100:
        assert rule.next_end(400, 1) >= rule.risen
        run.steps(1)


def test_the_rule_is_told_the_schedule_s_mean() -> None:
    """Of OneCycleLR half of the peak; and a run of half the rate everywhere has the same shape."""
    alone = line_run(1e-2, line=None)
    rates = []
    for _ in range(200):
        rates.append(alone.optimizer.param_groups[0]["lr"])
        alone.steps(1)
    net = model()
    rule = Fixed(factor=0.5)
    line_run(1e-2, net=net, line=hdet.LineController(net, rule=rule)).steps(12)
    assert rule.shape == pytest.approx(sum(rates) / 200 / max(rates), rel=1e-2) and 0.4 < rule.shape < 0.6


def test_scoring_leaves_the_run_alone() -> None:
    """With a rule that does nothing, training is bit for bit what it is without a controller: modes, BatchNorm, dropout, random states."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    class Nothing(Fixed):
        opening = 1.0

    ends = []
    for scored in (False, True):
        rule = Nothing(factor=1.0)
        run = line_run(0.03, net=(model := net()), line=hdet.LineController(model, rule=rule) if scored else None)
        run.net[2].eval()  # a mode of its own
        modes: list[bool] = []

        def closure(batch: Any, net: nn.Module = model, modes: list[bool] = modes) -> torch.Tensor:
            modes.append(any(module.training for module in net.modules()))
            return losses_of(net, batch) + torch.rand(32) + random.random()

        run.closure = closure
        torch.manual_seed(3)
        random.seed(3)
        run.steps(12)
        assert [module.training for module in run.net] == [True, True, False, True]
        assert modes == [False] * len(modes) and (len(modes) > 1) is scored
        ends.append((run.net.state_dict(), torch.rand(3), random.random()))
    (one, drawn, number), (two, drawn_too, number_too) = ends
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(drawn, drawn_too) and number == number_too


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def until_begun_again(run: Run, limit: int) -> Run:
    """Up to the end of the sweep."""
    while not any("begun again" in note for note in run.notes()):
        assert run.index < limit, run.notes()
        assert run.ensemble.sweeping
        run.steps(1)
    assert not run.ensemble.sweeping
    return run


@pytest.mark.parametrize("lr", [1e-4, 1.0])
def test_after_the_sweep_all_is_as_it_was_at_the_beginning(lr: float) -> None:
    """Bitwise: weights, BatchNorm's statistics and count; moments are still to be made."""
    net = batch_norm()
    begin = {key: value.clone() for key, value in net.state_dict().items()}
    run = until_begun_again(line_run(lr, net=net, total=400), 61)
    assert run.index > 10
    assert all(torch.equal(value, begin[key]) for key, value in net.state_dict().items())
    assert not run.optimizer.state
    scheduled, value = run.ensemble.schedule.values()[0], run.ensemble.values()["lr"]
    assert value < scheduled * run.ensemble.corrections["lr"] * 1.1 / FROM  # and the rate begins low
    run.steps(1)
    assert int(net[1].num_batches_tracked) == 1


def momentum_in_two_groups(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": others, "name": "a"}, {"params": [first], "name": "b"}], lr=lr, momentum=0.9)


@pytest.mark.parametrize(("net", "groups"), [(model, None), (batch_norm, None), (model, ["a"])])
def test_weights_that_are_nan_in_the_sweep_are_taken_back(net: Callable[[], nn.Module], groups: list[str] | None) -> None:
    """No error, no cycle taken back by `Divergence`, and the run goes on from the beginning; also of weights whose rate no knob moves."""
    run = line_run(0.03, net=net(), total=400, optimizer=momentum_in_two_groups, knobs=[hdet.LearningRate(0.3, groups)])
    begin = run.weights()
    run.steps(20)
    assert run.ensemble.sweeping
    with torch.no_grad():
        next(run.net.parameters()).fill_(math.nan)
    while not torch.isfinite(run.weights()).all():
        run.steps(1)
    assert torch.equal(run.weights(), begin) and not any(record["rolled_back"] for record in run.records)
    run.steps(400 - run.index)
    assert not run.ensemble.sweeping and all(value.isfinite().all() for value in run.net.state_dict().values())


# -- closures ------------------------------------------------------------------------------------------------------------


def weights_after_steps(run: Run) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(run.weights()))
    return seen


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: torch.rand(4, 2), r"shape \(4, 2\)"), (lambda: 1.0, "got float"), (lambda: torch.arange(4), r"shape \(4,\)"),
        (lambda: torch.tensor(1.0), "gave 1 losses"), (lambda: None, "gave 0 losses"), (lambda: torch.empty(0), "gave 0 losses"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [0, 3])
def test_a_closure_that_says_nothing_of_use_is_refused_and_weights_stay(answer: Callable[[], Any], message: str, steps: int) -> None:
    """In the first step, and at a doubling's end; there one with fewer than two losses is left out at first, as the last batch of an epoch may be."""
    run = line_run(total=400).steps(steps)
    run.closure = lambda batch: answer()
    seen = weights_after_steps(run)
    with pytest.raises(ValueError, match=message):
        run.steps(PATIENCE if steps and "gave" in message else 1)
    assert torch.equal(run.weights(), seen[-1])


def test_the_closure_is_tried_once_and_then_called_at_doublings_ends_only() -> None:
    run, calls = line_run(total=4000), []
    run.closure = lambda batch: calls.append(run.index) or losses_of(run.net, batch)
    run.steps(7)
    assert calls == [0]
    run.steps(1)
    assert len(calls) > 1 and set(calls[1:]) == {7}


@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_a_loss_on_another_scale_than_the_closure_s_is_warned_of(scale: float) -> None:
    """Divided by the number of micro-batches, or multiplied by a scaler."""
    run = line_run(total=400)
    step = run.ensemble.step
    run.ensemble.step = lambda loss, closure: step(scale * loss, closure=closure)
    with pytest.warns(UserWarning, match="give step the mean of the same losses"):
        run.steps(5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lr", [3e-4, 3.0, 100.0])
def test_losses_that_a_rate_has_moved_are_not_warned_of(lr: float) -> None:
    line_run(lr, total=400).steps(40)


def test_the_model_of_another_optimizer_is_refused() -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        hdet.Ensemble(optimizer, controller=hdet.LineController(model()), sync=hdet.Sync(1), total_steps=100)
    hdet.Ensemble(optimizer, controller=hdet.LineController(model()), sync=hdet.Sync(1, refresh=lambda: None), total_steps=100)


@pytest.mark.parametrize("every", [2, 4])
def test_a_schedule_that_goes_on_by_several_for_each_step_of_the_optimizer(every: int) -> None:
    """As under accelerate. Octaves, rise and late searches are parts of the run all the same."""
    plain, run = line_run(1e-3, total=400), line_run(1e-3, total=400 * every, every=4)
    step = run.ensemble.step

    def several(loss: torch.Tensor, closure: Any) -> None:
        for _ in range(every):
            step(loss if _ == 0 else None, closure=closure)

    run.ensemble.step = several
    for one in (plain, run):
        until_begun_again(one, 61)
    assert abs(run.index - plain.index) <= 12
    assert run.ensemble.corrections["lr"] == pytest.approx(plain.ensemble.corrections["lr"], rel=1.0)
    for one in (plain, run):
        one.steps(400 - one.index)
    assert run.controller.idle and run.validation() < 1.5 * plain.validation()


@pytest.mark.parametrize(("total", "interval", "every", "later"), [(400, 4, 5, 8), (1600, 2, 10, 0)])
def test_batches_without_a_loss_do_not_keep_the_line_from_finding_the_rate(total: int, interval: int, every: int, later: int) -> None:
    """Every so many steps are skipped: their loss is not a number, and weights stay. Most cycles have one of every fifth step: what is left has
    larger errors, so two more doublings are waited for."""
    plain, run = (line_run(1e-3, total=total, every=interval) for _ in range(2))
    step = run.ensemble.step
    run.ensemble.step = lambda loss, closure: step(loss * (math.nan if run.index % every == 0 else 1), closure=closure)
    for one in (plain, run):
        until_begun_again(one, total // 6)
    assert run.index == plain.index + later
    assert run.ensemble.corrections["lr"] == pytest.approx(plain.ensemble.corrections["lr"], rel=0.5)


def test_an_error_of_the_closures_own_passes_and_weights_stay() -> None:
    run = line_run(total=400).steps(3)
    calls = []

    def closure(batch: Any) -> torch.Tensor:
        calls.append(run.weights())
        if len(calls) == 2:
            raise RuntimeError("mine")
        return losses_of(run.net, batch)

    run.closure = closure
    seen = weights_after_steps(run)
    with pytest.raises(RuntimeError, match="mine"):
        run.steps(1)
    assert torch.equal(run.weights(), seen[-1]) and not torch.equal(calls[1], seen[-1])


def test_a_step_without_a_closure_is_refused_while_there_is_something_to_decide() -> None:
    run = line_run()
    run.closure = None
    with pytest.raises(TypeError, match=r"step\(loss, closure=\.\.\.\)"):
        run.steps(1)
    over = line_run(line=hdet.LineController(rule=Fixed(factor=1.0))).steps(8)
    assert over.controller.idle
    over.closure = None
    over.steps(8)


def test_losses_that_are_not_passed_are_asked_for() -> None:
    run = line_run(0.03)
    step = run.ensemble.step
    run.ensemble.step = lambda loss, closure: step(closure=closure)
    with pytest.raises(ValueError, match=r"call step\(loss, closure=\.\.\.\)"):
        run.steps(20)


def test_a_cycle_that_is_taken_back_after_the_sweep_begins_the_interval_anew() -> None:
    run = until_begun_again(line_run(total=400, divergence=hdet.Divergence(rollback="device"), every=5), 61)
    run.steps(6)
    found = run.ensemble.corrections["lr"]
    with torch.no_grad():
        next(run.net.parameters()).fill_(math.nan)
    run.steps(4)
    assert run.records[-1]["rolled_back"]
    assert run.ensemble.corrections["lr"] < found and not run.ensemble.sweeping
    run.steps(1)
    assert run.controller.rule.since == run.index - 1


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused_by_name() -> None:
    def build(**settings: Any) -> hdet.Ensemble:
        net = model()
        optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        if settings.pop("together", False):
            settings["replicas"] = hdet.CoresidentReplicas(net, 2)
        return hdet.Ensemble(optimizer, controller=hdet.LineController(net), **(policies(**({"total_steps": 100, "every": 1} | settings))))

    with pytest.raises(ValueError, match=r"warmup_steps .* is 5, .*pass 0"):
        build(warmup_steps=5)
    build(every=100, total_steps=1000)
    with pytest.raises(ValueError, match=r"sync_interval .* is 101 of 1000 steps, .* at most 100$"):
        build(every=101, total_steps=1000)
    build(every=2, total_steps=20)
    with pytest.raises(ValueError, match="at most 2$"):
        build(every=3, total_steps=20)
    with pytest.raises(ValueError, match="pass total_steps"):
        build(total_steps=None)
    with pytest.raises(ValueError, match="co-resident"):
        build(together=True)
    with pytest.raises(ValueError, match=r"converge is ExactLocal\("):
        build(converge=hdet.converge.ExactLocal())
    with pytest.raises(ValueError, match="gradients is 'local'"):
        build(gradients="local", moments="keep", replicas=TwoReplicas())
    build(gradients="local", moments="keep")  # one replica: the same as shared


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model": 1}, TypeError), ({"rule": object()}, TypeError), ({"rule": hdet.LineRule(), "freeze_after": 0.5}, ValueError),
        ({"place": "disk"}, ValueError), ({"dtype": torch.int32}, ValueError),
    ],
)  # fmt: skip
def test_settings_are_validated(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(settings))):
        hdet.LineController(**settings)


# -- resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [14, 29])
def test_a_run_that_is_resumed_in_the_middle_of_the_sweep_begins_it_anew(steps: int) -> None:
    """From the weights of the checkpoint, to which it goes back, at the rate with which a run begins; and it is said, at both ends."""
    first = line_run(1e-3, total=400).steps(steps)
    assert first.ensemble.sweeping
    with pytest.warns(UserWarning, match="saving in the middle of a sweep"):
        first.ensemble.state_dict()
    with pytest.warns(UserWarning, match="was saved in the middle of a sweep"):
        second = line_run(1e-3, total=400).loaded(first.saved())
    assert second.ensemble.sweeping and second.controller.rule.doublings == [] and second.ensemble.corrections == {"lr": 1 / 16}
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(second.scheduler.get_last_lr()[0] / 16)
    begin = second.weights()
    until_begun_again(second, steps + 80)
    assert torch.equal(second.weights(), begin)
    second.steps(400 - second.index)
    assert second.controller.idle and math.isfinite(second.validation())


@pytest.mark.filterwarnings("error")
def test_a_state_from_before_the_first_step_is_nothing_to_warn_of() -> None:
    first, second = line_run(1e-3, total=400), line_run(1e-3, total=400)
    second.ensemble.load_state_dict(first.ensemble.state_dict())
    assert torch.equal(first.steps(60).weights(), second.steps(60).weights())


def test_a_run_that_is_resumed_after_the_sweep_keeps_what_was_found() -> None:
    first = until_begun_again(line_run(1e-3, total=400), 61).steps(9)
    second = line_run(1e-3, total=400).loaded(first.saved())
    assert second.controller.rule.state_dict() == first.controller.rule.state_dict() and not second.ensemble.sweeping
    assert second.ensemble.values() == first.ensemble.values() and second.ensemble.corrections["lr"] > 1
    assert torch.equal(second.weights(), first.weights())
    second.steps(400 - second.index)
    assert second.controller.idle and second.ensemble.corrections["lr"] >= first.ensemble.corrections["lr"]


# -- cycles ----------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_short_cycles_and_afterwards_they_end_at_multiples_of_t() -> None:
    run, ends = line_run(total=3000, every=50), []
    run.ensemble.log = lambda record, step: ends.append((step, run.ensemble.sweeping))
    while run.index < 400:
        run.steps(1)
    swept = [step for step, sweeping in ends if sweeping]
    assert len(swept) > 3 and swept == list(range(8, swept[-1] + 1, 8))
    over = swept[-1] + 8
    assert [step for step, sweeping in ends if not sweeping] == [over, *range(50 * (over // 50 + 1), 401, 50)]


def test_long_cycles_change_nothing_in_the_sweep() -> None:
    """Of one replica, whose averages are of no consequence."""
    short, long = line_run(total=3000, every=8), line_run(total=3000, every=200)
    for run in (short, long):
        while run.ensemble.sweeping:
            run.steps(1)
        run.steps(100)
    assert torch.equal(short.weights(), long.weights()) and short.index == long.index
