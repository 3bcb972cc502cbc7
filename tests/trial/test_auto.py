"""`hdet.AutoLR`: when it measures, what it does, and what it keeps."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.trial.budget import SHORTEST
from hdet.trial.rule import BROKEN, SCORES, STEPS, RateInterval
from tests.ensemble.helpers import same
from tests.harness import Run, batch, loss_of, losses_of, model, taught

from .common import ALL, WITHOUT, auto_run, not_numbers, searched, sgd, training

"""Only the run's own steps are looked at."""


@pytest.mark.parametrize(
    ("lr", "settings"),
    [
        *((lr, settings) for lr in (1e-6, 0.03, 30.0) for settings in ({}, WITHOUT)),
        (1e-6, {"of": {"budget": 0}}),
        (30.0, {"total": 60}),
    ],
)
def test_a_rate_that_is_far_off_moves_into_the_interval_and_a_good_one_stays(
    lr: float, settings: dict[str, Any]
) -> None:
    """A lowered run begins with its first weights and moments, any other goes on."""
    run, plain = searched(auto_run(lr, **settings)), auto_run(lr, controlled=False, **settings)
    factor, found = run.ensemble.corrections["lr"], run.search.interval
    assert (factor > 100) if lr < 1e-4 else (factor < 0.05) if lr > 1 else factor == 1.0
    assert found.low <= lr * factor * (1 + 1e-9) and lr * factor <= found.high * (1 + 1e-9)
    assert (run.search.cost > 0) == (settings == {})
    plain.steps(0 if factor < 1 else run.index)
    assert torch.equal(run.weights(), plain.weights())
    assert same(run.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])


@pytest.mark.parametrize("closure", [True, False])
def test_a_rate_that_is_set_in_the_middle_of_a_search_stays(closure: bool) -> None:
    """And ends the search; one that is set before is where it begins."""
    runs = [auto_run(1e-5, closure=closure, controlled=on) for on in (True, False)]
    for run in runs:
        run.ensemble.set_value("lr", 0.5 * run.rate)
        run.steps(10).ensemble.set_value("lr", 3 * run.rate)
        run.steps(100)
    run, plain = runs
    assert run.search.done and run.ensemble.corrections["lr"] == pytest.approx(1.5, rel=1e-6)
    assert torch.equal(run.weights(), plain.weights())
    assert any("stays (set_value() has set the rate)" in note for note in run.notes())
    early = auto_run(1e-5, closure=False)
    early.ensemble.set_value("lr", 0.5 * early.rate)
    assert searched(early).ensemble.corrections["lr"] > 50


class Taught(nn.Module):
    """A student, and a teacher that is a mean of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = model(), model().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def follow(self) -> None:
        pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
        [own.data.lerp_(p.data, 0.5) for own, p in pairs]


@pytest.mark.parametrize("closure", [True, False])
def test_where_a_run_begins_again_averages_of_its_weights_do(closure: bool) -> None:
    """One in the model is put back, others are begun by whoever keeps them."""
    net, seen = Taught(), list[bool]()

    def begin_again() -> None:
        seen.append(same([*net.parameters()], [*Taught().parameters()]))
        seen.append(run.search.note.endswith("; the run begins again with its first weights"))

    of = {"on_restart": begin_again}
    optimizer = lambda parameters, **of: torch.optim.SGD([*net.net.parameters()], lr=30.0)
    run = auto_run(30.0, net=net, optimizer=optimizer, of=of, closure=closure, every=1000)
    while not run.search.done:
        net.follow()
        run.step()
    assert seen and all(seen)


@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_alone_a_run_may_have_parameters_that_have_no_average(kind: str) -> None:
    net: Any = nn.Linear(6, 4, dtype=torch.complex64)
    if kind == "sparse":
        net = nn.Embedding(50, 8, sparse=True)
    make = torch.optim.SparseAdam if kind == "sparse" else torch.optim.AdamW

    def losses_at(step: int) -> torch.Tensor:
        of = torch.randint(50, (16,)) if kind == "sparse" else torch.randn(16, 6) + 0j
        return (net(of) - 1).abs().square().mean(1)

    optimizer = make([*net.parameters()], lr=1e-6)
    rollback = hdet.Divergence(rollback="device")
    auto = hdet.AutoLR(net)
    [*_] = training(
        net, losses_at, ALL, optimizer=optimizer, search=auto, divergence=rollback,
        sync=hdet.Sync(20),
    )  # fmt: skip
    assert auto.interval.moves and auto.interval.suggestion > 1e-4


def test_where_all_arms_break_far_lower_rates_are_tried_from_the_first_weights() -> None:
    """At once, however long a cycle is."""
    run = searched(auto_run(1e5, optimizer=sgd, scheduler=None, every=1000))
    trial, data = run.search.interval.trial, taught(100 * (run.index - SCORES))
    assert trial.rate == pytest.approx(1e5 * BROKEN**3) and run.index - ALL >= 3 * 7
    with torch.no_grad():  # weights that stand still were the first ones
        assert trial.first_losses[0] == float(losses_of(model(), data).double().mean())
    assert 1e-3 < run.rate < 1 and "1e+05 -> 0." in run.ensemble.report()
    assert run.search.interval.rate == 1e5


@pytest.mark.parametrize("closure", [True, False])
def test_where_no_rate_helps_it_is_back_where_it_was(closure: bool) -> None:
    run = auto_run(1e-3, data=not_numbers, closure=closure, every=1000).steps(4 * ALL)
    assert run.search.done and run.ensemble.corrections["lr"] == pytest.approx(1.0)
    assert "0.001 stays (far lower rates break too: it is not the rate)" in run.ensemble.report()


FEW = "are too few for a trial"
LOOKS = ", so only how far the first 28 steps move the weights is looked at. "
TRIED = "a trial in the first 56 steps, at 0.125, 1, 8, 64, 512 times your rate; it costs at most "


@pytest.mark.parametrize(
    ("total", "budget", "plan"),
    [
        (SHORTEST, None, f"{TRIED}196 steps (19.6 % of the run)"),
        (1310, 0.15, "a trial in "),
        (250, 0.9, "a trial in "),
        (5000, 0, "only how far "),
        (None, None, "only how far "),
        (1300, 0.15, f"1300 steps {FEW}{LOOKS}Use budget=0.16, or hdet.find_rate"),
        (SHORTEST - 1, None, f"999 steps {FEW}{LOOKS}Use budget=0.2"),
        (150, None, f"150 steps {FEW}{LOOKS}Use hdet.find_rate"),
    ],
)
def test_a_trial_is_made_where_it_is_within_the_budget(
    total: int | None, budget: float | None, plan: str
) -> None:
    run = auto_run(scheduler=None, total_steps=total, of={"budget": budget})
    assert run.ensemble.report().startswith(plan)
    assert run.search.idle == (FEW in plan)
    if plan.startswith(TRIED) or FEW in plan:
        trial = run.steps(ALL).search.interval.trial
        assert bool(trial.first_losses) == plan.startswith(TRIED)
    if FEW in plan:  # said again beside what was found without a trial
        assert plan.replace(LOOKS, ". ") in run.ensemble.report().splitlines()[-1]


def test_a_report_without_a_trial_says_what_it_lacked() -> None:
    run = auto_run(closure=False).steps(ALL)
    assert run.ensemble.report().endswith("from the first step: ensemble.step(loss, closure=...)")
    assert "closure" not in auto_run(closure=False, of={"budget": 0}).steps(ALL).ensemble.report()


@pytest.mark.parametrize("index", [1, STEPS + 5])
def test_a_closure_that_is_missing_in_the_middle_is_asked_for(index: int) -> None:
    run = auto_run().steps(index)
    run.closure = None
    with pytest.raises(TypeError, match=r"in each of its steps: call ensemble.step\(loss, closure"):
        run.step()


def of_groups(*rates: float) -> Any:
    """A group for each of the model's tensors."""
    return lambda parameters, **_: torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    )


@pytest.mark.parametrize(
    ("first", "groups", "moved", "closure"),
    [(1e-6, None, (0, 1, 2, 3), True), (1e-6, "each", (0, 1, 2, 3), False),
     (0.0, None, (1, 2, 3), False), (0.0, [0, 2], (2,), True)],
)  # fmt: skip
def test_rates_of_several_groups_move_together(
    first: float, groups: Any, moved: tuple[int, ...], closure: bool
) -> None:
    """A group that stands still has no part in it."""
    rates, knobs = [first, 2e-6, 4e-6, 1e-6], [hdet.LearningRate(0.0, groups)]
    run = auto_run(optimizer=of_groups(*rates), scheduler=None, knobs=knobs, closure=closure)
    run.steps(ALL)
    now = [group["lr"] for group in run.optimizer.param_groups]
    factor = now[2] / rates[2]
    expected = [rate * (factor if n in moved else 1) for n, rate in enumerate(rates)]
    assert factor > 100 and now == pytest.approx(expected)


@pytest.mark.parametrize("closure", [True, False])
def test_a_warm_up_may_begin_at_rate_0(closure: bool) -> None:
    warmed = lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 50))
    run = auto_run(1e-6, scheduler=warmed, closure=closure).steps(ALL)
    found = run.search.interval
    assert found.rate == 1e-6 and run.ensemble.corrections["lr"] > 100
    if closure:  # a trial is of peaks: the schedule has no part in it
        usual = auto_run(1e-6, scheduler=None).steps(ALL).search.interval
        assert found.trial.arms[1].losses == pytest.approx(usual.trial.arms[1].losses, rel=1e-3)


def test_a_rate_of_0_is_waited_for() -> None:
    run = auto_run(0.0, scheduler=None).steps(5)
    with run.ensemble.rescheduling():
        run.optimizer.param_groups[0].update(lr=1e-6, initial_lr=1e-6)
    assert run.steps(ALL).search.done and run.rate > 1e-4


@pytest.mark.parametrize(("lr", "end"), [(1e-6, 2e-6), (0.3, 0.2)])
def test_bounds_of_the_knob_hold(lr: float, end: float) -> None:
    knob = hdet.LearningRate(0.0, bounds=sorted([lr, end]))
    run = auto_run(lr, scheduler=None, knobs=[knob], every=ALL).steps(ALL)
    assert run.rate == pytest.approx(end) and any("held at" in note for note in run.notes())


def test_a_wrong_length_and_another_run_are_refused() -> None:
    net, run = model(), auto_run()
    with pytest.raises(ValueError, match="total_steps must be a whole number of steps >= 1"):
        hdet.Ensemble(sgd(net.parameters(), 0.1), total_steps="1000", search=hdet.AutoLR(net))
    with pytest.raises(ValueError, match="belongs to another run: make a new one for each"):
        Run(net=net, search=run.search, total=1500)


def test_the_report_says_what_was_measured() -> None:
    run = auto_run(1e-3)
    to, good, losses, best, cost = run.steps(ALL).ensemble.report().splitlines()[:5]
    found: RateInterval = run.search.interval
    assert to == f"learning rate: 0.001 -> {found.suggestion:.2g} (learned less than higher rates)"
    assert good == f"good rates for 1500 steps: {found.low:.2g} to {found.high:.2g}"
    assert losses.startswith("losses after 28 steps: ") and losses.count(" at ") == 5
    assert best == f"best guess without a rate of your own: {found.best:.2g}"
    weights = sum(p.nbytes for p in run.search.model.parameters())
    moments = sum(x.nbytes for of in run.optimizer.state.values() for x in of.values())
    in_mb = f"{(7 * weights + 6 * moments) / 1e6:.1f}"  # the first weights have no moments
    assert re.fullmatch(
        rf"cost: 196 steps \(13\.1 % of the run\), \d+\.\d s, {in_mb} MB of copies", cost
    )
    assert run.search.num_bytes == 7 * weights + 6 * moments and run.search.seconds > 0


def test_the_cycles_record_has_the_trial_once() -> None:
    run = auto_run(1e-3, every=30).steps(120)
    assert [record["trial"] is None for record in run.records] == [True, False, True, True]
    record = json.loads(json.dumps(run.records[1]["trial"]))
    assert RateInterval.from_dict(record) == run.search.interval
    [note] = run.notes()
    assert note.startswith("learning rate 0.001 -> 0.0")


def test_a_run_that_is_resumed_in_the_middle_of_a_trial_begins_it_again() -> None:
    again, saved = auto_run(1e-3), auto_run(1e-3).steps(10)
    with pytest.warns(UserWarning, match="from these weights, and is another run; save after"):
        saved.ensemble.state_dict()
    with pytest.warns(UserWarning, match="saved during the search, which begins again") as told:
        again.loaded(saved.saved())
    assert len(told) == 1
    assert again.steps(ALL - 1).search.interval is None
    assert again.steps(1).search.done and again.ensemble.corrections["lr"] > 2


def test_a_damaged_state_is_refused_and_nothing_changed() -> None:
    run, whole = auto_run(0.03).steps(3), searched(auto_run(1e-3)).search.state_dict()
    before = run.search.state_dict()
    for path, value in {
        ("done",): 1,
        ("cost",): -1.0,
        ("interval",): 3,
        ("repeats",): 0.5,
        ("best",): [1.0, 2],
        ("interval", "low"): "0",
        ("interval", "trial", "arms"): 3,
        ("interval", "trial", "arms", 0, "rate"): "1",
        ("interval", "trial", "arms", 1): {},
        ("interval", "trial", "first_losses"): None,
        ("interval", "total_steps"): 0,
    }.items():
        state = json.loads(json.dumps(whole))
        functools.reduce(lambda held, key: held[key], path[:-1], state)[path[-1]] = value
        with pytest.raises(ValueError, match="AutoLR's"):
            run.search.load_state_dict(state)
        assert run.search.state_dict() == before and not run.search.done
    assert run.steps(ALL - 3).search.done, "the search goes on"


HELD_OUT = [taught(10**6 + number) for number in range(4)]


def overfits() -> Run:
    """Three batches whose noise is learned by heart."""

    def data(key: int) -> Any:
        number = key // 100 % 3
        noise = torch.randn(16, 1, generator=torch.Generator().manual_seed(number))
        x, y = taught(number, 16)
        return x, y + 2 * noise

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    return auto_run(0.01, net=net, total=1200, data=data, of={"val_batches": (losses_of, HELD_OUT)})


def held_out_loss(run: Run) -> float:
    run.net.eval()
    with torch.no_grad():
        found = [losses_of(run.net, data).double().mean() for data in HELD_OUT]
    run.net.train()
    return float(torch.stack(found).mean())


def test_the_weights_with_the_lowest_held_out_loss_come_back() -> None:
    run = overfits()
    losses = [held_out_loss(run.steps(20)) for _ in range(60)]
    best, report = min(losses), run.ensemble.report()
    at = 20 * (losses.index(best) + 1)
    assert f"best held-out loss: {best:.4g} at step {at} of 1200" in report
    assert losses[-1] > 1.1 * best
    assert run.search.restore_best_weights() == best == held_out_loss(run)


def test_best_weights_are_not_in_a_state_and_the_load_says_so() -> None:
    run, resumed = overfits().steps(40), overfits()
    with pytest.warns(UserWarning, match=r"best weights so far \(held-out loss .* at step [24]0\)"):
        resumed.ensemble.load_state_dict(run.ensemble.state_dict())
    assert "at step 60 of 60" in resumed.steps(20).ensemble.report()


def test_best_weights_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="pass AutoLR"):
        auto_run().search.restore_best_weights()
    with pytest.raises(ValueError, match="every 20 steps"):
        overfits().search.restore_best_weights()
    with pytest.raises(ValueError, match="pass total_steps"):
        auto_run(scheduler=None, total_steps=None, of={"val_batches": (loss_of, [batch(0)])})


class RateFree(torch.optim.SGD):
    """Whose steps are as long at every rate."""

    def step(self, closure: Any = None) -> Any:
        for p in filter(lambda p: p.requires_grad, self.param_groups[0]["params"]):
            p.grad.div_(self.param_groups[0]["lr"] / 1e-3)
        return super().step()


def tuned(lr: float, closure: bool, optimizer: Any = torch.optim.AdamW, to: Any = None) -> Any:
    """The scales of a LayerNorm alone are trained. ``to``: what becomes of the losses of a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))
    for layer in (net[0], net[3]):
        layer.requires_grad_(False)
    run = auto_run(lr, net=net, optimizer=optimizer, scheduler=None, closure=closure)
    run.losses = lambda data: (to or (lambda x, _: x))(losses_of(net, data), run.index)
    return run.steps(ALL).search.interval


@pytest.mark.parametrize("closure", [True, False])
def test_vectors_count_where_no_matrix_is_trained(closure: bool) -> None:
    assert 1e-3 < tuned(1e-7, closure).suggestion < 1e-2
    assert 1e-3 < tuned(300.0, closure).suggestion < 10


ADAM, ADAMW = (lambda ps, lr, _=make, **__: _(ps, lr, weight_decay=0.1)
               for make in (torch.optim.Adam, torch.optim.AdamW))  # fmt: skip
NO_GRADIENTS = [
    ("gradients were 0", make, to, closure)
    for make in (ADAM, ADAMW)
    for to in (lambda x, _: 0 * x, lambda x, _: x.clamp(min=99), lambda x, step: x * (step > 40))
    for closure in (True, False)
]


@pytest.mark.parametrize(
    ("reason", "optimizer", "to", "closure"),
    [*NO_GRADIENTS, ("no rate changed the", ADAMW, lambda x, _: x - x.detach(), True),
     ("not use its rate", RateFree, None, True)],
)  # fmt: skip
def test_a_measurement_that_does_not_depend_on_the_rate_moves_nothing(
    reason: str, optimizer: Any, to: Any, closure: bool
) -> None:
    """Masked, saturated, switched on late; a loss that no step changes; steps of one length."""
    found = tuned(1e-5, closure, optimizer, to)
    assert not found.moves and reason in found.reason and reason in str(found)


def test_what_is_decided_is_told_once_and_not_contradicted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = auto_run(1e-3, data=not_numbers, every=100)
    with (
        caplog.at_level("INFO", "hdet"),
        pytest.raises(hdet.ReplicasDiverged, match="Look for NaN"),
    ):
        run.steps(4 * ALL)
    told = [line.partition(": ")[2] for line in caplog.messages]
    assert len(told) == len(set(told)) and any("not the rate" in line for line in told)
