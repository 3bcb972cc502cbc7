"""Values that somebody else writes between steps: the user's own scheduler, once an epoch, or the user's own hand.

What a torch scheduler writes is the schedule's, corrected once, whether it computes from what stands in the group or from scratch. What
anybody else writes is the new base value: it is neither undone nor corrected again.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

import hdet
from tests.harness import Scripted, TwoReplicas, force, policies
from tests.schedulers.cases import Toy, adamw, adamw_tensor_lr, exact, hyperparameters, played, rates, sgd, sgd_tensor_lr
from tests.schedulers.test_any_scheduler import SCHEDULERS

EPOCHS, STEPS = 12, 3
TAKEN = "taken as the base value in force"


class FromScratch(torchs.LRScheduler):
    """A subclass of a user's: computed from the base rates, with a warm-up."""

    def get_lr(self) -> list[Any]:
        return [base * min(1.0, (self.last_epoch + 1) / 4) / (1 + self.last_epoch) for base in self.base_lrs]


class Both(torchs.LRScheduler):
    """From scratch while it warms up, from what stands there afterwards, with a least value."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch < 4:
            return [base * (self.last_epoch + 1) / 4 for base in self.base_lrs]
        return [max(group["lr"] * 0.7, 0.04) for group in self.optimizer.param_groups]


class StepOfItsOwn(torchs.LRScheduler):
    """As some that are copied from one repository to the next: overrides step, keeps no _last_lr."""

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[Any]:
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


def harmonic(optimizer: Optimizer) -> torchs.LambdaLR:
    return torchs.LambdaLR(optimizer, lambda t: 1 / (1 + t))


def one_after_the_other(*schedulers: Any) -> Any:
    """What the user steps by hand."""
    return SimpleNamespace(step=lambda: [scheduler.step() for scheduler in schedulers])


def four_steps(scheduler: Any) -> Any:
    return one_after_the_other(*[scheduler] * 4)


def told_its_epoch(name: str) -> Callable[[Optimizer], Any]:
    def build(optimizer: Optimizer) -> Any:
        scheduler = SCHEDULERS[name](optimizer)
        return SimpleNamespace(step=lambda: scheduler.step(scheduler.last_epoch + 1))

    return build


USERS: dict[str, Callable[[Optimizer], Any]] = {
    **SCHEDULERS,
    "CosineAnnealingLR, twice there and back": lambda opt: torchs.CosineAnnealingLR(opt, 3, eta_min=0.01),
    "LinearLR up from almost nothing": lambda opt: torchs.LinearLR(opt, 1e-3, total_iters=9),
    "LambdaLR from zero": lambda opt: torchs.LambdaLR(opt, lambda t: t / 10),
    "LambdaLR that writes what stands there already": lambda opt: torchs.LambdaLR(opt, lambda t: 2**t / 64),
    "OneCycleLR with momenta": lambda opt: torchs.OneCycleLR(opt, 0.1, EPOCHS + 2),
    "CyclicLR with momenta": lambda opt: torchs.CyclicLR(opt, 0.01, 0.1, 4),
    "SequentialLR of LambdaLR and StepLR": lambda opt: torchs.SequentialLR(
        opt, [torchs.LambdaLR(opt, lambda t: 0.1 + t / 10), torchs.StepLR(opt, 2, 0.5)], milestones=[5]
    ),
    "ChainedScheduler of LambdaLR and ExponentialLR": lambda opt: torchs.ChainedScheduler([harmonic(opt), torchs.ExponentialLR(opt, 0.9)]),
    "ChainedScheduler of SequentialLR": lambda opt: torchs.ChainedScheduler(
        [
            torchs.SequentialLR(opt, [torchs.LinearLR(opt, 0.1, total_iters=4), torchs.CosineAnnealingLR(opt, 9)], milestones=[4]),
            torchs.ExponentialLR(opt, 0.9),
        ]
    ),
    "subclass from scratch": FromScratch,
    "subclass of both kinds": Both,
    "subclass with a step of its own": StepOfItsOwn,
    "plateau": lambda opt: SimpleNamespace(step=functools.partial(torchs.ReduceLROnPlateau(opt, factor=0.5, patience=0).step, 1.0)),
    "from scratch, then recursive": lambda opt: one_after_the_other(harmonic(opt), torchs.ExponentialLR(opt, 0.9)),
    "recursive, then from scratch": lambda opt: one_after_the_other(*reversed([harmonic(opt), torchs.ExponentialLR(opt, 0.9)])),
    "StepLR that is told its epoch": told_its_epoch("StepLR"),
    "CosineAnnealingLR that is told its epoch": told_its_epoch("CosineAnnealingLR"),
    "ExponentialLR that is told its epoch": told_its_epoch("ExponentialLR"),
    # as accelerate steps those that it has prepared
    "CosineAnnealingLR, four steps": lambda opt: four_steps(torchs.CosineAnnealingLR(opt, 100, eta_min=1e-2)),
    "CosineAnnealingLR, four steps, past its end": lambda opt: four_steps(torchs.CosineAnnealingLR(opt, 30)),
    "StepLR, four steps": lambda opt: four_steps(torchs.StepLR(opt, 5, 0.5)),
    "ExponentialLR, four steps": lambda opt: four_steps(torchs.ExponentialLR(opt, 0.95)),
    "LambdaLR, four steps": lambda opt: four_steps(torchs.LambdaLR(opt, lambda t: 0.97**t)),
    "LinearLR, four steps": lambda opt: four_steps(torchs.LinearLR(opt, 0.1, 1, 50)),
}


def ensemble_on(
    toy: Toy, factors: list[float], *, knobs: list[Any] | None = None, cycle: int = 0, rho: float = 1.0, **settings: Any
) -> hdet.Ensemble:
    """No scheduler: it is the user's. The correction comes at the end of the first epoch."""
    knobs = [hdet.LearningRate(0.3, groups="each" if len(factors) > 1 else None)] if knobs is None else knobs
    return hdet.Ensemble(toy.optimizer, None, knobs=knobs, controller=played(rho, factors, cycle), **policies(every=STEPS, **settings))


def epoch(toy: Toy, ensemble: hdet.Ensemble) -> None:
    for _ in range(STEPS):
        ensemble.step(toy.step())


def corrected(*factors: float, optimizer: Any = sgd) -> tuple[Toy, hdet.Ensemble]:
    """After the first epoch, at 0.5 times 2 if nothing else is said."""
    toy = Toy(optimizer)
    ensemble = ensemble_on(toy, list(factors or (2.0,)))
    epoch(toy, ensemble)
    return toy, ensemble


def times(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= factor


@contextmanager
def silent() -> Iterator[None]:
    """No warning of ours, and none of torch's beside those that it gives without us."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The epoch parameter in")
        warnings.filterwarnings("ignore", message="Detected call of")
        yield


@pytest.mark.filterwarnings("ignore:The epoch parameter in", "ignore:Detected call of")
@pytest.mark.parametrize(("optimizer", "rho"), [(sgd, 1.0), (adamw, 1.3), (sgd_tensor_lr, 1.3), (adamw_tensor_lr, 1.0)])
@pytest.mark.parametrize("name", USERS)
def test_a_scheduler_that_the_user_steps_once_an_epoch_is_corrected_once(name: str, optimizer: Any, rho: float) -> None:
    """Schedule times correction: in every optimizer step, at rest after it, and for the scheduler's other values too."""
    plain, ours = Toy(optimizer), Toy(optimizer)
    schedulers = [USERS[name](toy.optimizer) for toy in (plain, ours)]
    ensemble = ensemble_on(ours, [2.0, 0.3], rho=rho)
    seen: list[list[float]] = []
    ours.optimizer.register_step_pre_hook(lambda opt, *_: seen.append(rates(opt)))
    tolerance = 1e-13 if optimizer in (sgd, adamw) else 1e-5
    for epoch in range(EPOCHS):
        factors = list(ensemble.corrections.values())
        own = rates(plain.optimizer)
        for _ in range(STEPS):
            plain.step()
            loss = ours.step()
            if any(own):  # a step of rate 0 is nobody's
                assert seen[-1] == pytest.approx([rate * c * rho for rate, c in zip(own, factors, strict=True)], rel=tolerance), epoch
            with silent():
                ensemble.step(loss)
        factors = list(ensemble.corrections.values())
        assert rates(ours.optimizer) == pytest.approx([rate * c for rate, c in zip(own, factors, strict=True)], rel=tolerance), epoch
        assert ensemble.schedule.values() == pytest.approx(own, rel=tolerance)
        for scheduler in schedulers:
            scheduler.step()
        for mine, theirs in zip(ours.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
            assert {k: mine[k] for k in ("momentum", "betas") if k in mine} == {k: theirs[k] for k in ("momentum", "betas") if k in theirs}


@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_that_is_halved_by_hand_is_halved(tensor: bool) -> None:
    toy = Toy(sgd_tensor_lr if tensor else sgd)
    for group in toy.optimizer.param_groups:
        group["lr"] = torch.tensor(0.01) if tensor else 0.01
    ensemble = ensemble_on(toy, [2.0])
    epoch(toy, ensemble)
    assert rates(toy.optimizer) == pytest.approx([0.02, 0.02])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(5):
            times(toy.optimizer, 0.5)
            for _ in range(2):
                ensemble.step(toy.step())
    (once,) = warned
    assert TAKEN in str(once.message) and "rescheduling()" in str(once.message)
    assert rates(toy.optimizer) == pytest.approx([0.000625, 0.000625])
    assert ensemble.values() == pytest.approx({"lr": 0.000625}) and ensemble.schedule.values() == pytest.approx([0.0003125])


def test_corrections_after_a_write_are_relative_to_it() -> None:
    toy, ensemble = corrected()
    ensemble.engine.controller.factors = [[2.0]] * 2  # once more
    toy.optimizer.param_groups[0]["lr"] = 0.375
    with pytest.warns(UserWarning, match=TAKEN):
        epoch(toy, ensemble)
    assert rates(toy.optimizer) == [0.75, 2.0] and ensemble.corrections == {"lr": 4.0}


# -- what cannot be told apart ------------------------------------------------------------------------------------------------


class Unknowable(torchs.LRScheduler):
    """Its rates are no function that can be asked again."""

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.3 / (1 + self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        raise NotImplementedError


class Noisy(torchs.LRScheduler):
    def get_lr(self) -> list[Any]:
        return [base * (1 + float(torch.rand(()))) for base in self.base_lrs]


@pytest.mark.parametrize("where", ["optimizer", "ensemble", "state"])
@pytest.mark.parametrize("kind", [Unknowable, Noisy])
def test_a_scheduler_that_cannot_be_judged_is_refused_by_name(kind: Any, where: str) -> None:
    toy = Toy(sgd)
    scheduler = kind(toy.optimizer)
    ensemble = ensemble_on(toy, [2.0])
    epoch(toy, ensemble)
    scheduler.step()
    before, weights = rates(toy.optimizer), exact(toy.parameters())
    state = torch.get_rng_state()
    for _ in range(2):  # and goes on to be
        with pytest.raises(ValueError, match=rf"{kind.__name__}.*rescheduling\(\)"):
            {"optimizer": toy.optimizer.step, "ensemble": ensemble.step, "state": toy.optimizer.state_dict}[where]()
    assert torch.equal(torch.get_rng_state(), state)
    assert rates(toy.optimizer) == before and exact(toy.parameters()) == weights
    with ensemble.rescheduling():  # the way out: what stands there is the schedule's
        pass
    assert rates(toy.optimizer) == [2 * rate for rate in before]
    ensemble.step(toy.step())


def test_what_was_written_over_a_value_from_scratch_is_refused() -> None:
    """Half of the schedule's own value, or of the corrected one?"""
    toy = Toy(sgd)
    scheduler = harmonic(toy.optimizer)
    epoch(toy, ensemble_on(toy, [2.0]))
    scheduler.step()
    times(toy.optimizer, 0.7)
    with pytest.raises(ValueError, match=r"lr.*0\.175.*LambdaLR.*rescheduling\(\)"):
        toy.step()


def test_a_scheduler_that_was_built_on_corrected_rates_is_refused() -> None:
    toy, ensemble = corrected()
    late = harmonic(toy.optimizer)
    ensemble.step(toy.step())
    late.step()
    with pytest.raises(ValueError, match=r"LambdaLR was built while .*rescheduling\(\)"):
        toy.step()


def test_a_scheduler_of_another_optimizer_and_one_that_is_gone_say_nothing() -> None:
    toy, stranger = Toy(sgd), Toy(sgd)
    foreign, gone = harmonic(stranger.optimizer), harmonic(toy.optimizer)
    epoch(toy, ensemble_on(toy, [2.0]))
    with silent():
        foreign.step()
        gone.step()
    del gone
    for group in toy.optimizer.param_groups:
        group["lr"] = 0.25
    with pytest.warns(UserWarning, match=TAKEN):
        toy.step()
    assert rates(toy.optimizer) == [0.25, 0.25]


@pytest.mark.filterwarnings("ignore:The epoch parameter in", "ignore:Detected call of")
def test_several_steps_of_one_that_is_made_of_others_are_refused_where_they_lead_elsewhere() -> None:
    toy = Toy(sgd)
    members = [torchs.LinearLR(toy.optimizer, 0.1, 1, 9), torchs.CosineAnnealingLR(toy.optimizer, 100)]
    scheduler = four_steps(torchs.SequentialLR(toy.optimizer, members, [9]))
    ensemble = ensemble_on(toy, [4.0])
    with pytest.raises(ValueError, match=r"SequentialLR has stepped several times.*rescheduling"):
        for _ in range(5):
            epoch(toy, ensemble)
            scheduler.step()


# -- the way out -----------------------------------------------------------------------------------------------------------


def test_what_is_written_inside_rescheduling_is_the_schedules() -> None:
    """timm's schedulers, and loops that compute the rate by themselves."""
    toy = Toy(sgd)
    ensemble = ensemble_on(toy, [2.0])
    with silent():
        for step in range(9):
            with ensemble.rescheduling():
                if step > STEPS:
                    assert rates(toy.optimizer) == [0.5 / step] * 2
                for group in toy.optimizer.param_groups:
                    group["lr"] = 0.5 / (1 + step)
            assert rates(toy.optimizer) == [(2.0 if step >= STEPS else 1.0) * 0.5 / (1 + step)] * 2
            ensemble.step(toy.step())


def test_a_scheduler_that_is_built_inside_rescheduling_begins_at_the_schedules_own_rates() -> None:
    toy, ensemble = corrected()
    with ensemble.rescheduling():
        assert rates(toy.optimizer) == [0.5, 0.5]
        late = harmonic(toy.optimizer)
    assert rates(toy.optimizer) == [1.0, 1.0]
    for t in range(1, 4):
        with silent():
            late.step()
            ensemble.step(toy.step())
        assert rates(toy.optimizer) == pytest.approx([1 / (1 + t)] * 2)


def test_a_schedule_that_is_built_after_many_writes_by_hand_is_found() -> None:
    toy = Toy(sgd)
    ensemble = ensemble_on(toy, [0.5])
    epoch(toy, ensemble)
    times(toy.optimizer, 0.99)
    with pytest.warns(UserWarning, match=TAKEN):
        epoch(toy, ensemble)
    for _ in range(40):
        times(toy.optimizer, 0.99)
        epoch(toy, ensemble)
    times(toy.optimizer, 0.99)
    with ensemble.rescheduling():
        began = toy.optimizer.param_groups[0]["lr"]
        scheduler = torchs.LambdaLR(toy.optimizer, lambda t: 0.9**t)
    for t in range(1, 11):
        ensemble.step(toy.step())
        scheduler.step()
        assert ensemble.value("lr") == pytest.approx(0.5 * began * 0.9**t, rel=1e-9)


def test_rescheduling_puts_corrections_back_after_an_error() -> None:
    toy, ensemble = corrected()
    with pytest.raises(KeyError), ensemble.rescheduling():
        toy.optimizer.param_groups[0]["lr"] = 0.25
        raise KeyError
    assert rates(toy.optimizer) == [0.5, 1.0]


def test_nothing_is_stepped_or_saved_inside_rescheduling() -> None:
    toy = Toy(sgd)
    ensemble = ensemble_on(toy, [2.0])
    calls = (
        toy.step, ensemble.step, ensemble.converge, ensemble.state_dict, lambda: ensemble.load_state_dict({}), toy.optimizer.state_dict,
        ensemble.values, lambda: ensemble.rescheduling().__enter__(), lambda: ensemble.explore().__enter__(),
    )  # fmt: skip
    with ensemble.rescheduling():
        for call in calls:
            with pytest.raises(ValueError, match=r"inside `with ensemble.rescheduling\(\):`"):
                call()
    with ensemble.explore(), pytest.raises(ValueError, match="inside `with ensemble.explore"):
        ensemble.rescheduling().__enter__()
    ensemble.step(toy.step())


# -- states ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False], ids=["the ensemble steps it", "the user steps it"])
@pytest.mark.parametrize("first", ["optimizer", "scheduler", "ensemble"])
@pytest.mark.parametrize("optimizer", [sgd, sgd_tensor_lr])
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "LambdaLR", "OneCycleLR", "StepLR"])
def test_resume_with_a_correction_goes_on_exactly(name: str, optimizer: Any, first: str, own: bool) -> None:
    """Saved where the scheduler has just written its own values. What the optimizer's state brings is not a write, in any order."""

    def build() -> tuple[Toy, Any, hdet.Ensemble]:
        toy = Toy(optimizer)
        scheduler = SCHEDULERS[name](toy.optimizer)
        return toy, scheduler, hdet.Ensemble(toy.optimizer, scheduler if own else None, sync=hdet.Sync(STEPS), controller=Scripted([2.0]))

    def go_on(toy: Toy, scheduler: Any, ensemble: hdet.Ensemble) -> None:
        epoch(toy, ensemble)
        if not own:
            scheduler.step()

    whole, fresh = build(), build()
    for _ in range(3):
        go_on(*whole)
    saved = copy.deepcopy([part.state_dict() for part in (whole[0].optimizer, *whole[1:])])
    assert rates(whole[0].optimizer) == [float(group["lr"]) for group in saved[0]["param_groups"]]
    assert rates(whole[0].optimizer) == pytest.approx([2 * float(rate) for rate in whole[1].get_last_lr()]) or name != "LambdaLR"
    saved[0]["param_groups"][1]["lr"] *= 77.0  # a state of another moment
    loads = dict(zip(("optimizer", "scheduler", "ensemble"), zip((fresh[0].optimizer, *fresh[1:]), saved, strict=True), strict=True))
    if own:
        del loads["scheduler"]  # its state is in the Ensemble's
    for key in sorted(loads, key=lambda key: key != first):
        loads[key][0].load_state_dict(loads[key][1])
    fresh[0].take(whole[0])
    with silent():
        for _ in range(3):
            assert hyperparameters(fresh[0].optimizer) == hyperparameters(whole[0].optimizer)
            go_on(*whole)
            go_on(*fresh)
    assert exact(fresh[0].parameters()) == exact(whole[0].parameters())
    fresh[2].step(fresh[0].step())
    before = rates(fresh[0].optimizer)
    times(fresh[0].optimizer, 0.5)
    with pytest.warns(UserWarning, match=TAKEN):
        fresh[0].step()
    assert rates(fresh[0].optimizer) == [rate / 2 for rate in before]


def test_a_state_of_the_optimizer_that_is_loaded_in_the_middle_of_a_run_is_a_write() -> None:
    toy = Toy(sgd)
    before = copy.deepcopy(toy.optimizer.state_dict())
    ensemble = ensemble_on(toy, [2.0])
    epoch(toy, ensemble)
    toy.optimizer.load_state_dict(before)
    with pytest.warns(UserWarning, match=TAKEN):
        ensemble.step(toy.step())
    assert rates(toy.optimizer) == [0.5, 0.5] and ensemble.schedule.values() == [0.25]


# -- controllers and knobs that do more --------------------------------------------------------------------------------------


def test_a_base_value_off_the_schedule_is_set_by_hand_too() -> None:
    """SoftmaxController's decay leaves the schedule: there is no correction of it, but a base value that decays from where it is."""
    toy = Toy(sgd)
    for group, rate in zip(toy.optimizer.param_groups, (0.01, 0.005), strict=True):
        group.update(lr=rate, initial_lr=rate, min_lr=1e-4)
    ensemble = hdet.Ensemble(
        toy.optimizer, None, controller=hdet.SoftmaxController(decay="floor"), sync=hdet.Sync(3), total_steps=60, replicas=TwoReplicas()
    )
    epoch(toy, ensemble)
    epoch(toy, ensemble)
    before = rates(toy.optimizer)
    assert before[0] < 0.01 and before[1] == pytest.approx(before[0] / 2)
    times(toy.optimizer, 0.5)
    with pytest.warns(UserWarning, match=TAKEN):
        ensemble.step(toy.step())
    assert rates(toy.optimizer) == pytest.approx([rate / 2 for rate in before])
    toy.optimizer.param_groups[1]["lr"] *= 0.5
    with pytest.raises(ValueError, match="groups"):
        toy.step()


def test_bounds_hold_what_is_written() -> None:
    toy = Toy(sgd)
    scheduler = torchs.StepLR(toy.optimizer, 1, 0.5)
    ensemble = hdet.Ensemble(toy.optimizer, knobs=[hdet.LearningRate(bounds=(0.1, 0.8))], sync=hdet.Sync(100))
    ensemble.engine.corrections = [4.0]
    for rate in (0.8, 0.8, 0.5, 0.25, 0.125, 0.1, 0.1):  # of 2.0, 1.0, 0.5 ...: the schedule goes on behind the bound
        ensemble.step(toy.step())
        assert rates(toy.optimizer) == [rate, rate]
        scheduler.step()
    toy.step()
    toy.optimizer.param_groups[0]["lr"] = 5.0
    with pytest.warns(UserWarning, match=TAKEN):
        toy.step()
    assert rates(toy.optimizer) == [0.8, 0.1] and ensemble.schedule.values() == [pytest.approx(0.2)]


def test_a_schedule_beyond_a_bound_is_a_schedule_without_a_correction_too() -> None:
    toy = Toy(sgd)
    scheduler = torchs.StepLR(toy.optimizer, 1, 0.5)
    ensemble = ensemble_on(toy, [1.0], knobs=[hdet.LearningRate(bounds=(0.2, 0.8))])
    for own in (0.5, 0.25, 0.125, 0.0625):
        ensemble.step(toy.step())
        assert rates(toy.optimizer) == [max(own, 0.2)] * 2 and ensemble.schedule.values() == [own]
        scheduler.step()


@pytest.mark.filterwarnings("ignore:lr was set")
def test_looking_for_schedulers_is_done_when_there_is_something_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in steps without a write, not without a correction, and not in each step of a loop that writes in each."""
    looked = []
    monkeypatch.setattr("gc.get_objects", lambda *a: looked.append(1) or [])
    toy = Toy(sgd)
    ensemble = ensemble_on(toy, [2.0], cycle=2)
    for step in range(3 * STEPS - 1):
        toy.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        ensemble.step(toy.step())
    assert not looked
    for _ in range(20):
        ensemble.step(toy.step())
    assert len(looked) <= 1
    for step in range(200):
        toy.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        ensemble.step(toy.step())
    assert len(looked) < 12


def test_decisions_are_of_what_was_scheduled() -> None:
    """Controllers are shown the user's schedule without the correction, and the value in force with it."""
    seen = []

    class Looks(Scripted):
        def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
            seen.append((evidence.scheduled[0], evidence.values[0], evidence.peak[0]))
            return super().learn(evidence)

    toy = Toy(sgd)
    scheduler = torchs.StepLR(toy.optimizer, 1, 0.5)
    ensemble = hdet.Ensemble(toy.optimizer, None, sync=hdet.Sync(STEPS), controller=Looks([2.0]))
    for _ in range(4):
        epoch(toy, ensemble)
        scheduler.step()
    assert seen == [(0.5, 0.5, 0.5), (0.25, 0.5, 0.5), (0.125, 0.25, 0.5), (0.0625, 0.125, 0.5)]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, hdet.FusedAdamW])
def test_a_write_that_comes_before_the_step_is_what_the_step_uses(kind: Any) -> None:
    """A user's write of decay and rate together; the decay of a product follows the new rate's correction, not twice."""
    optimizer = kind(torch.nn.Linear(3, 1).parameters(), lr=0.1, weight_decay=0.2)
    run = hdet.Ensemble(optimizer, knobs=[hdet.LearningRate(0.0), hdet.WeightDecay(0.0, product=True)], replicas=TwoReplicas())
    force(run, 2.0, 0.5)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.2, pytest.approx(0.05))
    group["lr"], group["weight_decay"] = 0.4, 0.01
    with pytest.warns(UserWarning, match="lr was set to 0.4"):
        optimizer.step()
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.4), pytest.approx(0.01))
    assert run.schedule.values() == [pytest.approx(0.2), pytest.approx(0.04)]
    force(run, 4.0, 0.5)
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.8), pytest.approx(0.005))


def test_betas_are_written_like_rates() -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(3, 1).parameters(), lr=0.1)
    run = hdet.Ensemble(optimizer, knobs=[hdet.Betas(0.0, which=[0])])
    force(run, 2.0)
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.999)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    with pytest.warns(UserWarning, match=r"beta1 was set to 0\.9"):
        run.step()
    assert optimizer.param_groups[0]["betas"] == (pytest.approx(0.9), 0.99) and run.schedule.values() == [pytest.approx(0.8)]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_moves_momentum_is_corrected_there_too() -> None:
    plain, ours = Toy(sgd), Toy(sgd)
    schedulers = [torchs.OneCycleLR(toy.optimizer, 0.1, 12) for toy in (plain, ours)]
    run = hdet.Ensemble(ours.optimizer, knobs=[hdet.GroupValue("momentum", 0.0, valid_on_train_loss=True)])
    force(run, 2.0)
    for _ in range(10):
        for scheduler in schedulers:
            scheduler.step()
        ours.step()
        own = plain.optimizer.param_groups[0]["momentum"]
        assert ours.optimizer.param_groups[0]["momentum"] == pytest.approx(1 - (1 - own) / 2)
        assert rates(ours.optimizer) == rates(plain.optimizer)
        run.step()


# -- odd moments -------------------------------------------------------------------------------------------------------------


def test_a_write_inside_the_optimizers_step_is_refused() -> None:
    """A scheduler in a hook would compute from this replica's rate, or write what is taken back at the step's end."""
    toy = Toy(sgd)
    scheduler = torchs.ExponentialLR(toy.optimizer, 0.9)
    toy.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    ensemble = ensemble_on(toy, [1.0])
    ensemble.step(toy.step())  # a single replica explores nothing
    assert rates(toy.optimizer) == [0.5 * 0.9] * 2
    ensemble.close()
    ensemble_on(toy, [1.0], rho=1.3)
    with pytest.raises(ValueError, match=r"lr was changed to .* inside optimizer.step\(\)"):
        toy.step()
    assert rates(toy.optimizer) == [0.5 * 0.9] * 2


def test_a_rate_that_the_log_writes_counts() -> None:
    toy = Toy(sgd)
    epoch(toy, ensemble_on(toy, [2.0], log=lambda record, step: toy.optimizer.param_groups[0].update(lr=0.125)))
    with pytest.warns(UserWarning, match=TAKEN):
        toy.step()
    assert rates(toy.optimizer) == [0.125, 1.0]


@pytest.mark.filterwarnings("ignore:lr was set")
def test_a_rate_in_place_of_one_that_is_a_tensor() -> None:
    """In place, by a new tensor, by a number."""
    toy, ensemble = corrected(optimizer=sgd_tensor_lr)
    first, second = toy.optimizer.param_groups
    first["lr"].mul_(0.5)
    second["lr"] = torch.tensor(0.25)
    ensemble.step(toy.step())
    assert rates(toy.optimizer) == [0.5, 0.25]
    second["lr"] = 0.125
    ensemble.step(toy.step())
    assert rates(toy.optimizer) == [0.5, 0.125] and isinstance(second["lr"], float)


def test_the_drop_in_goes_on_with_its_schedule_after_a_write() -> None:
    """As torch's OneCycleLR does: its next step overwrites what was written. Until then it is in force."""
    toy, plain = Toy(sgd), Toy(sgd)
    other = torchs.OneCycleLR(plain.optimizer, 0.1, 20)
    scheduler = hdet.OneCycleAutoLR(toy.optimizer, 0.1, 20, auto_lr_warmup_steps=0, model_sync_interval=2, controller=Scripted([2.0]))
    seen: list[list[float]] = []
    toy.optimizer.register_step_pre_hook(lambda opt, *_: seen.append(rates(opt)))
    for step in range(10):
        if step == 5:
            toy.optimizer.param_groups[0]["lr"] = 0.3
            with pytest.warns(UserWarning, match="taken as the base value"):
                toy.step()
        else:
            toy.step()
        own = (2.0 if step >= 2 else 1.0) * plain.optimizer.param_groups[0]["lr"]
        assert seen[-1] == pytest.approx([0.3 if step == 5 else own, own])
        scheduler.step(1.0)
        plain.step()
        other.step()
    assert scheduler.get_last_lr() == rates(toy.optimizer) == pytest.approx([2 * rate for rate in rates(plain.optimizer)])
