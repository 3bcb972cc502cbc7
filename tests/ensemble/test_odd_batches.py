"""A line on batches that cannot be read: of one example, or of another number of them at each call. And what else is refused by name."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from tests.harness import Batch, Run, batch, losses_of

from ..distributed import run_ranks

TOTAL = 200


def sized(size: Callable[[int], int], *, rank: int = 0, sees: Callable[[int], bool] = lambda step: True) -> Run:
    """A line over batches of ``size(step)`` examples, steps counted from 1; ``sees``: does this rank's closure see losses in that step?"""

    def data(key: int) -> Batch:
        return batch(key // 10 + 10 + rank, size(key // 100 + 1))

    run = Run(lr=1e-3, total=TOTAL, every=10, scheduler=None, controller=hdet.LineController, data=data, closure=True)
    run.closure = lambda data: losses_of(run.net, data) if sees(run.index + 1) else None
    return run


def skipped(run: Run) -> int:
    return sum("the line was not read" in note for note in run.notes())


def test_a_batch_of_one_example_at_a_doubling_s_end_is_left_out() -> None:
    ends = [record["step"] for record in sized(lambda _: 8).steps().records]
    run = sized(lambda step: 1 if step in ends else 8).steps()
    assert skipped(run) and not run.ensemble.sweeping and run.ensemble.corrections["lr"] > 1
    after = [record["step"] for record in run.records if record["step"] % 10 == 0 and record["step"] > 50]
    assert after[-1] == TOTAL and len(after) >= 14, "cycles end at multiples of T again"


def test_the_same_batch_at_every_doubling_s_end_does_not_keep_the_sweep_for_ever() -> None:
    """An epoch as long as a doubling: the next step's batch is read."""
    run = sized(lambda step: 1 if step % 2 == 0 else 8).steps()
    assert skipped(run) and not run.ensemble.sweeping


def test_batches_of_one_example_from_then_on_are_an_error_in_the_end() -> None:
    run = sized(lambda step: 8 if step < 20 else 1)
    with pytest.raises(ValueError, match="the closure gave 1 losses over all ranks"):
        run.steps()


def few(rank: int, world: int) -> Any:
    """Of two ranks one sees one example, and the other nothing, in every second step."""
    run = sized(lambda step: 8 if step % 2 else 1, rank=rank, sees=lambda step: rank == 0 or step % 2 == 1)
    run.steps(60)
    return skipped(run), run.ensemble.values(), [record["step"] for record in run.records], run.ensemble.sweeping


def test_ranks_leave_out_the_same_readings() -> None:
    one, two = run_ranks(few, 2)
    assert one == two and one[0] > 0 and not one[3]


def changing(rank: int, world: int) -> str:
    run = sized(lambda _: 8, rank=rank)
    calls = [0]

    def closure(data: Batch) -> torch.Tensor:
        calls[0] += 1
        losses = losses_of(run.net, data)
        return losses if rank == 0 or calls[0] < 6 else losses[: calls[0] % 3 + 1]

    run.closure = closure
    try:
        run.steps()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world", [1, 2])
def test_a_closure_that_returns_another_number_of_losses_is_named_on_all_ranks(world: int) -> None:
    messages = run_ranks(changing, world) if world == 2 else [alone()]
    assert len(set(messages)) == 1 and f"another number of losses than before, in replica {world - 1}" in messages[0]


def alone() -> str:
    run = sized(lambda _: 8)
    sizes = iter([8, 8, 1] + [7, 5] * 100)
    run.closure = lambda data: losses_of(run.net, data)[: next(sizes)]
    with pytest.raises(ValueError) as caught:
        run.steps()
    return str(caught.value)


# -- eight bits ----------------------------------------------------------------------------------------------------------------


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(6, 1)
        self.weight = nn.Parameter(torch.ones(6, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.ones(3).to(torch.float8_e5m2))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x @ self.weight.float())


@pytest.mark.parametrize("make", [torch.optim.AdamW, hdet.FusedAdamW])
def test_a_frozen_parameter_in_8_bits_is_refused_in_the_optimizer(make: Any) -> None:
    net = Quantised()
    with pytest.raises(ValueError, match="parameter 0 has dtype torch.float8_e4m3fn.*leave it out of the optimizer"):
        hdet.Ensemble(make(net.parameters(), lr=1e-3))


def test_and_stays_as_it_is_in_the_model() -> None:
    net = Quantised()
    optimizer = torch.optim.AdamW(net.adapter.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble = hdet.Ensemble(
            optimizer, controller=hdet.LineController(net), sync=hdet.Sync(10, buffers=net), total_steps=TOTAL, divergence=hdet.Divergence(rollback="host")
        )  # fmt: skip
    assert [b.shape[0] for b in ensemble.parameters.buffers] == [3] and ensemble.parameters.buffers[0] is net.mean
    for step in range(60):
        x, y = batch(step)
        losses = (net(x) - y).square().mean(-1)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(losses.mean().detach(), closure=lambda x=x, y=y: (net(x) - y).square().mean(-1))
    assert torch.equal(net.weight.float(), torch.ones(6, 6)) and not ensemble.sweeping


# -- a process group that is gone ------------------------------------------------------------------------------------------------


def destroyed(rank: int, world: int, again: bool, folder: str) -> list[str]:
    run = Run(rank).steps(3)
    dist.barrier()
    dist.destroy_process_group()
    if again:  # another one, of which the Ensemble knows nothing
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, str(rank))), 1), rank=0, world_size=1)
    run.wrapped = run.net
    said = []
    for act in (lambda: run.steps(2), run.ensemble.converge):
        try:
            act()
        except RuntimeError as error:
            said.append(str(error))
    run.ensemble.close()
    if not again:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, str(rank))), 1), rank=0, world_size=1)
    return said


@pytest.mark.parametrize("again", [False, True])
def test_a_process_group_destroyed_under_a_live_ensemble_is_named(again: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, said in enumerate(run_ranks(destroyed, 2, again, folder)):
            assert len(said) == 2, said
            assert all(f"the process group of replica {rank} has been destroyed" in text and "make a new one" in text for text in said)
