"""Trials beside a run: arms are what a loop by hand would make of them, and the run does not feel them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.core.plan import SnapshotOf
from hdet.core.rules.trial.protocol import BROKEN, ORIGIN, Told, last, snapshots
from hdet.measure.measurement import Measurement
from hdet.measure.scoring import Scorer
from hdet.measure.seen import Seen
from hdet.measure.trials import RISE, Trials
from tests.harness import Run, batch, loss_of, losses_of, model

from ..distributed import run_ranks
from .helpers import STOCK, flat, same, state_of

STEPS, SCORES = 10, 4


class Tries(hdet.Controller):
    """One trial in each cycle (or over several of this ``length``), of which it learns nothing; ``end``: how the first one goes on."""

    name = "tries"
    needs_replicas = False

    def __init__(
        self, trials: Trials, multiples: tuple[float, ...] = (0.5, 1.0, 4.0), of: str = "base", end: Any = None, length: int | None = None,
        falls_to: float = 0.0, place: str = "device",
    ) -> None:  # fmt: skip
        super().__init__()
        self.measurements = {"trials": trials}
        self.settings = {"multiples": list(multiples), "of": of, "steps": STEPS, "scores": SCORES, "ends": [falls_to] * len(multiples)}
        self.keep: dict[str, SnapshotOf] = snapshots(len(multiples), place=place)
        self.length, self.end, self.told = length, end, []  # type: ignore[var-annotated]

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        settings = {**self.settings, "trial": now.cycle if self.length is None else now.step // (STEPS + SCORES)}
        return hdet.Plan(steps=self.length or STEPS + SCORES, spread=False, measure={"trials": settings}, snapshots=self.keep)

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        self.told.append(evidence.measured.get("trials"))
        return hdet.Learned([hdet.Decision() for _ in evidence.knobs], self.end if evidence.cycle == 0 else None)


def read(controller: Any, cycle: int = 0, replica: int = 0) -> Told:
    """What it was told of a cycle's trial."""
    return Told.read(controller.told[cycle][replica], len(controller.settings["multiples"]), STEPS)


def noisy() -> nn.Module:
    """With buffers and random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))


def tries(rank: int = 0, **settings: Any) -> Run:
    of_trials = {key: settings.pop(key) for key in ("judge", "before_step") if key in settings}
    of_rule = {key: settings.pop(key) for key in ("multiples", "of", "end", "length", "falls_to", "place") if key in settings}
    net = settings.pop("net", None) or noisy()
    controller = settings.pop("wrap", lambda it: it)(Tries(Trials(net, **of_trials, seen=Seen(1)), **of_rule))
    return Run(rank, net=net, controller=controller, closure=True, spread=0.0, **settings)


def by_hand(
    multiple: float, *, optimizer: Any = torch.optim.AdamW, of: str = "base", ranks: int = 1, rank: int = 0, falls_to: float = 0.0,
    begins: float | None = None,
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """An arm, as a loop of its own from the beginning of the run, on the mean gradient of so many; its scores on this rank's batches."""
    net = model()
    run = Run(net=copy.deepcopy(net), optimizer=optimizer, spread=0.0)
    first, peak = run.rate if begins is None else begins, 3e-3
    top, rise = multiple * (peak if of == "peak" else first), round(RISE * STEPS)
    own = optimizer(net.parameters(), lr=first, weight_decay=0.0)
    own.param_groups[0].update({key: value for key, value in run.optimizer.param_groups[0].items() if key not in ("params", "lr")})
    if begins == 0:  # the run's own first step, which is counted as one, and which moves moments alone
        own.param_groups[0]["lr"] = 0.0
        loss_of(net, batch(0)).backward()
        own.step()
    for i in range(STEPS):
        own.param_groups[0]["lr"] = (
            first + (top - first) * ((i + 1) / rise) if i < rise else top * (falls_to + (1 - falls_to) * ((STEPS - i) / (STEPS - rise + 1)))
        )
        own.zero_grad()
        torch.stack([loss_of(net, batch(100 * i + r)) for r in range(ranks)]).mean().backward()
        own.step()
    with torch.no_grad():
        return net, [float(losses_of(net, batch(100 * i + rank)).double().mean()) for i in range(STEPS, STEPS + SCORES)]


# -- arms --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "length"), [("base", None), ("peak", None), ("base", 7), ("base", 2)])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, hdet.FusedAdamW])
def test_an_arm_is_what_a_loop_by_hand_makes_of_it(optimizer: Any, of: str, length: int | None) -> None:
    run = tries(net=model(), optimizer=optimizer, of=of, length=length).steps(STEPS + SCORES)
    assert not any(run.controller.told[:-1])
    for number, multiple in enumerate((0.5, 1.0, 4.0)):
        assert read(run.controller, -1).scores[number] == by_hand(multiple, optimizer=optimizer, of=of)[1]


def test_where_the_schedule_begins_at_0_arms_rise_from_there() -> None:
    def warmed(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))

    told = read(tries(net=model(), of="peak", scheduler=warmed).steps(STEPS + SCORES).controller, -1)
    for number, multiple in enumerate((0.5, 1.0, 4.0)):
        assert told.scores[number] == by_hand(multiple, of="peak", begins=0.0)[1]
    assert told.far == 1.0, "the run has not moved: nothing to compare with"


class Anew(Tries):
    """The second cycle has a trial, whose first arm begins with the run's first weights."""

    def plan(self, now: hdet.Moment) -> hdet.Plan:
        settings = {**self.settings, "trial": 1, "origins": [ORIGIN, "", ""]}
        measure = {"trials": settings} if now.cycle else {}
        keep = snapshots(3, ORIGIN) if now.cycle else {ORIGIN: SnapshotOf()}
        return hdet.Plan(steps=STEPS + SCORES, spread=False, measure=measure, snapshots=keep)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, hdet.FusedAdamW])
def test_an_arm_may_begin_with_the_runs_first_weights(optimizer: Any) -> None:
    """Its rate rises from 0 then: the run's may be far too high for them. The other arms, and the run, do not feel it."""
    net, before = model(), STEPS + SCORES
    run = Run(net=net, controller=Anew(Trials(net)), closure=True, spread=0.0, optimizer=optimizer).steps(before)
    rate, weights, wanted = run.rate, copy.deepcopy(net.state_dict()), []
    for number, multiple in enumerate((0.5, 1.0, 4.0)):
        fresh, rise = model(), round(RISE * STEPS)
        own = optimizer(fresh.parameters(), lr=rate, weight_decay=0.0)
        if number:
            fresh.load_state_dict(weights)
            own.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        own.param_groups[0].update({k: v for k, v in run.optimizer.param_groups[0].items() if k not in ("params", "lr")})
        begins, top = rate if number else 0.0, multiple * rate
        for i in range(STEPS):
            own.param_groups[0]["lr"] = begins + (top - begins) * ((i + 1) / rise) if i < rise else top * ((STEPS - i) / (STEPS - rise + 1))
            own.zero_grad()
            loss_of(fresh, batch(100 * (before + i))).backward()
            own.step()
        with torch.no_grad():
            wanted.append([float(losses_of(fresh, batch(100 * (before + i))).double().mean()) for i in range(STEPS, STEPS + SCORES)])
    run.steps(before)
    told = read(run.controller, 1)
    assert list(map(list, told.scores)) == wanted and told.far == pytest.approx(1.0, abs=1e-4)
    with torch.no_grad():  # of one batch it would be noise
        firsts = [float(losses_of(model(), batch(100 * (before + i))).double().mean()) for i in range(STEPS, STEPS + SCORES)]
    assert told.began == pytest.approx(mean(firsts), rel=1e-12)
    alone = Run(net=model(), spread=0.0, optimizer=optimizer).steps(2 * before)
    assert torch.equal(run.weights(), alone.weights())


def test_what_begins_with_the_first_weights_is_not_compared_with_the_runs_step() -> None:
    net = model()
    run = Run(net=net, controller=Anew(Trials(net), (1.0, 0.5, 4.0)), closure=True, spread=0.0).steps(2 * (STEPS + SCORES))
    assert read(run.controller, 1).far == 1.0


@pytest.mark.parametrize("groups", [None, "each"])
@pytest.mark.parametrize("later", [0, 1])
def test_each_group_goes_to_its_own_peak(groups: str | None, later: int) -> None:
    """The other one's warm-up is none of its business."""
    rates: list[list[float]] = []

    class Spied(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            rates.append([group["lr"] for group in self.param_groups])
            super().step(closure)

    net = model()
    first, *rest = net.parameters()
    optimizer = Spied([{"params": [first]}, {"params": rest, "lr": 2e-3}], lr=1e-3)
    shapes = [lambda step: min(1.0, (step + 1) / 200), lambda step: 0.5]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shapes[:: 1 - 2 * later])
    controller = Tries(Trials(net), multiples=(1.0,), of="peak")
    ensemble = hdet.Ensemble(optimizer, scheduler, knobs=[hdet.LearningRate(0.0, groups)], total_steps=1000, controller=controller)
    for i in range(STEPS + SCORES):
        optimizer.zero_grad()
        loss_of(net, batch(i)).backward()
        optimizer.step()
        ensemble.step(1.0, closure=lambda i=i: losses_of(net, batch(i)))
    peaks = [1e-3, 1e-3] if later == 0 else [5e-4, 2e-3]
    assert [max(column) for column in zip(*rates, strict=True)] == pytest.approx(peaks)
    assert read(controller).far == 1.0, "groups rise by different factors: how far a step goes says nothing"


def test_losses_of_the_last_batches_that_arms_have_trained_on_are_told() -> None:
    told = read(tries(net=model(), multiples=(0.0, 1.0)).steps(STEPS + SCORES).controller)
    net = model()
    assert [len(losses) for losses in told.trained] == [5, 5] and told.trained[0] != told.trained[1]
    with torch.no_grad():  # an arm that hardly moves has the run's first weights
        assert told.trained[0] == pytest.approx([float(loss_of(net, batch(100 * i))) for i in range(STEPS - 5, STEPS)], rel=1e-2)


@pytest.mark.parametrize("falls_to", [0.25, 1.0])
def test_an_arm_ends_at_the_part_of_its_rate_that_is_asked_for(falls_to: float) -> None:
    run = tries(net=model(), multiples=(4.0,), falls_to=falls_to).steps(STEPS + SCORES)
    told = read(run.controller, -1)
    assert told.scores == [by_hand(4.0, falls_to=falls_to)[1]] and told.began == pytest.approx(float(loss_of(model(), batch(0))))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, hdet.FusedAdamW])
def test_a_run_goes_on_as_an_arm(optimizer: Any) -> None:
    run = tries(net=model(), optimizer=optimizer, end=hdet.Restore("arm 2")).steps(STEPS + SCORES)
    expected, _ = by_hand(4.0, optimizer=optimizer)
    assert same(dict(run.net.state_dict()), dict(expected.state_dict()))


def test_arms_are_clipped_as_the_loop_clips() -> None:
    clipped: list[float] = []
    net = model()

    def clip() -> None:
        clipped.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)))

    run = tries(net=net, before_step=clip).steps(STEPS + SCORES)
    assert len(clipped) == 3 * STEPS and min(clipped) > 0.01
    assert all(scores != by_hand(multiple)[1] for scores, multiple in zip(read(run.controller).scores, (0.5, 1.0, 4.0), strict=True))


class Peaks(Measurement):
    """What arms take for the peak in force, by cycle."""

    def watch(self, watched: Any) -> None:
        self.watched, self.found = watched, []  # type: ignore[var-annotated]

    def on_cycle_start(self, settings: Any) -> None:
        self.found += [peaks[0] for peaks in self.watched.peaks()]


class Raises(hdet.Controller):
    """By eight, over many steps, where the first cycle ends."""

    name, needs_replicas, measures = "raises", False, ("peaks",)

    def __init__(self) -> None:
        super().__init__()
        self.measurements = {"peaks": Peaks()}

    def decide(self, evidence: hdet.Evidence) -> list[hdet.Decision]:
        return [hdet.Decision(factor=8.0 if evidence.cycle == 0 else 1.0, ramp=50)]


def test_a_trial_is_of_the_rate_that_was_decided_also_while_the_run_is_on_its_way_there() -> None:
    """A second scan was of the old rate, and the same evidence raised twice."""
    run = Run(net=model(), controller=Raises(), spread=0.0, every=5).steps(15)
    first, *later = run.controller.measurements["peaks"].found
    assert later == pytest.approx([8 * first] * len(later)) and len(later) == 2


@pytest.mark.parametrize("of", ["base", "peak"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, hdet.FusedAdamW])
@pytest.mark.parametrize(("loop", "far"), [("as it is", 1.0), ("a sum", 1 / 8), ("clipped", 20.0), ("clipped and told", 1.0)])
def test_it_is_told_how_far_an_arm_goes_where_the_run_has_made_a_step(optimizer: Any, of: str, loop: str, far: float) -> None:
    """As far as the run: else the loop does something of which the trial does not know. Adam's steps are as long whatever the gradients' scale."""
    net = model()

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), first / 20)

    loss_of(net, batch(0)).backward()
    first = float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9))
    net.zero_grad()
    run = tries(net=net, optimizer=optimizer, of=of, before_step=clip if "told" in loop else None)
    for i in range(STEPS + SCORES):
        loss = losses_of(net, batch(100 * i))
        (loss.sum() if loop == "a sum" else loss.mean()).backward()
        if "clipped" in loop:
            clip()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.ensemble.step(loss.mean(), closure=lambda i=i: losses_of(net, batch(100 * i)))
    assert read(run.controller, -1).far == pytest.approx(far if optimizer is torch.optim.SGD else 1.0, rel=1e-3)


def test_an_arm_that_breaks_is_left_and_told() -> None:
    calls = []

    def data(key: int) -> Any:
        calls.append(key)
        return batch(key)

    run = tries(multiples=(1e30, 1.0), optimizer=torch.optim.SGD, data=data, net=model()).steps(STEPS + SCORES)
    told = read(run.controller)
    assert told.scores[0] == [BROKEN] * SCORES and told.trained[0][-1] == BROKEN and max(told.scores[1]) < 100
    assert all(torch.isfinite(p).all() for p in run.net.parameters())


def test_a_judge_scores_the_arms() -> None:
    held_out = [batch(10**6 + i) for i in range(3)]
    run = tries(net=model(), judge=(loss_of, held_out), multiples=(2.0,)).steps(STEPS + SCORES)
    net, _ = by_hand(2.0)
    with torch.no_grad():
        expected = [float(loss_of(net, data)) for data in held_out]
    assert read(run.controller).scores == [expected]
    with torch.no_grad():
        began = sum(float(loss_of(model(), data)) for data in held_out) / 3
    assert read(run.controller).began == pytest.approx(began), "measured with the same scale, whatever the training loss is"


def test_some_of_a_judges_batches_are_from_its_whole_list() -> None:
    """Such a list may have its sources one after the other."""
    scorer = Scorer(model(), (lambda net, data: torch.tensor(float(data)), list(range(10))))
    assert [float(loss) for loss in scorer.judged(4) if loss is not None] == [0, 2, 5, 7]
    assert [float(loss) for loss in scorer.judged() if loss is not None] == list(range(10))


def test_a_closure_that_gives_the_loops_own_losses_is_told_so() -> None:
    net = model()
    losses = losses_of(net, batch(0))
    run = tries(net=net, multiples=(1.0,))
    run.losses = lambda data: losses
    with pytest.raises(ValueError, match="the closure gave the loop's own losses, whose graph is gone"):
        run.steps(STEPS)


@pytest.mark.parametrize("judged", [False, True])
def test_losses_that_need_derivatives_of_the_model_are_scored_too(judged: bool) -> None:
    """As an equation's residual, or a penalty on gradients."""

    def residuals(net: nn.Module, data: Any) -> torch.Tensor:
        x = data[0].clone().requires_grad_()
        [slope] = torch.autograd.grad(net(x).sum(), x, create_graph=torch.is_grad_enabled())
        return (slope - data[1]).square().mean(1)

    net, held_out = model(), [batch(10**6 + i) for i in range(3)]
    judge = {"judge": (lambda net, data: residuals(net, data).mean(), held_out)} if judged else {}
    run = tries(net=net, multiples=(1.0,), optimizer=torch.optim.SGD, **judge)
    run.losses = lambda data: residuals(net, data)
    run.steps(STEPS + SCORES)
    assert all(math.isfinite(x) and x > 0 for x in read(run.controller).scores[0])
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in net.parameters())
    plain = Run(net=model(), spread=0.0, optimizer=torch.optim.SGD)
    plain.losses = lambda data: residuals(plain.net, data)
    assert torch.equal(plain.steps(STEPS + SCORES).weights(), run.weights())


# -- the run -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*STOCK, "FusedAdamW", "FusedLion", "FusedSGD"])
def test_the_run_is_the_one_without_trials_to_the_bit(make: str) -> None:
    optimizer = getattr(hdet, make, None) or getattr(torch.optim, make)
    settings = {"optimizer": lambda parameters, lr, weight_decay: optimizer(parameters, lr=lr), "total": 2 * (STEPS + SCORES) + 3}
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    plain = Run(net=noisy(), spread=0.0, **settings).steps()
    after = (torch.rand(1), random.random(), numpy.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    beside = tries(multiples=(0.1, 30.0), **settings).steps()
    assert same((torch.rand(1), random.random(), numpy.random.rand()), after)
    assert same(state_of(beside.net), state_of(plain.net)) and beside.rate == plain.rate
    assert same(beside.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])
    assert len(beside.controller.told) == 3


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_weights_with_masters_are_left_as_they_were(masters: str) -> None:
    def optimizer(parameters: Any, lr: float, weight_decay: float) -> Any:
        return hdet.FusedAdamW(parameters, lr=lr, master_weights=masters)

    plain = Run(net=model(), dtype=torch.bfloat16, optimizer=optimizer, spread=0.0).steps(30)
    beside = tries(net=model(), dtype=torch.bfloat16, optimizer=optimizer).steps(30)
    assert torch.equal(plain.weights(), beside.weights())
    assert same(beside.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])


def test_gradients_that_the_loop_keeps_are_still_there() -> None:
    run = tries(net=model())
    for _ in range(STEPS + SCORES):
        run.backward()
        before = [p.grad for p in run.net.parameters()]
        values = [g.clone() for g in before if g is not None]
        run.optimizer.step()
        data = run.batches()[0]
        run.ensemble.step(1.0, closure=lambda data=data: losses_of(run.net, data))
        assert all(p.grad is g for p, g in zip(run.net.parameters(), before, strict=True)) and same(before, values)
        run.index += 1


def test_a_shadow_measures_without_a_trace() -> None:
    plain = Run(net=model(), spread=0.0, every=7).steps(30)
    shadow = tries(net=model(), wrap=hdet.Shadow, end=hdet.Restore("arm 2"), every=7, length=7).steps(30)
    assert torch.equal(plain.weights(), shadow.weights())
    assert read(shadow.controller.rule, 1).scores[0] == by_hand(0.5)[1]


def sgd(parameters: Any, **_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def test_a_second_optimizer_over_the_model_gets_no_gradients_of_arms() -> None:
    weights = []
    for settings in ({}, {"controller": lambda net: Tries(Trials(net), (0.5, 30.0))}):
        net = model()
        second = torch.optim.SGD(net[2].parameters(), lr=1e-2)
        first = Run(
            net=net, optimizer=lambda *_, net=net, **__: sgd(net[0].parameters()), closure=True, scheduler=None, spread=0.0, **settings
        )
        for _ in range(STEPS + SCORES):
            first.step()
            second.step()
            second.zero_grad()
        weights.append(first.weights())
    assert torch.equal(*weights)


def bucket_views(rank: int, world: int, to_none: bool) -> Any:
    found = []
    for multiples in (None, (0.5, 30.0)):
        net = model()
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
        controller = None if multiples is None else Tries(Trials(wrapped), multiples)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        ensemble = hdet.Ensemble(optimizer, total_steps=100, replicas=hdet.Replicas.single(), controller=controller)
        for index in range(STEPS + SCORES):
            data = batch(100 * index)
            losses_of(wrapped, data).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            ensemble.step(1.0, closure=lambda wrapped=wrapped, data=data: losses_of(wrapped, data))
        found.append([p.detach().clone() for p in net.parameters()] + [p.grad for p in net.parameters() if p.grad is not None])
    return same(*found)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_views_of_ddps_buckets_are_left_as_they_were(to_none: bool) -> None:
    assert run_ranks(bucket_views, 1, to_none) == [True]


def test_weights_that_autocast_has_cast_before_are_not_those_of_an_arm() -> None:
    told = []
    for outside in (False, True):
        run = tries(net=model(), multiples=(0.5, 30.0), optimizer=sgd, scheduler=None)

        def under(data: Any, run: Run = run) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return ((run.net(data[0]).float() - data[1]) ** 2).mean(1)

        run.losses = under
        for _ in range(STEPS + SCORES):
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                inside = under(run.steps(1).data(0))
            assert torch.equal(inside, under(run.data(0)))  # the run's weights, not the last arm's
        told.append(run.controller.told[0][0])
    one, other = read(run.controller).scores
    assert told[0] == pytest.approx(told[1], rel=0.02) and one != other


def test_a_model_that_raises_on_an_arm_that_has_broken_does_not_end_the_run() -> None:
    run = tries(net=model(), multiples=(1e30, 1.0), optimizer=sgd, scheduler=None)

    def losses(data: Any) -> torch.Tensor:
        found = losses_of(run.net, data)
        if not torch.isfinite(found).all():
            raise FloatingPointError("not finite")
        return found

    run.losses = losses
    told = read(run.steps(STEPS + SCORES).controller)
    assert told.scores[0] == [BROKEN] * SCORES and max(told.scores[1]) < 100


@pytest.mark.parametrize("place", [0, 1])
def test_a_group_that_is_still_frozen_by_its_schedule_does_not_move_in_an_arm(place: int) -> None:
    net = model()
    groups: list[dict[str, Any]] = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    groups[place]["lr"] = 0.0
    run = tries(net=net, multiples=(1.0, 4.0), optimizer=lambda *_, **__: sgd(groups), scheduler=None, end=hdet.Restore("arm 1"))
    before, other = state_of(net[2 * place]), state_of(net[2 - 2 * place])
    run.steps(STEPS + SCORES)
    assert same(state_of(net[2 * place]), before) and not same(state_of(net[2 - 2 * place]), other)
    one, other = read(run.controller).scores
    assert one != other


def test_what_follows_a_step_in_a_hook_is_not_told_of_arms() -> None:
    run, counted = tries(net=model(), multiples=(0.5, 2.0)), []
    run.optimizer.register_step_post_hook(lambda *_: counted.append(1))
    run.steps(STEPS + SCORES)
    assert len(counted) == STEPS + SCORES


def test_a_score_that_raised_and_was_caught_loses_the_trial() -> None:
    run = tries(net=model(), multiples=(1.0, 2.0)).steps(STEPS)

    def fails(data: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise ZeroDivisionError
        return losses_of(run.net, data)

    run.losses, plain = fails, run.losses
    with pytest.raises(ZeroDivisionError):
        run.step()
    assert run.net.training
    run.losses = plain
    run.steps(STEPS + 2 * SCORES)
    first, second = run.controller.told
    assert not first and len(second[0]) == 4 + 2 * (SCORES + last(STEPS))


# -- interrupted -------------------------------------------------------------------------------------------------------------


def test_a_trial_goes_on_after_an_average_by_hand() -> None:
    run = tries(net=model()).steps(3)
    run.ensemble.converge()
    run.steps(STEPS + SCORES - 3)
    assert read(run.controller).scores[0] == by_hand(0.5)[1]


def test_a_trial_that_a_resumed_run_cannot_finish_tells_nothing_and_the_next_one_does() -> None:
    run = tries(net=model()).steps(3)
    run = tries(net=model()).loaded(run.saved()).steps(2 * (STEPS + SCORES) - 3)
    first, second = run.controller.told
    assert not first and len(second[0]) == 4 + 3 * (SCORES + last(STEPS))


# -- refused -----------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="without a graph"):
        run = tries(net=model())
        run.losses, plain = (lambda data: losses_of(run.net, data)), run.losses
        run.closure = lambda data: plain(data).detach()
        run.steps(1)
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        Run(net=model(), controller=Tries(Trials(model())), closure=True)
    net = model()
    both = nn.ModuleList([net, model()])
    with pytest.raises(ValueError, match=r"nn.ModuleList\(\[encoder, decoder\]\)"):
        hdet.Ensemble(torch.optim.SGD(both.parameters(), lr=0.1), total_steps=100, controller=Tries(Trials(net)))
    with pytest.raises(ValueError, match="LBFGS"):
        hdet.Ensemble(torch.optim.LBFGS(net.parameters()), total_steps=100, controller=Tries(Trials(net)))
    net[0].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[operator,union-attr]
    with pytest.raises(ValueError, match="optimizer inside the backward pass"):
        hdet.Ensemble(torch.optim.SGD(net[2].parameters(), lr=0.1), total_steps=100, controller=Tries(Trials(net)))
    with pytest.raises(ValueError, match="replicas in one process"):
        net = model()
        Run(net=net, together=2, controller=Tries(Trials(net)), closure=True)
    with pytest.raises(TypeError, match="must be a torch.nn.Module"):
        Trials(loss_of)  # type: ignore[arg-type]
    for judge in (loss_of, (loss_of,), (None, [])):
        with pytest.raises(TypeError, match="judge must be"):
            Trials(model(), judge)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="judge's batches must be a list of mini-batches, got list_iterator"):
        Trials(model(), (loss_of, iter([batch(0), batch(1)])))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"called as loss_fn\(model, batch\), and takes \(batch\): too many"):
        hdet.AutoLR(net, judge=(lambda batch: batch, [1, 2]))
    with pytest.raises(ValueError, match="judge's mini-batches"):
        Trials(model(), (loss_of, [batch(0)]))
    with pytest.raises(TypeError, match="before_step"):
        Trials(model(), before_step=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="place"):
        hdet.AutoLR(model(), place="disk")


# -- processes ---------------------------------------------------------------------------------------------------------------


def arms_of_ranks(rank: int, world: int, reduce: str) -> Any:
    local = {"gradients": "local", "moments": "average"} if reduce == "local" else {}
    run = tries(rank, net=model(), ddp=reduce == "ddp", place="host", every=5, **local)
    if reduce == "by hand":
        plain: Callable[..., torch.Tensor] = run.backward

        def backward(report: Any = None) -> torch.Tensor:
            loss = plain(report)
            for p in run.net.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= world  # type: ignore[operator]
            return loss

        run.backward = backward  # type: ignore[method-assign]
    run.controller.end = hdet.Restore("arm 2") if reduce != "local" else None
    run.steps(STEPS + SCORES)
    return run.controller.told[0], run.weights(), isinstance(run.wrapped, DistributedDataParallel)


@pytest.mark.parametrize("reduce", ["ddp", "by hand", "local"])
def test_ranks_train_the_same_arms_however_gradients_are_averaged(reduce: str) -> None:
    ranks = run_ranks(arms_of_ranks, 2, reduce)
    (told, weights, wrapped), (others, others_weights, _) = ranks
    assert wrapped == (reduce == "ddp") and told == others and len(told) == 2
    for rank in range(2 if reduce != "local" else 0):
        for number, multiple in enumerate((0.5, 1.0, 4.0)):
            assert Told.read(told[rank], 3, STEPS).scores[number] == pytest.approx(by_hand(multiple, ranks=2, rank=rank)[1], rel=1e-4)
    if reduce != "local":
        assert torch.equal(weights, others_weights) and torch.allclose(weights, flat(by_hand(4.0, ranks=2)[0]), atol=1e-5)


@pytest.mark.parametrize("wrong", [[1.0, 2.0], torch.ones(3), 3.0])
def test_a_closure_that_is_no_function_is_refused_by_name(wrong: Any) -> None:
    """In every step, also where none is asked for."""
    net = model()
    for controller in (hdet.AutoLR(net), None):
        ensemble = hdet.Ensemble(torch.optim.SGD(net.parameters(), lr=1e-3), total_steps=3000, controller=controller)
        with pytest.raises(
            TypeError, match=rf"closure must be a function, got {type(wrong).__name__}: .*closure=lambda: losses_of\(model, batch\)"
        ):
            ensemble.step(1.0, wrong)
        ensemble.close()


@pytest.mark.parametrize(("gives", "name"), [(lambda losses: losses.tolist(), "list"), (lambda losses: {"loss": losses}, "dict")])
def test_a_closure_that_gives_no_tensor_is_refused_by_name(gives: Callable[[torch.Tensor], Any], name: str) -> None:
    run = tries()
    run.closure = lambda data: gives(run.losses(data))
    with pytest.raises(TypeError, match=rf"closure .* gave a {name}: return a tensor of losses"):
        run.step()
