"""hdet's own ways of averaging keep the contract, and it notices ways that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hdet.converge import Averager, Averaging, Compressed, ExactLocal, Outer, Plain, Task
from hdet.testing import AveragingContract

from ..distributed import run_ranks


def call(rank: int, world: int, function: Any, *args: Any) -> Any:
    return function(*args)


class Contract(AveragingContract):
    @staticmethod
    def ranks(function: Any, world: int, *args: Any) -> list[Any]:
        return run_ranks(call, world, function, *args)


class TestPlain(Contract):
    way = Plain()


class TestAlone(AveragingContract):
    """In processes that the contract starts."""

    way = Plain()


class TestBFloat16(Contract):
    way, error = Compressed("bf16"), 2.0**-8


class TestInt8(Contract):
    way, error = Compressed("int8", 16), 1e-2


class TestExactLocal(Contract):
    way, error = ExactLocal(3), 2e-6


class TestOuter(Contract):
    way, error, gradients = Outer(), None, "local"


class BadAverager(Averager):
    """Is off by one ulp on a rank, or by a percent on all, or keeps what it has begun with."""

    def __init__(self, task: Task, fault: str) -> None:
        super().__init__(task)
        self.fault, self.first = fault, [t.detach().clone() for t in task.tensors]

    @torch.no_grad()
    def end_cycle(self, shares: Sequence[float]) -> list[str]:
        notes = super().end_cycle(shares)
        for tensor, first in zip(self.task.tensors, self.first, strict=True):
            if self.fault == "ranks" and dist.get_rank() == 1:
                tensor.mul_(1 + 2**-20)
            if self.fault == "mean":
                tensor.mul_(1.01)
            if self.fault == "state":
                tensor.copy_(first.lerp_(tensor, 0.5))
        return notes

    def complete(self, weights: Sequence[float]) -> None:
        super().complete([1.0, 0.0] if self.fault == "converge" else weights)


@dataclasses.dataclass(frozen=True)
class Bad(Averaging):
    fault: str = ""

    def make_averager(self, task: Task) -> Averager:
        return BadAverager(task, self.fault)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("ranks", "test_replicas_part_within_a_cycle_and_are_equal_bitwise_at_its_end"),
        ("mean", "test_the_average_at_a_cycles_end_is_the_mean_up_to_the_error_that_is_said"),
        ("converge", "test_converge_gives_the_mean_now_and_nothing_is_kept_back"),
        ("state", "test_a_converged_run_goes_on_bitwise_also_where_another_state_was_in_place"),
    ],
)
def test_a_fault_is_found(fault: str, test: str) -> None:
    broken: Any = type("Broken", (Contract,), {"way": Bad(fault)})()
    with pytest.raises(AssertionError):
        getattr(broken, test)()
