"""A schedule that begins at 0, as many a warm-up does: its first step counts, too, and cycles end at multiples of T."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import hdet

from ..distributed import run_ranks

T, TOTAL = 5, 20


class Loop:
    """AdamW and a warm-up from ``first`` / 4 of the rate, or from 0; ``theirs``: the user steps the scheduler inside rescheduling, before the Ensemble's step."""

    def __init__(
        self, first: float = 0.0, *, rank: int = 0, theirs: bool = False, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.net, self.rank = nn.Linear(3, 1), rank
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, max(0.0, (step + first) / 4))
        )
        self.theirs = theirs
        self.ensemble = hdet.Ensemble(
            self.optimizer,
            None if theirs else self.scheduler,
            total_steps=TOTAL,
            knobs=[hdet.LearningRate(0.3)],
            **settings,
        )
        self.done = 0

    def train(self, steps: int) -> Loop:
        for _ in range(steps):
            x = torch.randn(
                4, 3, generator=torch.Generator().manual_seed(100 * self.done + self.rank)
            )
            self.optimizer.zero_grad()
            loss = (self.net(x).squeeze(1) - x.sum(1)).square().mean()
            loss.backward()
            self.optimizer.step()
            if self.theirs:
                with self.ensemble.rescheduling():
                    self.scheduler.step()
            self.ensemble.step(loss)
            self.done += 1
        return self


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("first", [-2.0, 0.0, 1.0])
def test_cycles_end_at_multiples_of_t_and_the_last_one_at_the_end(
    first: float, theirs: bool
) -> None:
    ends: list[int] = []
    loop = Loop(
        first, theirs=theirs, sync=hdet.Sync(T), log=lambda record, step: ends.append(step)
    ).train(TOTAL)
    assert (
        ends == [5, 10, 15, 20]
        and loop.ensemble.engine.step == TOTAL
        and loop.ensemble.history["step"] == TOTAL
    )


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_step_by_which_a_library_makes_a_state_counts_nothing(first: float) -> None:
    loop = Loop(first, sync=hdet.Sync(T))
    get_optimizer_state_dict(loop.net, loop.optimizer)
    assert loop.optimizer.state and loop.ensemble.engine.step == 0
    loop.train(T)
    assert (loop.ensemble.engine.step, loop.ensemble.cycle) == (T, 1)


def test_a_call_without_a_step_counts_nothing() -> None:
    loop = Loop(sync=hdet.Sync(T))
    loop.ensemble.step()
    assert loop.ensemble.engine.step == 0


def test_a_run_that_was_saved_after_its_first_step_goes_on_bit_for_bit() -> None:
    whole, again = Loop(sync=hdet.Sync(T)).train(1), Loop(sync=hdet.Sync(T))
    again.net.load_state_dict(whole.net.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    again.ensemble.load_state_dict(whole.ensemble.state_dict())
    again.done = 1
    whole.train(TOTAL - 1)
    again.train(TOTAL - 1)
    assert (
        all(map(torch.equal, whole.net.parameters(), again.net.parameters()))
        and again.ensemble.engine.step == TOTAL
    )


def _on_ranks(rank: int, world: int, gradients: str) -> Any:
    sync = hdet.Sync(T, gradients="local", moments="keep") if gradients == "local" else hdet.Sync(T)
    loop = Loop(rank=rank, sync=sync)
    same = []
    try:
        for _ in range(2 * T):
            loop.train(1)
            found = [torch.zeros(1, 3) for _ in range(world)]
            dist.all_gather(found, loop.net.weight.detach())
            same.append(torch.equal(*found))
    except ValueError as error:
        return str(error)
    return same, loop.ensemble.engine.step


def test_local_replicas_are_equal_at_multiples_of_t() -> None:
    # In the first step, of rate 0, nobody has moved.
    assert (
        run_ranks(_on_ranks, 2, "local")
        == [([step in (1, T, 2 * T) for step in range(1, 2 * T + 1)], 2 * T)] * 2
    )


def test_gradients_that_differ_are_noticed_in_a_first_step_of_rate_0() -> None:
    for message in run_ranks(_on_ranks, 2, "shared"):
        assert "the first step's gradients differ between replicas" in message
