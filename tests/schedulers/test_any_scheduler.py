"""An Ensemble drives any torch scheduler.

Neutral: base values are the scheduler's own, bitwise. Corrected: exactly the factor times those.

Most of torch's schedulers are recursive (the next value is computed from the one in the group), so
a correction or a multiplier that stays in the group would compound: the factor 2 of one cycle would
be 4, 8, 16 ... after the next steps.
"""

import functools
import threading

import pytest
import torch
from torch.optim import lr_scheduler as torchs

import hdet
from hdet.simulation import simulate_rates
from hdet.trial.rule import RateInterval, Trial
from tests.harness import TwoReplicas, policies
from tests.trial.common import auto_run

from . import cases
from .cases import Toy, exact, hyperparameters, played, rates, sgd

STEPS = 24

SCHEDULERS = {
    "StepLR": lambda opt: torchs.StepLR(opt, 5, 0.5),
    "MultiStepLR": lambda opt: torchs.MultiStepLR(opt, [3, 9, 10], 0.3),
    "ExponentialLR": lambda opt: torchs.ExponentialLR(opt, 0.93),
    "CosineAnnealingLR": lambda opt: torchs.CosineAnnealingLR(opt, 10, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda opt: torchs.CosineAnnealingWarmRestarts(opt, 5, 2),
    "LambdaLR": lambda opt: torchs.LambdaLR(opt, [lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "MultiplicativeLR": lambda opt: torchs.MultiplicativeLR(opt, lambda t: 0.95),
    "LinearLR": lambda opt: torchs.LinearLR(opt, 0.1, total_iters=7),
    "ConstantLR": lambda opt: torchs.ConstantLR(opt, 0.25, total_iters=6),
    "PolynomialLR": lambda opt: torchs.PolynomialLR(opt, total_iters=20, power=2.0),
    "CyclicLR": lambda opt: torchs.CyclicLR(
        opt, 0.01, 0.1, 4, mode="triangular2", cycle_momentum=False
    ),
    "OneCycleLR": lambda opt: torchs.OneCycleLR(opt, [0.05, 0.1], STEPS + 8),
    "SequentialLR": lambda opt: torchs.SequentialLR(
        opt,
        [
            torchs.LinearLR(opt, 0.1, total_iters=6),
            torchs.CosineAnnealingLR(opt, 12),
            torchs.ExponentialLR(opt, 0.9),
        ],
        milestones=[6, 17],
    ),
    "ChainedScheduler": lambda opt: torchs.ChainedScheduler(
        [torchs.ConstantLR(opt, 0.1, total_iters=4), torchs.ExponentialLR(opt, 0.9)]
    ),
}


def ensemble_on(toy, build, factors=(), rho=1.0):
    return hdet.Ensemble(
        toy.optimizer,
        build(toy.optimizer),
        knobs=[hdet.LearningRate(0.3, groups="each")],
        controller=played(rho, factors),
        sync=hdet.Sync(3),
    )


# torch's SequentialLR calls step(0) itself
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("factors", [[1.0, 1.0], [2.0, 0.25]], ids=["neutral", "corrected"])
@pytest.mark.parametrize(("kind", "rho"), [("sgd", 1.0), ("adamw", 1.3), ("sgd_tensor_lr", 1.3)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_base_values_are_the_schedulers_own_times_the_correction(name, kind, rho, factors):
    """Bitwise: powers of two multiply without rounding."""
    plain, ours = Toy(getattr(cases, kind)), Toy(getattr(cases, kind))
    scheduler = SCHEDULERS[name](plain.optimizer)
    ensemble = ensemble_on(ours, SCHEDULERS[name], factors, rho)
    groups, before = ours.optimizer.param_groups, [g["lr"] for g in ours.optimizer.param_groups]
    for step in range(STEPS):
        expected = hyperparameters(plain.optimizer)
        decided = zip(expected, plain.optimizer.param_groups, factors, strict=True)
        for own, group, factor in decided if step >= 6 else ():  # at the end of cycle 1
            own["lr"] = exact(group["lr"] * factor)
        assert hyperparameters(ours.optimizer) == expected, step
        plain.step()
        scheduler.step()
        ensemble.step(ours.step())
    assert list(ensemble.corrections.values()) == factors
    is_neutral = rho == 1.0 and factors == [1.0, 1.0]
    assert (exact(plain.parameters()) == exact(ours.parameters())) == is_neutral
    # Compiled optimizers hold on to the tensor: it is written in place, never replaced.
    pairs = zip(groups, before, strict=True)
    assert all(group["lr"] is rate for group, rate in pairs if torch.is_tensor(rate))


def test_groups_that_share_one_tensor_rate_are_refused():
    """torch puts a tensor lr of the constructor into every group: such groups cannot have
    multipliers of their own."""
    toy, pair = Toy(cases.sgd_shared_tensor_lr), hdet.Replicas(0, 2, None)
    with pytest.raises(ValueError, match="share one tensor"):
        hdet.Ensemble(toy.optimizer, knobs=[hdet.LearningRate(0.3, groups="each")], replicas=pair)
    # One knob for both groups is fine.
    ensemble = hdet.Ensemble(toy.optimizer, knobs=[hdet.LearningRate(0.3)], replicas=pair)
    seen = []
    toy.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(rates(optimizer)))
    toy.step()
    assert seen == [pytest.approx([0.5 * ensemble.multipliers["lr"]] * 2, rel=1e-6)]


ZEROS = {
    "falls to zero": lambda opt: torchs.CosineAnnealingLR(opt, 9),
    "starts at zero": lambda opt: torchs.LambdaLR(opt, lambda t: max(0, t - 5) / 10),
    "falls below zero after the last step": lambda opt: torchs.OneCycleLR(
        opt, 0.05, STEPS, anneal_strategy="linear"
    ),
}


@pytest.mark.parametrize(
    "warmup", [0, STEPS - 3], ids=["from the start", "one decision at the end"]
)
@pytest.mark.parametrize("decay", [None, "floor"])
@pytest.mark.parametrize("name", ZEROS)
def test_a_schedule_that_reaches_zero(name, decay, warmup):
    """No division by it and no decision from it: training goes on, with finite rates and the
    groups' ratio as it was."""
    toy = Toy(sgd)
    for group, rate in zip(toy.optimizer.param_groups, (5e-4, 2.5e-4), strict=True):
        group["lr"] = rate
    settings = policies(every=3, warmup_steps=warmup, total_steps=STEPS, replicas=TwoReplicas())
    controller = hdet.SoftmaxController(decay=decay)
    scheduler = ZEROS[name](toy.optimizer)
    for group in toy.optimizer.param_groups:  # where the schedule itself does not say it
        group.setdefault("min_lr", 1e-9)
    ensemble = hdet.Ensemble(toy.optimizer, scheduler, controller=controller, **settings)
    for step in range(STEPS):
        first, second = rates(toy.optimizer)
        assert first >= 0
        assert second == pytest.approx(first if "last step" in name else first / 2), step
        ensemble.step(toy.step())
    # also where the first six steps, at a rate of 0 that is the schedule's own, move nothing
    assert (ensemble.cycle, ensemble.steps_done) == (STEPS // 3, STEPS)


# -- the peak ----------------------------------------------------------------------------------


PEAK, TOTAL = 1e-5, 1500


def triangle(step):
    """Between a tenth and the whole of the peak, up and down in 60 steps."""
    return 1 - 0.9 * abs(step / 60 % 2 - 1)


class Wrapped:
    """As accelerate's, which is no scheduler of torch's."""

    def __init__(self, scheduler):
        self.inside, self.optimizers = scheduler, [scheduler.optimizer]
        self.step, self.get_last_lr = scheduler.step, scheduler.get_last_lr


class Writes(torchs.LambdaLR):
    """Rates go into the groups in a step() of its own, which keeps no last ones."""

    def step(self):
        self.last_epoch += 1
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = rate * self.lr_lambdas[0](self.last_epoch)


class Follows(torchs.LambdaLR):
    """Reads the run, in which it does after some steps what no copy does."""

    def get_lr(self):
        reads = self.optimizer.param_groups[0]["params"][0].numel() > 1 and self.last_epoch > 9
        return [rate * (3 if reads else 1) for rate in super().get_lr()]


def ratio(opt):
    opt.param_groups[0]["lr"] *= triangle(0)
    return torchs.MultiplicativeLR(opt, lambda step: triangle(step) / triangle(step - 1))


TRIANGLES = {
    "LambdaLR": lambda opt: torchs.LambdaLR(opt, triangle),
    "ChainedScheduler": lambda opt: torchs.ChainedScheduler([torchs.LambdaLR(opt, triangle)]),
    "SequentialLR": lambda opt: torchs.SequentialLR(
        opt, [torchs.LambdaLR(opt, lambda t, by=by: triangle(t + by)) for by in (0, 20)], [20]
    ),
    "MultiplicativeLR": ratio,
    "CyclicLR": lambda opt: torchs.CyclicLR(opt, 0.1 * PEAK, PEAK, 60, cycle_momentum=False),
    "wrapped": lambda opt: Wrapped(torchs.LambdaLR(opt, triangle)),
    "Writes": lambda opt: Writes(opt, triangle),
    "Follows": lambda opt: Follows(opt, triangle),
    "initial_lr": None,  # a formula inside rescheduling(), and what says its peak
    "max_lr": None,
    "": None,
}
DOUBTS = {"": "is not known, where rescheduling", "Follows": "a copy of its schedule"}


@functools.cache
def searched(name):
    """By an AutoLR, in the first steps of the same curve."""
    run = auto_run(PEAK, scheduler=TRIANGLES[name], closure=False)
    group = run.optimizer.param_groups[0]
    group |= {name: PEAK} if name.endswith("_lr") else {}
    while not run.search.done:
        with run.ensemble.rescheduling():
            group["lr"] = group["lr"] if run.scheduler else PEAK * triangle(run.index)
        run.step()
    return run


@pytest.mark.filterwarnings("ignore:The epoch parameter in", "ignore:Detected call of")
@pytest.mark.parametrize("name", TRIANGLES)
def test_a_correction_does_not_depend_on_how_a_curve_is_scheduled(name):
    """Nor a peak on how many steps of it are done."""
    run, usual = searched(name), searched("LambdaLR").ensemble.corrections["lr"]
    expected = 1.0 if name in DOUBTS else pytest.approx(usual, rel=1e-6)
    assert run.ensemble.corrections["lr"] == expected and usual > 3
    assert DOUBTS.get(name, "good rates for") in run.ensemble.report()
    if run.scheduler is not None:
        assert simulate_rates(run.optimizer, run.scheduler, TOTAL).highest == pytest.approx([PEAK])
        assert run.ensemble._schedule.knobs[0].peaks() == [pytest.approx(PEAK)]


def test_a_schedule_is_asked_for_its_peak_once():
    """One function for all groups, as transformers have it."""
    asked, net = [], torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(20))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in net], lr=1e-3)
    scheduler = torchs.LambdaLR(optimizer, lambda step: asked.append(step) or 1.0)
    auto = hdet.AutoLR(net, budget=0)
    ensemble = hdet.Ensemble(optimizer, scheduler, search=auto, total_steps=TOTAL)
    for _ in range(30):
        sum(part(torch.ones(2)) for part in net).square().backward()
        optimizer.step()
        ensemble.step(1.0)
    assert auto.done and len(asked) == 20 + (TOTAL - 1) + 30 * 20


def test_a_schedule_that_cannot_be_simulated_is_refused_where_a_peak_is_needed():
    toy = Toy(sgd)
    scheduler = torchs.StepLR(toy.optimizer, 5)
    scheduler.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"the peak of StepLR is not known.*lock.*'max_lr'"):
        hdet.Ensemble(toy.optimizer, scheduler, search=hdet.AutoLR(toy.net), total_steps=TOTAL)
    hdet.Ensemble(toy.optimizer, scheduler, total_steps=TOTAL).step(toy.step())


class Told:
    """As timm's, which are told where they are."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        pass


def test_a_scheduler_whose_step_needs_an_argument_is_refused_with_the_way_out():
    toy = Toy(sgd)
    with pytest.raises(ValueError, match=r"Told.*step needs 'epoch'.*: leave scheduler out"):
        hdet.Ensemble(toy.optimizer, Told(toy.optimizer))
    hdet.Ensemble(toy.optimizer)  # which is as it was


class Own(torchs.LRScheduler):
    def get_lr(self):
        return [0.1, 0.2]


@pytest.mark.filterwarnings("ignore:The epoch parameter in", "ignore:Detected call of")
@pytest.mark.parametrize("optimizer", [sgd, cases.sgd_shared_tensor_lr])
@pytest.mark.parametrize("name", [*SCHEDULERS, "Own"])
def test_a_rate_is_applied_to_the_whole_of_a_schedule_that_was_made_before(name, optimizer):
    """Exactly, and in the tensors that the optimizer holds."""
    one, other = Toy(optimizer), Toy(optimizer)
    plain, scheduler = (SCHEDULERS.get(name, Own)(toy.optimizer) for toy in (one, other))
    interval = RateInterval(0.5, 0, 1, 2.0, "", STEPS, Trial(0.5, ()))
    before = [group["lr"] for group in other.optimizer.param_groups]
    if name == "Own":
        with pytest.raises(ValueError, match=r"Own keeps its rates .* make it afterwards"):
            interval.apply(other.optimizer, scheduler)
        with pytest.warns(UserWarning, match="a scheduler was made for this optimizer"):
            interval.apply(one.optimizer)
        return
    interval.apply(other.optimizer, scheduler)
    pairs = zip(other.optimizer.param_groups, before, strict=True)
    assert all(group["lr"] is rate for group, rate in pairs if torch.is_tensor(rate))
    for _ in range(STEPS):
        assert rates(other.optimizer) == pytest.approx([4 * rate for rate in rates(one.optimizer)])
        plain.step(), scheduler.step()


@pytest.mark.parametrize("total", [STEPS, None])
def test_a_decay_that_cannot_work_is_refused_at_once(total):
    """Not at the first decision, which may be 100 000 steps later."""
    optimizer = Toy(sgd).optimizer
    settings = {"replicas": TwoReplicas(), "total_steps": total}
    controller = hdet.SoftmaxController(decay="floor")
    with pytest.raises(ValueError, match="above zero" if total else "total_steps"):
        scheduler = torchs.LambdaLR(optimizer, lambda step: 1 - step / (STEPS - 1))
        hdet.Ensemble(optimizer, scheduler, controller=controller, **settings)
