"""The line over two processes: one decision for all, that of one process with both batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from tests.distributed import run_ranks
from tests.ensemble.test_line import Fixed
from tests.harness import Batch, Run, taught

STEPS = 96


def train(rank: int, start: float, restart: bool, interval: int, both: bool = False) -> tuple[list[float], list[float], list[str]]:
    """Base values, weights and notes of a run; ``both``: of one process with the batches of two. float64, where rounding is 1e-16."""

    def data(number: int) -> Batch:
        numbers = [number, number + 1] if both else [number]
        x, y = (torch.cat(parts).double() for parts in zip(*map(taught, numbers), strict=True))
        return x, y

    rule = Fixed(back=True, factor=1.6, ramp=4, ramp_from=1 / 16) if restart else None
    run = Run(
        rank, optimizer=torch.optim.AdamW if restart else lambda parameters, **_: torch.optim.SGD(parameters, lr=start), scheduler=None,
        lr=start, total=200, every=interval, knobs=None, dtype=torch.float64, controller=lambda net: hdet.LineController(net, rule=rule),
        data=data, closure=True,
    )  # fmt: skip
    run.losses = lambda data: squares(run.wrapped, data)
    run.closure = lambda data: squares(run.net, data)
    values = []
    for _ in range(STEPS):
        run.step()
        values.append(run.rate)
    return values, run.weights().tolist(), run.notes()


def squares(net: Any, data: Batch) -> torch.Tensor:
    return ((net(data[0]) - data[1]) ** 2).mean(1)


def decide(rank: int, world: int, start: float, restart: bool, interval: int = 2) -> Any:
    return train(rank, start, restart, interval)


@pytest.mark.parametrize("interval", [2, 20])
def test_both_ranks_decide_alike_and_as_one_process_with_both_batches(interval: int) -> None:
    """Cycles of 2 steps, a doubling, and longer ones, in whose place the sweep has its own."""
    start = 1e-3
    one, two = run_ranks(decide, 2, start, False, interval)
    assert one == two  # bitwise: values, weights, notes
    values, weights, _ = train(0, start, False, interval, both=True)
    assert one[0] == pytest.approx(values, rel=1e-6)
    assert one[1] == pytest.approx(weights, rel=1e-6, abs=1e-9)
    assert values[-1] > 5 * start


def test_a_restart_leaves_ranks_equal_to_the_bit() -> None:
    one, two = run_ranks(decide, 2, 0.3, True)
    assert one == two  # bitwise: values, weights, notes
    assert one[0][7] == pytest.approx(0.03 / 8) and one[0][-1] == pytest.approx(0.03)
