"""The line over two processes: one decision for all, that of one process with both batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import hdet
from tests.distributed import run_ranks
from tests.ensemble.test_line import Fixed
from tests.harness import taught
from tests.layouts.common import model

STEPS = 96


def _train(
    start: float, batches: list[int], ddp: bool, restart: bool = False, interval: int = 2
) -> tuple[list[dict[str, float]], list[float], list[str]]:
    """Base values, weights and notes of a run; ``batches``: this process's of each step. float64, where rounding is 1e-16."""
    net = model()
    wrapped: Any = DDP(net) if ddp else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=start) if restart else torch.optim.SGD(net.parameters(), lr=start)
    rule = Fixed(back=True, factor=1.6, ramp=4, ramp_from=1 / 16) if restart else None
    notes: list[str] = []
    ensemble = hdet.Ensemble(
        optimizer,
        controller=hdet.LineController(net, rule=rule),
        sync=hdet.Sync(interval),
        total_steps=200,
        log=lambda record, step: notes.extend(record["notes"]),
    )
    values = []
    for step in range(STEPS):
        batch = [torch.cat(pair).double() for pair in zip(*(taught(2 * step + b) for b in batches), strict=True)]
        losses = squares(wrapped, batch)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        ensemble.step(losses.detach().mean(), closure=lambda batch=batch: squares(net, batch))
        values.append(ensemble.values())
    return values, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(), notes


def squares(net: Any, batch: Any) -> torch.Tensor:
    return ((net(batch[0]) - batch[1]) ** 2).mean(1)


def _decide(rank: int, world_size: int, start: float, restart: bool, interval: int = 2) -> Any:
    return _train(start, [rank], ddp=True, restart=restart, interval=interval)


@pytest.mark.parametrize("interval", [2, 20])
def test_both_ranks_decide_alike_and_as_one_process_with_both_batches(interval: int) -> None:
    """Cycles of 2 steps, a doubling, and longer ones, in whose place the sweep has its own."""
    start = 1e-3
    one, two = run_ranks(_decide, 2, start, False, interval)
    assert one == two  # bitwise: values, weights, notes
    values, weights, _ = _train(start, [0, 1], ddp=False, interval=interval)
    assert [v["lr"] for v in one[0]] == pytest.approx([v["lr"] for v in values], rel=1e-6)
    assert one[1] == pytest.approx(weights, rel=1e-6, abs=1e-9)
    assert values[-1]["lr"] > 5 * start


def test_a_restart_leaves_ranks_equal_to_the_bit() -> None:
    one, two = run_ranks(_decide, 2, 0.3, True)
    assert one == two  # bitwise: values, weights, notes
    assert one[0][7]["lr"] == pytest.approx(0.03 / 8) and one[0][-1]["lr"] == pytest.approx(0.03)
