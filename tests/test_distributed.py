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
    return rank, dist.get_world_size(), total, value


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_by_rank(world):
    results = run_ranks(_sum, world, "argument")
    assert [(rank, size, value) for rank, size, _, value in results] == [
        (r, world, "argument") for r in range(world)
    ]
    assert all(total.item() == sum(range(world)) for _, _, total, _ in results)


def _fails(rank, world, how):
    if rank == 1 and how == "raises":
        raise KeyError("the reason")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 and how == "hangs":
        time.sleep(2 * HANG_S)
    if rank == 1 and how == "returns what cannot be sent":
        return lambda: None
    if how != "returns what cannot be sent":
        dist.barrier()
    return os.getpid()


@pytest.mark.parametrize(
    "how, message",
    [
        ("raises", "the reason"),
        ("dies", r"exit code 3|Connection"),
        ("hangs", "in time"),
        ("returns what cannot be sent", "pickle"),
    ],
)
def test_failures_are_reported_and_do_not_spread(how, message):
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(_fails, 2, how, timeout=1.5 if how == "hangs" else HANG_S)
    assert time.monotonic() - start < HANG_S / 2
    assert len(set(run_ranks(_fails, 2, "not at all"))) == 2  # the next call has healthy workers


def test_workers_are_kept_between_calls():
    assert run_ranks(_fails, 2, "not at all") == run_ranks(_fails, 2, "not at all")
