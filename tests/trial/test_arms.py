"""Arms are what loops by hand would make of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.trial.displacement import Displacement, medians
from hdet.trial.rule import MULTIPLES, SCORES, STEPS, Arm, arm_factor
from tests.distributed import run_ranks
from tests.ensemble.helpers import same
from tests.harness import Run, loss_of, losses_of, model, taught

from .common import ALL, OPTIMIZERS, auto_run, noisy, sgd, training

RATE = 1e-4


def by_hand(
    multiple: float, optimizer: Any = torch.optim.AdamW, ranks: int = 1, clip: float = 1e9
) -> Arm:
    """A loop of its own from the beginning of the run, on the mean gradient of so many ranks."""
    net = model()
    own = optimizer(net.parameters(), lr=RATE, weight_decay=0.0)
    displacement = Displacement(lambda: dict(net.named_parameters()))
    [group] = Run(optimizer=optimizer, lr=RATE, total=1500).optimizer.param_groups
    own.param_groups[0].update({key: group[key] for key in group.keys() - {"params", "lr"}})
    for i in range(STEPS):
        own.param_groups[0]["lr"] = RATE * (multiple * arm_factor(i + 1))
        own.zero_grad()
        torch.stack([loss_of(net, taught(100 * i + r)) for r in range(ranks)]).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        own.step()
    scores = [mean(mean_loss(net, 100 * i + r) for r in range(ranks)) for i in range(STEPS, ALL)]
    [moved] = medians(hdet.Replicas.single(), displacement.ratios())
    return Arm(RATE * multiple, tuple(scores), moved)


@torch.no_grad()
def mean_loss(net: nn.Module, key: int) -> float:
    return float(losses_of(net, taught(key)).double().mean())


def between(run: Run, act: Callable[[], object]) -> Run:
    """``act`` follows each of the loop's backward passes."""
    backward = run.backward
    run.backward = lambda report=None: (backward(report), act())[0]  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize(
    ("name", "clip"), [*((name, 1e9) for name in OPTIMIZERS), ("SGD with momentum", 0.01)]
)
def test_an_arm_is_what_a_loop_by_hand_makes_of_it(name: str, clip: float) -> None:
    """Clipped as the loop clips, too."""
    net, make = model(), OPTIMIZERS[name]
    clipped = lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
    run = between(auto_run(RATE, net=net, optimizer=make, of={"before_step": clipped}), clipped)
    trial = run.steps(ALL).search.interval.trial
    assert trial.arms == tuple(by_hand(multiple, make, clip=clip) for multiple in MULTIPLES)
    assert trial.first_losses == tuple(mean_loss(model(), 100 * i) for i in range(STEPS, ALL))
    assert run.search.cost == pytest.approx(5 * STEPS + 6 / 3 * SCORES)


@pytest.mark.parametrize(("by", "factor"), [(32.0, r"0\.03\d\d?"), (0.05, r"(19|20|21)(\.\d)?")])
def test_a_loop_that_does_something_else_than_arms_is_told(by: float, factor: str) -> None:
    """As if it took the sum of 32 losses, or clipped gradients."""
    run = auto_run(RATE, optimizer=sgd)
    between(run, lambda: [p.grad.mul_(by) for p in run.net.parameters()]).steps(1)
    assert run.search.done and run.ensemble.corrections == {"lr": 1.0}
    says = f"stays .the trial was given up: .* a copy's first step was {factor} times as long"
    assert re.search(says, run.ensemble.report())


@pytest.mark.parametrize("groups", [None, [1]])
def test_groups_whose_steps_are_not_alike_are_not_compared(groups: Any) -> None:
    """One that is warming up, or that is not searched, says nothing of how long an arm's step ought
    to be."""
    net = model()
    parts = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 2e-3}]
    rates = [lambda step: 1.0, lambda step: min(1.0, (step + 1) / 200)]
    run = auto_run(
        net=net,
        optimizer=lambda parameters, **_: sgd(parts, lr=1e-3),
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, rates),
        knobs=[hdet.LearningRate(0.0, groups)],
    ).steps(2)
    assert not run.search.done


def test_losses_that_need_derivatives_of_the_model_are_scored_too() -> None:
    """As an equation's residual, or a penalty on gradients."""

    def residuals(net: nn.Module, data: Any) -> torch.Tensor:
        x = data[0].clone().requires_grad_()
        [slope] = torch.autograd.grad(net(x).sum(), x, create_graph=torch.is_grad_enabled())
        return (slope - data[1]).square().mean(1)

    runs = [auto_run(RATE, controlled=controlled) for controlled in (True, False)]
    for run in runs:
        run.losses = lambda data, run=run: residuals(run.net, data)
        run.steps(ALL - 1)
    assert torch.equal(*(run.weights() for run in runs))
    assert runs[0].steps(1).search.interval.trial.arms[0].loss > 0


@pytest.mark.parametrize(
    ("closed", "error", "message"),
    [
        (lambda losses, own: [losses()], TypeError, "returned a list: return a tensor of losses"),
        (lambda losses, own: losses().detach(), ValueError, "losses without a graph"),
        (lambda losses, own: losses() and None, ValueError, "is a return missing"),
        (lambda losses, own: own, ValueError, "the loop's own losses, whose graph is gone"),
        (lambda losses, own: 0.01 * losses().expand(8, 3), TypeError, r"mean .* no logits"),
        (lambda losses, own: -losses().expand(8, 3), TypeError, r"of shape \(8, 3\) with mean"),
        (lambda losses, own: next(iter(())), RuntimeError, "take the batch in the loop"),
        (len, TypeError, "a function without arguments"),
        ("no function", TypeError, r"call ensemble.step\(loss, closure=lambda: losses_of\("),
    ],
)
def test_a_closure_without_losses_or_without_a_graph_is_refused_by_name(
    closed: Any, error: type[Exception], message: str
) -> None:
    run = auto_run()
    own = run.losses(taught(0)).mean()
    own.backward()
    run.optimizer.step()
    losses = lambda: run.losses(taught(0)).mean()
    with pytest.raises(error, match=message):
        made = closed if closed in (len, "no function") else lambda: closed(losses, own)
        run.ensemble.step(own.item(), made)


def test_a_decorator_may_pass_what_the_wrapped_function_takes() -> None:
    run = auto_run()

    @functools.wraps(run.losses)
    def closure() -> torch.Tensor:
        return run.losses(taught(0))

    loss = closure().mean()
    loss.backward()
    run.optimizer.step()
    run.ensemble.step(loss.item(), closure)


def test_a_loop_that_trains_nothing_is_told() -> None:
    run = auto_run()
    for index in range(2):
        run.losses(taught(index)).mean().backward()
        run.optimizer.zero_grad()
        run.optimizer.step()
        run.ensemble.step(1.0, lambda index=index: run.losses(taught(index)))
    assert run.search.done and "Does zero_grad() come before" in run.ensemble.report()


def test_a_batch_that_raised_and_was_skipped_is_not_counted() -> None:
    """Three batches, one of which could not be scored, were taken for three arms that broke. And
    losses of tokens have two dimensions."""
    run, plain = auto_run(RATE), auto_run(RATE)
    losses = run.losses
    for index in range(ALL + 1):
        run.closure = lambda data: losses(data)[:, None].expand(-1, 3)
        if index == 40:
            run.closure = lambda data: 1 / 0
            with pytest.raises(ZeroDivisionError):
                run.step()
            run.index += 1
        else:
            run.step()
    found, usual = run.search.interval, plain.steps(ALL).search.interval
    assert found.suggestion == pytest.approx(usual.suggestion, rel=0.2)


def hooked(net: Any) -> torch.optim.Optimizer:
    net[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    return torch.optim.SGD(net[2].parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda net: sgd(model().parameters(), 0.1), "no parameter of the optimizer"),
        (lambda net: sgd([*net.parameters(), *model().parameters()], 0.1), "nn.ModuleList"),
        (lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS"),
        (hooked, "optimizer inside the backward pass"),
    ],
)
def test_runs_of_which_no_copies_can_be_trained_are_refused(optimizer: Any, message: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=message):
        hdet.Ensemble(optimizer(net), total_steps=2000, search=hdet.AutoLR(net))


def arms_of_ranks(rank: int, world: int, reduce: str) -> Any:
    run = auto_run(RATE, rank, ddp=reduce == "ddp", optimizer=sgd)
    reduced = lambda p: torch.distributed.all_reduce(p.grad.div_(world))
    if reduce == "by hand":
        between(run, lambda: [reduced(p) for p in run.net.parameters()])
    return run.steps(ALL).search.interval


@pytest.mark.parametrize("reduce", ["ddp", "by hand"])
def test_ranks_train_the_same_arms_however_gradients_are_averaged(reduce: str) -> None:
    one, other = run_ranks(arms_of_ranks, 2, reduce)
    assert one == other
    for arm, multiple in zip(one.trial.arms, MULTIPLES, strict=True):
        hand = by_hand(multiple, sgd, ranks=2)  # whose steps are as long as gradients are
        assert arm.losses == pytest.approx(hand.losses, rel=1e-4)
        assert arm.displacement == pytest.approx(hand.displacement, rel=1e-4)


def spread_arms(rank: int, world: int, lr: float, ddp: bool, moves: bool) -> Any:
    """(what was found, its cost, the correction), and, unless it ``moves``, whether the run is the
    one without it."""
    found, auto = [], None
    sync = hdet.Sync(100) if ddp else hdet.Sync(100, gradients="local", moments="average")
    settings = {"knobs": [hdet.LearningRate(0)], "sync": sync}
    for controlled in (True,) if moves else (False, True):
        net = noisy()
        wrapped = DistributedDataParallel(net) if ddp else net
        auto = hdet.AutoLR(wrapped, spread_arms=True if ddp else None) if controlled else None
        torch.manual_seed(rank)
        losses_at = lambda step, wrapped=wrapped: losses_of(wrapped, taught(100 * step + rank))
        *_, ensemble = training(net, losses_at, ALL + 2, lr, search=auto, **settings)
        found.append((net.state_dict(), torch.get_rng_state()))
    assert auto is not None
    return (auto.interval, auto.cost, ensemble.corrections["lr"]), moves or same(*found)


@pytest.mark.parametrize(("world", "ddp"), [(2, True), (6, False)])
def test_each_replica_may_train_arms_of_its_own(world: int, ddp: bool) -> None:
    """On its part of the batch; all ranks decide alike."""
    found = [each for each, _ in run_ranks(spread_arms, world, 1e-6, ddp, True)]
    interval, cost, moved = found[0]
    assert all(each == found[0] for each in found) and moved > 10
    assert len(interval.trial.arms) == 5 and interval.trial.smaller_batch == world
    # in the first step all arms, then those of one replica, and six scores of a third of a step
    assert cost <= 5 + (STEPS - 1) * -(-5 // world) + SCORES * 2


def test_replicas_that_train_arms_of_their_own_leave_the_run_as_it_was() -> None:
    for (_, _, moved), alike in run_ranks(spread_arms, 2, 0.1, False, False):
        assert moved == 1.0 and alike


def test_arms_are_spread_only_where_gradients_can_be_left_unreduced() -> None:
    needs = "spread_arms=True needs gradients that a trial can leave unreduced"
    with pytest.raises(ValueError, match=needs):
        auto_run(RATE, of={"spread_arms": True})


def one_breaks(rank: int, world: int) -> Any:
    """On one rank alone, the losses of scores are not finite."""
    run = auto_run(RATE, rank)
    losses = run.losses
    is_score = lambda: run.index > STEPS and not torch.is_grad_enabled()
    run.closure = lambda data: losses(data) * (float("nan") if rank and is_score() else 1.0)
    return run.steps(ALL).search.interval


def test_a_loss_that_is_not_finite_on_one_rank_is_so_on_all() -> None:
    one, other = run_ranks(one_breaks, 2)
    assert one == other and one.trial.broke
