"""Spread 0 over several replicas is torch's OneCycleLR plus DistributedDataParallel, bitwise, for every way to call it.

Three replicas, each with data of its own: 1/3 is not a binary fraction, so even an average of equal parameters would change them.
"""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.distributed import run_ranks
from tests.schedulers.cases import CASES, exact, hyperparameters


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = torch.nn.Parameter(torch.randn(5, 4, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(4, 1, generator=generator))

    def forward(self, inputs):
        return (inputs @ self.first).tanh() @ self.second


def _run(rank, case, build, spread=0.0):
    """After each step: the groups' settings, what get_last_lr says, the parameters."""
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = case.optimizer([{"params": [model.first]}, {"params": [model.second]}])
    scheduler = build(optimizer, **copy.deepcopy(case.arguments))
    generator = torch.Generator().manual_seed(rank)
    trace = []
    for _ in range(case.steps):
        loss = (wrapped(torch.randn(8, 5, generator=generator)) - torch.randn(8, 1, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step() if build is OneCycleLR else scheduler.step(loss)
        trace.append((hyperparameters(optimizer), exact(scheduler.get_last_lr()), exact([p.detach() for p in model.parameters()])))
    return trace


def _ours(optimizer, **arguments):
    return hdet.OneCycleAutoLR(optimizer, **arguments, model_sync_interval=4)


def _compare(rank, world):
    different = []
    for case in CASES:
        if _run(rank, case, OneCycleLR) != _run(rank, case, _ours):
            different.append(case.name)
    return different


@pytest.mark.parametrize("world", [2, 3])
def test_spread_zero_is_torch_under_ddp(world):
    assert run_ranks(_compare, world) == [[]] * world
