"""A line on batches that cannot be read: of one example, or of another number of them at each call. And what else is refused by name."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from tests.harness import Run, batch

from ..distributed import run_ranks

TOTAL = 200


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
            optimizer, controller=hdet.AutoLR(net, budget=0.5), sync=hdet.Sync(10, buffers=net), total_steps=TOTAL, divergence=hdet.Divergence(rollback="host")
        )  # fmt: skip
    assert [b.shape[0] for b in ensemble.parameters.buffers] == [3] and ensemble.parameters.buffers[0] is net.mean
    for step in range(60):
        x, y = batch(step)
        losses = (net(x) - y).square().mean(-1)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(losses.mean().detach(), closure=lambda x=x, y=y: (net(x) - y).square().mean(-1))
    assert torch.equal(net.weight.float(), torch.ones(6, 6))
    assert ensemble.engine.controller is not None and ensemble.engine.controller.state_dict()["found"]


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
