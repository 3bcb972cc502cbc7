"""Base value = schedule x correction, and who may write: the Ensemble, or the user inside
`rescheduling` and by `set_value`."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

import hdet
from tests.harness import Run, Scripted, TwoReplicas, force, policies

from .cases import (
    Toy,
    adamw,
    exact,
    hyperparameters,
    played,
    rates,
    sgd,
    sgd_tensor_lr,
)
from .test_any_scheduler import SCHEDULERS

EPOCHS, STEPS = 12, 3
REFUSED = r"somebody else has written it.*set_value.*rescheduling\(\)"


def harmonic(optimizer: Optimizer) -> torchs.LambdaLR:
    return torchs.LambdaLR(optimizer, lambda t: 1 / (1 + t))


def in_turn(*schedulers: Any) -> Any:
    """What the user steps by hand, one after the other."""
    return SimpleNamespace(step=lambda: [scheduler.step() for scheduler in schedulers])


def plateau(optimizer: Optimizer) -> Any:
    scheduler = torchs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return SimpleNamespace(step=functools.partial(scheduler.step, 1.0))


def at_parts_of_epochs(optimizer: Optimizer) -> Any:
    scheduler, done = torchs.CosineAnnealingWarmRestarts(optimizer, 2), [0]

    def step() -> None:
        done[0] += 1
        scheduler.step(done[0] / 3)

    return SimpleNamespace(step=step)


class OwnStep(torchs.LRScheduler):
    """Copied from one repository to the next: overrides step, keeps no _last_lr."""

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base / (1 + self.last_epoch)


RECURSIVE = ["CosineAnnealingLR", "ExponentialLR", "OneCycleLR", "SequentialLR", "ChainedScheduler"]
USERS: dict[str, Callable[[Optimizer], Any]] = {
    **{name: SCHEDULERS[name] for name in RECURSIVE},
    "LambdaLR from zero": lambda opt: torchs.LambdaLR(opt, lambda t: t / 10),
    "OneCycleLR with momenta": lambda opt: torchs.OneCycleLR(opt, 0.1, EPOCHS + 2),
    "from scratch, then recursive": lambda opt: in_turn(
        harmonic(opt), torchs.ExponentialLR(opt, 0.9)
    ),
    "several steps": lambda opt: in_turn(*[torchs.CosineAnnealingLR(opt, 100)] * 4),
    "plateau": plateau,
    "parts of epochs": at_parts_of_epochs,
    "a step of its own": OwnStep,
}


def ensemble_on(
    toy: Toy, factors: list[float], *, knobs: list[Any] | None = None, rho: float = 1.0, **more: Any
) -> hdet.Ensemble:
    """No scheduler: it is the user's. The correction comes at the end of the first epoch."""
    each = "each" if len(factors) > 1 else None
    knobs = [hdet.LearningRate(0.3, groups=each)] if knobs is None else knobs
    controller = played(rho, factors, 0)
    settings = policies(every=STEPS, **more)
    return hdet.Ensemble(toy.optimizer, None, knobs=knobs, controller=controller, **settings)


def epoch(toy: Toy, ensemble: hdet.Ensemble) -> None:
    for _ in range(STEPS):
        ensemble.step(toy.step())


def corrected(*factors: float, optimizer: Any = sgd) -> tuple[Toy, hdet.Ensemble]:
    """After the first epoch, at 0.5 times 2 if nothing else is said."""
    toy = Toy(optimizer)
    ensemble = ensemble_on(toy, list(factors or (2.0,)))
    epoch(toy, ensemble)
    return toy, ensemble


# -- a schedule that the user steps ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The epoch parameter in", "ignore:Detected call of")
@pytest.mark.parametrize(("optimizer", "rho"), [(sgd, 1.0), (adamw, 1.3), (sgd_tensor_lr, 1.3)])
@pytest.mark.parametrize("name", USERS)
def test_a_scheduler_that_is_stepped_inside_rescheduling_is_corrected_once(
    name: str, optimizer: Any, rho: float
) -> None:
    """In every optimizer step, at rest after it, and for the scheduler's other values too."""
    plain, ours = Toy(optimizer), Toy(optimizer)
    theirs, scheduler = (USERS[name](toy.optimizer) for toy in (plain, ours))
    ensemble = ensemble_on(ours, [2.0, 0.3], rho=rho)
    seen: list[list[float]] = []
    ours.optimizer.register_step_pre_hook(lambda opt, *_: seen.append(rates(opt)))
    tolerance = 1e-5 if optimizer is sgd_tensor_lr else 1e-13

    def times(own: list[float], factor: float = 1.0) -> Any:
        corrections = ensemble.corrections.values()
        found = [rate * c * factor for rate, c in zip(own, corrections, strict=True)]
        return pytest.approx(found, rel=tolerance)

    for number in range(EPOCHS):
        own = rates(plain.optimizer)
        for _ in range(STEPS):
            plain.step()
            expected = times(own, rho)
            loss = ours.step()
            if any(own):  # a step of rate 0 is nobody's
                assert seen[-1] == expected, number
            ensemble.step(loss)
        assert rates(ours.optimizer) == times(own), number
        theirs.step()
        with ensemble.rescheduling():
            scheduler.step()
        groups = zip(ours.optimizer.param_groups, plain.optimizer.param_groups, strict=True)
        assert all(a.get(k) == b.get(k) for a, b in groups for k in ("momentum", "betas"))


def test_a_scheduler_that_is_built_inside_rescheduling_begins_at_the_schedules_own_rates() -> None:
    toy, ensemble = corrected()
    with ensemble.rescheduling():
        assert rates(toy.optimizer) == [0.5, 0.5]
        late = harmonic(toy.optimizer)
    assert rates(toy.optimizer) == [1.0, 1.0]
    for t in range(1, 4):
        with ensemble.rescheduling():
            late.step()
        ensemble.step(toy.step())
        assert rates(toy.optimizer) == pytest.approx([1 / (1 + t)] * 2)


def test_nothing_is_stepped_or_saved_inside_rescheduling() -> None:
    toy = Toy(sgd)
    ensemble = ensemble_on(toy, [2.0])
    calls = (
        toy.step, ensemble.step, ensemble.converge, ensemble.state_dict, ensemble.values,
        lambda: ensemble.load_state_dict({}), lambda: ensemble.set_value("lr", 1.0),
        lambda: ensemble.rescheduling().__enter__(), lambda: ensemble.explore().__enter__(),
    )  # fmt: skip
    with ensemble.rescheduling():
        for call in calls:
            with pytest.raises(ValueError, match=r"inside `with ensemble.rescheduling\(\):`"):
                call()
    with pytest.raises(KeyError), ensemble.rescheduling():
        toy.optimizer.param_groups[0]["lr"] = 0.25
        raise KeyError
    assert rates(toy.optimizer) == [0.25, 0.5]
    ensemble.step(toy.step())


def test_rescheduling_inside_explore_moves_what_acts_in_the_step() -> None:
    """Lightning steps schedulers before a batch ends."""
    toy, drop = Toy(sgd), torch.nn.Dropout(0.2)
    knobs = [hdet.LearningRate(0.3), hdet.Dropout(drop, 0.5)]
    local = {"gradients": "local", "moments": "keep"}
    sync = hdet.Sync(9, **local)  # type: ignore[arg-type]
    run = hdet.Ensemble(toy.optimizer, None, knobs=knobs, replicas=TwoReplicas(), sync=sync)
    force(run, 2.0, 1.0)
    with run.explore():
        replicas = drop.p
        with run.rescheduling():
            assert drop.p == replicas != 0.2 and rates(toy.optimizer) == [0.5, 0.5]
            toy.optimizer.param_groups[0]["lr"] = 0.25
        assert drop.p == replicas and rates(toy.optimizer) == [0.5, 1.0]
    assert drop.p == 0.2
    with run.rescheduling():
        assert rates(toy.optimizer) == [0.25, 0.5]


# -- what is refused -------------------------------------------------------------------------------


def by_hand(toy: Toy, scheduler: Any) -> None:
    toy.optimizer.param_groups[1]["lr"] *= 0.5


def in_place(toy: Toy, scheduler: Any) -> None:
    toy.optimizer.param_groups[1]["lr"].mul_(0.5)


def by_a_scheduler(toy: Toy, scheduler: Any) -> None:
    torchs.ExponentialLR(toy.optimizer, 0.9).step()


def by_its_own_scheduler(toy: Toy, scheduler: Any) -> None:
    scheduler.step()


def by_a_state(toy: Toy, scheduler: Any) -> None:
    state = copy.deepcopy(toy.optimizer.state_dict())
    state["param_groups"][0]["lr"] *= 3
    toy.optimizer.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize(("write", "optimizer"), [
    (by_hand, sgd), (by_hand, sgd_tensor_lr), (in_place, sgd_tensor_lr), (by_a_scheduler, adamw),
    (by_its_own_scheduler, sgd), (by_a_state, sgd),
])  # fmt: skip
def test_a_write_of_somebody_else_is_refused_before_it_is_used(
    write: Any, optimizer: Any, factor: float
) -> None:
    toy = Toy(optimizer)
    scheduler = torchs.ExponentialLR(toy.optimizer, 0.9)
    settings: dict[str, Any] = {"sync": hdet.Sync(STEPS), "controller": Scripted([factor])}
    ensemble = hdet.Ensemble(toy.optimizer, scheduler, **settings)
    epoch(toy, ensemble)
    before = exact(toy.parameters()), ensemble.steps_done
    write(toy, scheduler)
    calls = (
        toy.step, ensemble.step, ensemble.state_dict, ensemble.values,
        lambda: ensemble.explore().__enter__(), lambda: ensemble.rescheduling().__enter__(),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=r"lr of parameter group \d is .*" + REFUSED):
            call()
    ensemble.set_value("lr", 0.25)  # the way out
    assert (exact(toy.parameters()), ensemble.steps_done) == before
    ensemble.step(toy.step())


@pytest.mark.parametrize("key", ["weight_decay", "betas", "lr"])
def test_whatever_a_knob_moves_is_watched_and_nothing_else(key: str) -> None:
    toy = Toy(adamw)
    knobs = [hdet.LearningRate(0.0), hdet.WeightDecay(0.0), hdet.Betas(0.0)]
    ensemble = hdet.Ensemble(toy.optimizer, None, knobs=knobs)
    ensemble.step(toy.step())
    group = toy.optimizer.param_groups[0]
    group["eps"] = 1e-6
    ensemble.step(toy.step())
    group[key] = (0.8, 0.9) if key == "betas" else 0.3
    with pytest.raises(ValueError, match=REFUSED):
        ensemble.step(toy.step())


def test_a_write_inside_the_optimizers_step_is_refused() -> None:
    """A scheduler in a hook would compute from this replica's rate."""
    toy = Toy(sgd)
    scheduler = torchs.ExponentialLR(toy.optimizer, 0.9)
    toy.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    ensemble = ensemble_on(toy, [1.0], rho=1.3)
    with pytest.raises(ValueError, match=r"lr was changed to .* inside optimizer.step\(\)"):
        toy.step()
    assert rates(toy.optimizer) == [0.5] * 2
    ensemble.close()


# -- base values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, sgd_tensor_lr])
def test_a_value_that_is_set_is_the_base_value_and_its_schedule_goes_on(optimizer: Any) -> None:
    plain, toy = Toy(optimizer), Toy(optimizer)
    scheduler = harmonic(plain.optimizer)
    ensemble = hdet.Ensemble(toy.optimizer, harmonic(toy.optimizer), sync=hdet.Sync(STEPS))
    epoch(toy, ensemble)
    ensemble.set_value("lr", 0.01)
    assert rates(toy.optimizer) == pytest.approx([0.01, 0.01])
    assert ensemble.values() == {"lr": pytest.approx(0.01)}
    for _ in range(STEPS):
        plain.step()
        scheduler.step()
    factor = 0.01 / rates(plain.optimizer)[0]
    for _ in range(2 * STEPS):
        plain.step()
        scheduler.step()
        ensemble.step(toy.step())
        expected = [rate * factor for rate in rates(plain.optimizer)]
        assert rates(toy.optimizer) == pytest.approx(expected, rel=1e-6)


def test_every_kind_of_value_can_be_set() -> None:
    """On a log and on a linear scale, of 1 / (1 - beta), of a product."""
    optimizer = torch.optim.AdamW(torch.nn.Linear(3, 1).parameters(), lr=0.1, weight_decay=0.2)
    knobs = [hdet.LearningRate(0.0), hdet.WeightDecay(0.0, product=True), hdet.Betas(0.0, [0])]
    run = hdet.Ensemble(
        optimizer, knobs=knobs, replicas=TwoReplicas(), sync=hdet.Sync(9, moments="reset")
    )
    force(run, 2.0, 0.5, 1.0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.2, pytest.approx(0.05))
    run.set_value("weight_decay", 0.01)
    run.set_value("beta1", 0.95)
    assert (group["lr"], group["weight_decay"]) == (0.2, pytest.approx(0.01))
    assert group["betas"] == (pytest.approx(0.95), 0.999)
    run.set_value("lr", 0.4)  # the product stays, as where a controller moves the rate
    assert (group["lr"], group["weight_decay"]) == (0.4, pytest.approx(0.005))


def test_a_base_value_off_the_schedule_is_set_too() -> None:
    """SoftmaxController's decay leaves the schedule: a base value decays from where it is."""
    toy = Toy(sgd)
    for group, rate in zip(toy.optimizer.param_groups, (0.01, 0.005), strict=True):
        group.update(lr=rate, initial_lr=rate, min_lr=1e-4)
    settings: dict[str, Any] = {"sync": hdet.Sync(3), "total_steps": 60, "replicas": TwoReplicas()}
    controller = hdet.SoftmaxController(decay="floor")
    ensemble = hdet.Ensemble(toy.optimizer, None, controller=controller, **settings)
    epoch(toy, ensemble)
    epoch(toy, ensemble)
    before = rates(toy.optimizer)
    assert before[0] < 0.01 and before[1] == pytest.approx(before[0] / 2)
    ensemble.set_value("lr", before[0] / 2)
    ensemble.step(toy.step())
    assert rates(toy.optimizer) == pytest.approx([rate / 2 for rate in before])


@pytest.mark.parametrize(("name", "value", "why"), [
    ("rate", 1.0, "no knob 'rate'"), ("lr", 0.0, "no correction"), ("lr", math.nan, "no corr"),
    ("lr", -1.0, "no correction"), ("lr", 2.0, "no correction leads there"),
])  # fmt: skip
def test_a_value_that_cannot_be_set_is_refused(name: str, value: float, why: str) -> None:
    toy = Toy(sgd)
    ensemble = hdet.Ensemble(toy.optimizer, None, knobs=[hdet.LearningRate(bounds=(0.1, 1.0))])
    with pytest.raises(ValueError, match=why):
        ensemble.set_value(name, value)
    with ensemble.explore(), pytest.raises(ValueError, match="explore"):
        ensemble.set_value("lr", 0.4)
    assert rates(toy.optimizer) == [0.5, 0.5]
    ensemble.step(toy.step())


def test_a_controller_is_shown_the_schedule_and_the_values_that_the_groups_hold() -> None:
    """The schedule without the correction; of a product too, whose decay follows the rate's."""
    seen = []

    class Looks(Scripted):
        def may_move(self, knob: Any) -> bool:
            return True

        def learn(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
            held = [group["lr"], group["weight_decay"]]
            seen.append((evidence.scheduled[0], evidence.peak[0], evidence.values[:], held))
            return super().learn(evidence)

    toy = Toy(adamw)
    group, scheduler = toy.optimizer.param_groups[0], torchs.StepLR(toy.optimizer, 1, 0.5)
    knobs: Any = [hdet.LearningRate(0.0), hdet.WeightDecay(0.0, product=True)]
    controller = Looks([[2.0, 1.0], [0.5, 1.0], [0.5, 1.0]])
    ensemble = hdet.Ensemble(toy.optimizer, knobs=knobs, controller=controller, sync=hdet.Sync(1))
    for _ in range(4):
        ensemble.step(toy.step())
        with ensemble.rescheduling():
            scheduler.step()
    assert [scheduled for scheduled, *_ in seen] == [0.5, 0.25, 0.125, 0.0625]
    assert {peak for _, peak, *_ in seen} == {0.5}
    assert [values for *_, values, _ in seen] == [pytest.approx(held) for *_, held in seen]
    assert [held for *_, held in seen] == [
        pytest.approx(of) for of in ([0.5, 0.1], [0.5, 0.05], [0.125, 0.1], [0.03125, 0.2])
    ]


def restarts(optimizer: Any) -> Any:
    parts = [torchs.CosineAnnealingWarmRestarts(optimizer, 9), torchs.StepLR(optimizer, 6, 0.3)]
    return torchs.SequentialLR(optimizer, parts, [20])


@pytest.mark.parametrize("make", [lambda o: torchs.StepLR(o, 6, 0.3), restarts, None])
@pytest.mark.parametrize("at", [11, 13, 24])
def test_a_rate_that_is_a_tensor_is_resumed_bitwise(make: Any, at: int) -> None:
    """Between two steps of its schedule, corrected."""
    make_run = lambda: Run(
        lr=torch.tensor(3e-3), scheduler=make, controller=Scripted([0.7, 1.3, 1.1]), spread=0.0
    )
    run = make_run().steps(at)
    other = make_run().loaded(run.saved())
    assert torch.equal(run.steps(12).weights(), other.steps(12).weights())
    assert run.rate == other.rate


def test_a_state_comes_back_from_json() -> None:
    """MultiStepLR's milestones are keys, and whole numbers; a beta stays below 1."""

    def made() -> tuple[Toy, hdet.Ensemble]:
        toy = Toy(adamw)
        knobs = [hdet.LearningRate(), hdet.WeightDecay(), hdet.Betas()]
        scheduler, controller = torchs.MultiStepLR(toy.optimizer, [2, 5]), Scripted([0.5])
        controller.may_move = lambda knob: True  # type: ignore[method-assign]
        settings = {"knobs": knobs, "controller": controller, "sync": hdet.Sync(2, moments="reset")}
        return toy, hdet.Ensemble(toy.optimizer, scheduler, **settings)  # type: ignore[arg-type]

    (toy, ensemble), (other, resumed) = made(), made()
    for _ in range(3):
        ensemble.step(toy.step())
    resumed.load_state_dict(json.loads(json.dumps(ensemble.state_dict())))
    later = copy.deepcopy(toy.optimizer.state_dict())
    later["param_groups"][1]["lr"] *= 77.0  # a state of another moment
    other.optimizer.load_state_dict(later)
    other.take(toy)
    for _ in range(4):
        assert hyperparameters(other.optimizer) == hyperparameters(toy.optimizer)
        ensemble.step(toy.step())
        resumed.step(other.step())
    assert exact(other.parameters()) == exact(toy.parameters())
    assert set(ensemble.corrections.values()) == {0.5}
