"""The harness itself: results by rank, and every way in which a rank can fail is an error of the
test, not a hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks
from tests.limits import HANG_S


def _sum(rank, world, value):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total.item(), value, os.getpid()


def test_results_by_rank_of_workers_that_are_kept():
    workers = set()
    for world in (1, 2, 4):
        *results, pids = zip(*run_ranks(_sum, world, "argument"), strict=True)
        sums = (sum(range(world)),) * world
        assert results == [tuple(range(world)), (world,) * world, sums, ("argument",) * world]
        workers |= set(pids)
    assert len(workers) == 4


def _fails(rank, world, how):
    if rank == 1 and how == "raises":
        raise KeyError("the reason")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 and how == "hangs":
        time.sleep(2 * HANG_S)
    if how == "returns what cannot be sent":
        return lambda: None
    dist.barrier()


@pytest.mark.parametrize("how, message", [
    ("raises", "the reason"), ("dies", r"exit code 3|Connection"), ("hangs", "in time"),
    ("returns what cannot be sent", "pickle"),
])  # fmt: skip
def test_failures_are_reported_and_do_not_spread(how, message):
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(_fails, 2, how, timeout=1.5 if how == "hangs" else HANG_S)
    assert time.monotonic() - start < HANG_S / 2
    assert run_ranks(_fails, 2, "not at all") == [None] * 2  # the next call has healthy workers
