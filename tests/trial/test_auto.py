"""Runs under `hdet.AutoLR`: where their rates go, what is told, and what a checkpoint holds."""

from __future__ import annotations

import functools
import json
import math
import warnings
from typing import Any

import pytest
import torch

import hdet
from hdet.trial.budget import SHORTEST
from hdet.trial.rule import BROKEN, SCORES, STEPS, RateInterval
from tests.ensemble.helpers import same
from tests.harness import Run, batch, loss_of, losses_of, model, taught

from .common import ALL, auto_run, sgd, training

WITHOUT = {"closure": False}
"""Only the run's own steps are looked at."""


def not_numbers(key: int) -> Any:
    x, y = taught(key)
    return x, y * math.nan


@pytest.mark.parametrize("settings", [{}, WITHOUT, {"of": {"budget": 0}}, {"total": 60}])
@pytest.mark.parametrize("lr", [1e-6, 0.03, 30.0])
def test_a_rate_that_is_far_off_moves_into_the_interval_and_a_good_one_stays(
    lr: float, settings: dict[str, Any]
) -> None:
    run = auto_run(lr, **settings).steps(60)
    while not run.controller.done:
        run.step()
    factor = run.ensemble.corrections["lr"]
    assert (factor > 100) if lr < 1e-4 else (factor < 0.05) if lr > 1 else factor == 1.0
    assert run.controller.interval.low <= lr * factor * (
        1 + 1e-9
    ) and lr * factor <= run.controller.interval.high * (1 + 1e-9)
    assert run.controller.done and (run.controller.cost > 0) == (settings == {})


@pytest.mark.parametrize("settings", [{}, WITHOUT])
@pytest.mark.parametrize("lr", [1e-6, 3.0])
def test_a_lowered_run_begins_with_its_first_weights_and_a_raised_one_goes_on(
    lr: float, settings: dict[str, Any]
) -> None:
    run, plain = auto_run(lr, **settings), auto_run(lr, controlled=False)
    while not run.controller.done:
        run.step()
    lowered = run.ensemble.corrections["lr"] < 1
    plain.steps(0 if lowered else run.index)
    assert lowered == (lr > 1) and torch.equal(run.weights(), plain.weights())
    assert same(run.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])


@pytest.mark.parametrize("every", [1000, 100, 10])
def test_where_all_arms_break_far_lower_rates_are_tried_from_the_first_weights(every: int) -> None:
    """At once, however long a cycle is."""
    run = auto_run(1e5, optimizer=sgd, scheduler=None, every=every)
    while not run.controller.done:
        run.step()
    trial = run.controller.interval.trial
    assert trial.rate == pytest.approx(1e5 * BROKEN**3) and run.index - ALL >= 3 * 7
    with torch.no_grad():  # weights that stand still were the first ones
        assert trial.first_losses[0] == float(
            losses_of(model(), taught(100 * (run.index - SCORES))).double().mean()
        )
    assert 1e-3 < run.rate < 1 and "1e+05 -> 0." in run.ensemble.report()


@pytest.mark.parametrize("closure", [True, False])
def test_where_no_rate_helps_it_is_back_where_it_was(closure: bool) -> None:
    run = auto_run(1e-3, data=not_numbers, closure=closure, every=1000).steps(4 * ALL)
    assert run.controller.done and run.ensemble.corrections["lr"] == pytest.approx(1.0)
    assert "0.001 stays (far lower rates break too: it is not the rate)" in run.ensemble.report()


LOOKS = ", so only how far the first 28 steps move the weights is looked at. "


@pytest.mark.parametrize(
    ("total", "budget", "plan"),
    [
        (
            SHORTEST,
            None,
            (
                "a trial in the first 56 steps, at 0.125, 1, 8, 64, 512 times your rate; it costs "
                "at most 196 steps (19.6 % of the run)"
            ),
        ),
        (1310, 0.15, "a trial in "),
        (250, 0.9, "a trial in "),
        (5000, 0, "only how far "),
        (None, None, "only how far "),
        (
            1300,
            0.15,
            (
                f"1300 steps are too few for a trial within the budget{LOOKS}For a trial pass "
                "budget=0.16, or use hdet.find_rate"
            ),
        ),
        (
            SHORTEST - 1,
            None,
            (
                f"999 steps are too few for a trial within the budget{LOOKS}For a trial pass "
                "budget=0.2, or use hdet.find_rate"
            ),
        ),
        (150, None, f"150 steps are too few for a trial{LOOKS}Use hdet.find_rate"),
    ],
)
def test_a_trial_is_made_where_it_is_within_the_budget(
    total: int | None, budget: float | None, plan: str
) -> None:
    run = auto_run(scheduler=None, total_steps=total, of={"budget": budget})
    assert run.ensemble.report().startswith(plan) and run.controller.is_too_short == (
        "too few" in plan
    )
    if "too few" in plan or plan.startswith("a trial in the"):
        assert bool(run.steps(ALL).controller.interval.trial.first_losses) == plan.startswith(
            "a trial"
        )


@pytest.mark.parametrize("index", [1, STEPS, STEPS + 5])
def test_a_closure_that_is_missing_in_the_middle_is_asked_for(index: int) -> None:
    run = auto_run().steps(index)
    run.closure = None
    with pytest.raises(
        TypeError,
        match=(
            r"in each of its steps: call ensemble.step\(loss, closure=lambda: losses_of\(model, "
            r"batch\)\)"
        ),
    ):
        run.step()


def of_groups(*rates: float) -> Any:
    """A group for each of the model's tensors."""
    return lambda parameters, **_: torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    )


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize(
    ("groups", "moved"), [(None, [0, 1, 2, 3]), ("each", [0, 1, 2, 3]), ([0, 2], [0, 2])]
)
@pytest.mark.parametrize("first", [1e-6, 0.0])
def test_rates_of_several_groups_move_together(
    first: float, groups: Any, moved: list[int], closure: bool
) -> None:
    """A group that stands still has no part in it."""
    rates = [first, 2e-6, 4e-6, 1e-6]
    knobs = [hdet.LearningRate(0.0, groups)]
    if not first and groups == "each":
        return  # a knob of its own cannot be multiplied
    run = auto_run(optimizer=of_groups(*rates), scheduler=None, knobs=knobs, closure=closure).steps(
        ALL
    )
    factors = [
        group["lr"] / (rate or 1.0)
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True)
    ]
    factor = factors[2]
    assert factor > 100 and factors == pytest.approx(
        [0.0 if not rate else factor if n in moved else 1.0 for n, rate in enumerate(rates)]
    )


@pytest.mark.parametrize("closure", [True, False])
def test_a_warm_up_may_begin_at_rate_0(closure: bool) -> None:
    def warmed(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))

    found = auto_run(1e-6, scheduler=warmed, closure=closure).steps(ALL)
    assert found.controller.interval.rate == 1e-6 and found.ensemble.corrections["lr"] > 100
    if closure:  # a trial is of peaks: the schedule has no part in it
        usual = auto_run(1e-6, scheduler=None).steps(ALL).controller.interval
        assert found.controller.interval.trial.arms[1].losses == pytest.approx(
            usual.trial.arms[1].losses, rel=1e-3
        )


def test_a_rate_of_0_is_waited_for() -> None:
    run = auto_run(0.0, scheduler=None).steps(5)
    with run.ensemble.rescheduling():
        run.optimizer.param_groups[0]["lr"] = 1e-6
    assert run.steps(ALL).controller.done and run.rate > 1e-4


@pytest.mark.parametrize(("lr", "end"), [(1e-6, 2e-6), (0.3, 0.2)])
def test_bounds_of_the_knob_hold(lr: float, end: float) -> None:
    run = auto_run(
        lr, scheduler=None, knobs=[hdet.LearningRate(0.0, bounds=sorted([lr, end]))]
    ).steps(ALL)
    assert run.rate == pytest.approx(end) and any(
        "held at" in note for note in run.ensemble._cycles.notes
    )


def test_an_object_is_for_one_run() -> None:
    run = auto_run()
    with pytest.raises(ValueError, match="belongs to another run: make a new one for each"):
        Run(net=model(), controller=run.controller, total=1500)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 1}, TypeError, ("a torch.nn.Module is needed, got int")),
        ({"before_step": 1}, TypeError, "before_step must be callable"),
        ({"scaler": 1}, TypeError, ("scaler must be a torch GradScaler")),
        ({"place": "disk"}, ValueError, "'device' or 'host'"),
        ({"budget": 1.0}, ValueError, ("for 3 % write 0.03")),
        ({"budget": -0.1}, ValueError, "budget"),
        (
            {"val_batches": (loss_of, iter([1]))},
            TypeError,
            ("a list of batches, got .*list_iterator"),
        ),
        ({"val_batches": (1, [1])}, TypeError, (r"must be \(loss_fn, " r"batches\)")),
        ({"val_batches": (loss_of, [])}, ValueError, "no batch"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hdet.AutoLR(**{"model": model(), **arguments})


def test_the_report_says_what_was_measured() -> None:
    run = auto_run(1e-3)
    to, good, losses, cost = run.steps(ALL).ensemble.report().splitlines()[:4]
    found: RateInterval = run.controller.interval
    assert to == f"learning rate: 0.001 -> {found.suggestion:.2g} (learned less than higher rates)"
    assert good == f"good rates for 1500 steps: {found.low:.2g} to {found.high:.2g}"
    assert losses.startswith("losses after 28 steps: ") and losses.count(" at ") == 5
    assert cost == "cost: 196 steps (13.1 % of the run)"


def test_layers_that_move_unlike_the_others_are_named() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(4)], torch.nn.Linear(6, 1))
    run = auto_run(
        0.01,
        net=net,
        closure=False,
        optimizer=lambda p, lr, weight_decay: torch.optim.AdamW(
            [{"params": net[:3].parameters()}, {"params": net[3:].parameters(), "lr": lr * 100}], lr
        ),
        scheduler=None,
    ).steps(STEPS)
    assert run.controller.layers.keys() == {f"{n}.weight" for n in range(5)}
    assert run.ensemble.report().splitlines()[-1].startswith("the median matrix moved by ")
    assert all(f"{n}.weight by" in run.ensemble.report() for n in (3, 4))


def test_the_cycles_record_has_the_trial_once() -> None:
    run = auto_run(1e-3, every=30).steps(120)
    assert [record["trial"] is None for record in run.records] == [True, False, True, True]
    record = json.loads(json.dumps(run.records[1]["trial"]))
    assert RateInterval.from_dict(record) == run.controller.interval
    assert [
        note for note in run.notes() if note.startswith("learning rate 0.001 -> 0.0")
    ] == run.notes()


def test_a_run_that_is_resumed_in_the_middle_of_a_trial_begins_it_again() -> None:
    saved = auto_run(1e-3).steps(10).saved()
    again = auto_run(1e-3)
    with pytest.warns(UserWarning, match="saved during the search, which begins again"):
        again.loaded(saved)
    assert again.steps(ALL - 1).controller.interval is None
    assert again.steps(1).controller.done and again.ensemble.corrections["lr"] > 2


@pytest.mark.parametrize(
    ("lr", "settings"), [(1e-3, {}), (30.0, {}), (1e-6, WITHOUT), (1e-3, {"data": not_numbers})]
)
def test_a_run_that_is_resumed_after_its_trial_is_the_one_that_went_on(
    lr: float, settings: dict[str, Any]
) -> None:
    run = auto_run(lr, every=1000, **settings).steps(4 * ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = auto_run(lr, every=1000, **settings).loaded(run.saved())
    assert again.controller.interval == run.controller.interval
    assert again.ensemble.report() == "\n".join(
        line for line in run.ensemble.report().splitlines() if not line.startswith("the median")
    )
    assert (
        same(again.steps(5).weights().nan_to_num(), run.steps(5).weights().nan_to_num())
        and again.rate == run.rate
    )


@functools.cache
def searched_state() -> str:
    return json.dumps(auto_run(1e-3).steps(ALL).controller.state_dict())


def damaged(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = place = json.loads(searched_state())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("done",), 1),
        (("cost",), -1.0),
        (("interval",), 3),
        (("repeats",), 0.5),
        (("interval", "low"), "0"),
        (("interval", "trial", "arms"), 3),
        (("interval", "trial", "arms", 0, "rate"), "1"),
        (("interval", "trial", "arms", 1), {}),
        (("interval", "trial", "first_losses"), None),
        (("interval", "total_steps"), 0),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_changed(path: tuple[Any, ...], value: Any) -> None:
    run = auto_run(0.03).steps(3)
    before = run.controller.state_dict()
    with pytest.raises(ValueError, match="AutoLR's"):
        run.controller.load_state_dict(damaged(path, value))
    assert run.controller.state_dict() == before and not run.controller.done
    assert run.steps(ALL - 3).controller.done, "the search goes on"


def overfits(**settings: Any) -> Run:
    """Three batches whose noise is learned by heart."""

    def data(key: int) -> Any:
        x, y = taught(key // 100 % 3, 16)
        return x, y + 2 * torch.randn(
            16, 1, generator=torch.Generator().manual_seed(key // 100 % 3)
        )

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    )
    held_out = [taught(10**6 + number) for number in range(4)]
    return auto_run(
        0.01, net=net, total=1200, data=data, of={"val_batches": (losses_of, held_out)}, **settings
    )


def held_out_loss(run: Run) -> float:
    run.net.eval()
    with torch.no_grad():
        found = [losses_of(run.net, taught(10**6 + number)).double().mean() for number in range(4)]
    run.net.train()
    return float(torch.stack(found).mean())


def test_the_weights_with_the_lowest_held_out_loss_come_back() -> None:
    run, losses = overfits(), []
    for _ in range(60):
        losses.append(held_out_loss(run.steps(20)))
    best = min(losses)
    assert (
        f"best held-out loss: {best:.4g} at step {20 * (losses.index(best) + 1)} of 1200"
        in run.ensemble.report()
    )
    assert losses[
        -1
    ] > 1.1 * best and run.controller.restore_best_weights() == best == held_out_loss(run)


def test_best_weights_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="pass AutoLR"):
        auto_run().controller.restore_best_weights()
    with pytest.raises(ValueError, match="every 20 steps"):
        overfits().controller.restore_best_weights()
    with pytest.raises(ValueError, match="pass total_steps"):
        auto_run(scheduler=None, total_steps=None, of={"val_batches": (loss_of, [batch(0)])})


def test_a_model_without_a_matrix_keeps_its_rate() -> None:
    vector = torch.nn.Parameter(torch.ones(4))
    net = torch.nn.ParameterList([vector])
    *_, ensemble = training(
        net, lambda step: vector.square(), STEPS + 1, controller=hdet.AutoLR(net, budget=0)
    )
    assert ensemble.corrections == {"lr": 1.0} and "stays" in ensemble.report()
