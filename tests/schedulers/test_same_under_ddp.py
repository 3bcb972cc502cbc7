"""Spread 0 over several replicas is torch's OneCycleLR plus DistributedDataParallel, bitwise, for every way to call it.

Three replicas, each with data of its own: 1/3 is not a binary fraction, so even an average of equal parameters would change them.
"""

import pytest
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.distributed import run_ranks
from tests.schedulers.cases import CASES, exact, hyperparameters, pair


def _run(rank, case, build):
    """After each step: the groups' settings, what get_last_lr says, the parameters."""
    toy, scheduler = pair(build, case, rank)
    trace = []
    for _ in range(case.steps):
        loss = toy.step()
        scheduler.step(*[] if build is OneCycleLR else [loss])
        trace.append((hyperparameters(toy.optimizer), exact(scheduler.get_last_lr()), exact(toy.parameters())))
    return trace


def _compare(rank, world):
    return [case.name for case in CASES if _run(rank, case, OneCycleLR) != _run(rank, case, hdet.OneCycleAutoLR)]


@pytest.mark.parametrize("world", [2, 3])
def test_spread_zero_is_torch_under_ddp(world):
    assert run_ranks(_compare, world) == [[]] * world
