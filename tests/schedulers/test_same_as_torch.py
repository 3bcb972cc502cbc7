"""Spread 0 is torch's OneCycleLR bitwise: rates, momenta and parameters, at rest, at every step,
over every way to call it."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.distributed import run_ranks

from .cases import CASES, Toy, exact, hyperparameters, pair, sgd

pytestmark = pytest.mark.filterwarnings("error")


def both(case):
    return pair(OneCycleLR, case), pair(hdet.OneCycleAutoLR, case)


def assert_same(torchs, ours, where):
    (toy_a, sched_a), (toy_b, sched_b) = torchs, ours
    assert hyperparameters(toy_a.optimizer) == hyperparameters(toy_b.optimizer), where
    assert exact(sched_a.get_last_lr()) == exact(sched_b.get_last_lr()), where
    assert exact(toy_a.parameters()) == exact(toy_b.parameters()), where
    assert sched_a.last_epoch == sched_b.last_epoch, where


def run_alike(pairs, steps):
    """So many steps of each, without a loss, which end equal each time."""
    assert_same(*pairs, "at the beginning")
    for step in range(steps):
        for toy, scheduler in pairs:
            toy.step()
            scheduler.step()
        assert_same(*pairs, f"step {step}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bitwise_the_same_run(case):
    """With a spread, as one process has nothing to spread; without one below."""
    ours = pair(hdet.OneCycleAutoLR, case, ensemble_lr_spread_ratio=0.3)
    start = exact(ours[0].parameters())
    run_alike((pair(OneCycleLR, case), ours), case.steps)
    assert exact(ours[0].parameters()) != start


def trace(rank, case, build):
    """After each step: the groups' settings, what get_last_lr says, the parameters."""
    toy, scheduler = pair(build, case, rank)
    found = []
    for _ in range(case.steps):
        loss = toy.step()
        scheduler.step(*[] if build is OneCycleLR else [loss])
        rates, weights = exact(scheduler.get_last_lr()), exact(toy.parameters())
        found.append((hyperparameters(toy.optimizer), rates, weights))
    return found


def unequal(rank, world):
    return [
        case.name
        for case in CASES[::3]
        if trace(rank, case, OneCycleLR) != trace(rank, case, hdet.OneCycleAutoLR)
    ]


def test_spread_zero_is_torch_under_ddp():
    """Each replica has data of its own; of three, as even an average of equal parameters would
    change them: 1/3 is no binary fraction."""
    assert run_ranks(unequal, 3) == [[]] * 3


def test_past_the_end_it_raises_torchs_error():
    pairs = both(CASES[0])
    run_alike(pairs, CASES[0].steps)
    for toy, scheduler in pairs:
        toy.step()
        with pytest.raises(ValueError, match="Tried to step 21 times. The specified number of tot"):
            scheduler.step()


@pytest.mark.parametrize(("arguments", "optimizer"), [
    *((arguments, sgd) for arguments in (
        {"total_steps": 10, "anneal_strategy": "CATS"}, {"total_steps": 10, "pct_start": 1.1}, {},
        {"epochs": 3}, {"total_steps": 0}, {"total_steps": 10.5},
        {"max_lr": [1e-3] * 3, "total_steps": 10}, {"total_steps": 10, "max_momentum": [0.1] * 3},
        {"total_steps": 10, "last_epoch": 3},
    )),
    ({"total_steps": 10}, lambda params: torch.optim.Rprop(params, lr=0.1)),
    ({"total_steps": 10}, lambda params: SimpleNamespace(param_groups=params)),
])  # fmt: skip
def test_invalid_arguments_raise_what_torch_raises(arguments, optimizer):
    """Rprop has no momentum to cycle; last_epoch needs initial_lr in the groups."""
    messages = []
    for build in (OneCycleLR, hdet.OneCycleAutoLR):
        with pytest.raises((ValueError, KeyError, TypeError)) as caught:
            build(Toy(optimizer).optimizer, **{"max_lr": 1e-3, **arguments})
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_resume_by_last_epoch(case):
    """torch's way without a scheduler state: load the optimizer, construct with last_epoch."""
    firsts, halves = both(case), []
    run_alike(firsts, 7)
    for (first, scheduler), build in zip(firsts, (OneCycleLR, hdet.OneCycleAutoLR), strict=True):
        second = Toy(case.optimizer)
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.take(first)
        halves.append(
            (second, build(second.optimizer, **case.arguments, last_epoch=scheduler.last_epoch - 1))
        )
    run_alike(halves, case.steps - 7)


@pytest.mark.parametrize("first", ["optimizer", "scheduler"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_by_state_dict(case, first, tmp_path):
    """Save and load in the middle, through torch.save with weights_only, in either order: the rest
    of the run is torch's, bitwise."""
    torchs, ours = both(case)
    half = case.steps // 2
    run_alike((torchs, ours), half)
    toy, scheduler = ours
    state = {"optimizer": toy.optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    json.dumps(state["scheduler"])  # plain data
    torch.save(state, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh, resumed = pair(hdet.OneCycleAutoLR, case)
    loads = {"optimizer": fresh.optimizer.load_state_dict, "scheduler": resumed.load_state_dict}
    for key in sorted(loads, key=lambda key: key != first):
        loads[key](saved[key])
    fresh.take(toy)
    run_alike((torchs, (fresh, resumed)), case.steps - half)
