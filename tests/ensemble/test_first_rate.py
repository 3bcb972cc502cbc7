"""A schedule that begins at 0: its first step counts, too, and cycles end at multiples of T."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR

from tests.harness import Run

from ..distributed import run_ranks
from .helpers import on_all_ranks, told

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
    assert loop.ensemble.engine.step == TOTAL


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_step_by_which_a_library_makes_a_state_counts_nothing(first: float) -> None:
    loop = Loop(first)
    get_optimizer_state_dict(loop.net, loop.optimizer)
    assert loop.optimizer.state and loop.ensemble.engine.step == 0
    loop.steps(T)
    assert (loop.ensemble.engine.step, loop.ensemble.cycle) == (T, 1)


def test_a_call_without_a_step_counts_nothing() -> None:
    loop = Loop()
    loop.ensemble.step()
    assert loop.ensemble.engine.step == 0


def test_a_run_that_was_saved_after_its_first_step_goes_on_bit_for_bit() -> None:
    whole = Loop().steps(1)
    again = Loop().loaded(whole.saved())
    assert torch.equal(whole.steps().weights(), again.steps().weights())
    assert again.ensemble.engine.step == TOTAL


def on_ranks(rank: int, world: int, local: bool) -> Any:
    settings = {"gradients": "local", "moments": "keep"} if local else {}
    loop = Loop(rank=rank, **settings)
    error = told(loop.step)
    equal = [on_all_ranks(loop.weights())]
    while local and loop.index < 2 * T:
        equal.append(on_all_ranks(loop.steps(1).weights()))
    return error, equal, loop.ensemble.engine.step


def test_local_replicas_are_equal_at_multiples_of_t() -> None:
    # In the first step, of rate 0, nobody has moved.
    equal = [step in (1, T, 2 * T) for step in range(1, 2 * T + 1)]
    assert run_ranks(on_ranks, 2, True) == [("no error", equal, 2 * T)] * 2


def test_gradients_that_differ_are_noticed_in_a_first_step_of_rate_0() -> None:
    for message, *_ in run_ranks(on_ranks, 2, False):
        assert "the first step's gradients differ between replicas" in message
