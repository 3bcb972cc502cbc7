"""A schedule's peak is noticed at every step; cycles that are too long to decide are told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import hdet
from tests.harness import Run, Scripted, model, probe

from ..distributed import run_ranks
from .helpers import ALL_WARNINGS, told

PEAK = "of its peak"


def linear(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Five steps up, then down to zero: below 95 % after step 9, below 90 % after step 14."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / 5, (100 - step) / 95))


def run(every: int, controller: Any = "probe", together: int = 4, **settings: Any) -> Run:
    settings = {"scheduler": linear, "total": 100, **settings}
    return Run(together=together, every=every, controller=controller, **settings)


def spread_in(run: Run) -> list[bool]:
    """By cycle."""
    return [len(set(record["multipliers"]["lr"])) > 1 for record in run.records]


@pytest.mark.parametrize(
    ("every", "settings", "decisions"),
    [(10, {}, 1), (20, {}, 0), (50, {}, 0), (10, {"warmup_steps": 30}, 3)],
)
def test_a_peak_between_two_ends_of_cycles_has_passed_and_the_spread_rests(
    every: int, settings: dict[str, Any], decisions: int
) -> None:
    """So many cycles end above 90 % of it or in the warm-up, and none above 95 %."""
    said = rf"schedule of lr .*'ProbeController'.* which have {every} steps.*hdet\.Sync"
    with pytest.warns(UserWarning, match=said):
        under = run(every, **settings).steps()
    assert spread_in(under) == [cycle <= decisions for cycle in range(100 // every)]


def frozen_early(net: torch.nn.Module) -> hdet.Controller:
    return probe(net, freeze_after=5)


@ALL_WARNINGS
@pytest.mark.parametrize(
    ("every", "controller", "until"), [(2, "probe", 15), (5, "probe", 15), (5, frozen_early, 5)]
)
def test_where_all_can_be_decided_nothing_is_said(every: int, controller: Any, until: int) -> None:
    under = run(every, controller).steps()
    assert spread_in(under) == [cycle * every < until for cycle in range(100 // every)]


def test_a_value_before_the_first_step_is_no_peak() -> None:
    """A loop that writes its own schedule has the optimizer's rate in its groups until then."""
    under = run(5, total=40, scheduler=None)
    group = under.optimizer.param_groups[0]
    group["initial_lr"] = peak = group["lr"]
    for step in range(40):
        with under.ensemble.rescheduling():
            group["lr"] = peak * min((step + 1) / 20, (40 - step) / 20)
        under.step()
    assert spread_in(under) == [True] * 5 + [False] * 3


def test_a_resumed_run_knows_the_peak_of_the_cycle_that_it_goes_on_with() -> None:
    under, again = run(50).steps(20), run(50)
    under.ensemble.converge()
    again.ensemble.load_state_dict(under.ensemble.state_dict())
    again.index = 20
    with pytest.warns(UserWarning, match=PEAK):
        again.steps()
    assert spread_in(again) == [True, False]


def made(
    make: Callable[[Any], Any], total: int | None, search: Any = None, **settings: Any
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    settings |= {"search": search and search(net), "controller": make(net)}
    hdet.Ensemble(optimizer, total_steps=total, **settings)


def scripted(net: torch.nn.Module) -> hdet.Controller:
    return Scripted()


@pytest.mark.parametrize("search", [None, hdet.AutoLR])
def test_a_run_of_fewer_than_two_cycles_is_warned_of(search: Any) -> None:
    said = r"has 1999 steps, .* T = 1000 \(1000 by default\): the controller 'scripted'"
    with pytest.warns(UserWarning, match=said + r".*sync=hdet\.Sync\(99\)"):
        made(scripted, 1999, search)
    said = r"has 99 steps, .* T = 50 \(1000 by default\).*sync=hdet\.Sync\(4\)"
    with pytest.warns(UserWarning, match=said):
        made(scripted, 99, search, sync=hdet.Sync(50))


@ALL_WARNINGS
def test_no_other_run_is_warned_of() -> None:
    made(scripted, 2000)
    made(scripted, None)
    made(lambda net: None, 10)
    made(lambda net: None, 300, hdet.AutoLR)  # in the first steps, whatever cycles there are


# -- a schedule that begins at 0 ---------------------------------------------------------------


T, TOTAL = 5, 20


class Loop(Run):
    """A warm-up from ``first`` / 4 of the rate; ``theirs``: the user steps the scheduler."""

    def __init__(self, first: float = 0.0, *, theirs: bool = False, **settings: Any) -> None:
        def optimizer(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(parameters, **settings)
            self.own = LambdaLR(made, lambda step: min(1.0, max(0.0, (step + first) / 4)))
            return made

        self.theirs = theirs
        super().__init__(
            optimizer=optimizer, scheduler=None if theirs else lambda _: self.own, lr=0.01,
            total=TOTAL, every=T, ddp=False, **settings,
        )  # fmt: skip

    def step(self, report: Any = None) -> torch.Tensor:
        loss = self.backward()
        self.optimizer.step()
        if self.theirs:
            with self.ensemble.rescheduling():
                self.own.step()
        self.ensemble.step(loss)
        self.index += 1
        return loss


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("first", [-2.0, 0.0, 1.0])
def test_cycles_end_at_multiples_of_t_and_the_last_one_at_the_end(
    first: float, theirs: bool
) -> None:
    loop = Loop(first, theirs=theirs).steps()
    assert [record["step"] for record in loop.records] == [5, 10, 15, 20]
    assert loop.ensemble.steps_done == TOTAL


def on_ranks(rank: int, world: int) -> str:
    return told(Loop(rank=rank).step)


def test_gradients_that_differ_are_noticed_in_a_first_step_of_rate_0() -> None:
    for message in run_ranks(on_ranks, 2):
        assert "the first step's gradients differ between replicas" in message
