"""A rank that comes alone, or for something else: all are told who came for what."""

from __future__ import annotations

import datetime
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hdet

from ..distributed import run_ranks
from ..ensemble.helpers import told
from ..harness import Run, losses_of, model
from .harness import World, run_faulty


def local(rank: int, steps: int, every: int = 8) -> Run:
    return Run(rank, ddp=False, gradients="local", moments="keep", every=every).steps(steps)


def converge(rank: int, _: str) -> Any:
    run = local(rank, 3)
    return run.steps(5) if rank else run.ensemble.converge()


def save(rank: int, folder: str) -> Any:
    run = local(rank, 3)
    state = hdet.checkpoint.RunState(run.net, run.ensemble)
    return run.steps(5) if rank else hdet.checkpoint.save(folder, state)


def search(
    odd: Any, when: range, spread: bool, rank: int, _: str = "", odd_rank: int = 1, **of_ddp: Any
) -> Any:
    """A trial under DDP, in which one rank has an ``odd`` closure in some steps."""
    net = model()
    ddp = DistributedDataParallel(net, **of_ddp)
    run = Run(
        rank, net=net, ddp=False, search=hdet.AutoLR(ddp, spread_arms=spread), total=2000,
        spread=0.0,
    )  # fmt: skip
    run.wrapped = ddp
    for step in range(57):
        is_odd = rank == odd_rank and step in when
        run.closure = odd if is_odd else lambda data: losses_of(ddp, data)
        run.step()
    return run.search.interval.to_dict()


def join(rank: int, _: str) -> None:
    run = Run(rank)
    with run.wrapped.join():
        run.steps(10 - rank)


NEVER, FIRST, LATER, ALWAYS = range(0), range(1), range(5, 6), range(57)
none: Any = lambda data: None
empty: Any = lambda data: torch.ones(0)
TRAINS, LACKS = (
    "rank 0: a step of the trial at step ",
    "; rank 1: a step without a closure at step ",
)
CASES: dict[str, tuple[Any, str]] = {
    "converge()": (converge, "rank 0: converge() at step 3; rank 1: the end of a cycle at step 8"),
    "fewer batches": (
        lambda rank, _: local(rank, 12 - 3 * rank, 16).ensemble.converge(),
        "rank 0: converge() at step 12; rank 1: converge() at step 9",
    ),
    "save": (save, "rank 0: checkpoint at step 3; rank 1: the end of a cycle at step 8"),
    "no closure": (partial(search, None, ALWAYS, False), f"{TRAINS}0{LACKS}0"),
    "a closure left out": (partial(search, None, LATER, True), f"{TRAINS}5{LACKS}5"),
    "no losses, where DDP reduces": (
        partial(search, none, LATER, False, find_unused_parameters=True),
        "rank 0: losses of an arm at step 5; rank 1: an arm without losses at step 5",
    ),
    "no graph": (partial(search, lambda _: torch.ones(8), ALWAYS, False), "without a graph"),
    "join()": (join, "leave join() out, and end each epoch after the smallest number"),
}


def part(rank: int, world: int, folder: str) -> dict[str, str]:
    """In one process group, which is whole after each of them."""
    return {name: told(partial(case, rank, folder)) for name, (case, _) in CASES.items()}


def test_all_ranks_say_who_came_for_what(tmp_path: Any) -> None:
    one, two = run_ranks(part, 2, str(tmp_path))
    assert one == two
    assert [name for name, (_, says) in CASES.items() if says not in one[name]] == [], one


def see_nothing(rank: int, world: int) -> list[Any]:
    cases = [(none, NEVER, False), (none, ALWAYS, False), (empty, LATER, False),
             (none, NEVER, True), (none, LATER, True)]  # fmt: skip
    return [*(search(*case, rank) for case in cases), search(empty, FIRST, True, rank, odd_rank=0)]


def test_a_rank_that_sees_no_losses_sends_zeros() -> None:
    one, two = run_ranks(see_nothing, 2)
    assert one == two
    for usual, *others in (one[:3], one[3:]):
        for found in others:
            assert found["suggestion"] == pytest.approx(usual["suggestion"], rel=0.5)


def converge_under_ddp(world: World) -> None:
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=world.timeout))
    run = Run(world.rank)
    world.ensemble = run.ensemble
    with run.ensemble.guard():
        run.steps(3)
        world.mark_fault()
        if world.rank == 0:
            run.ensemble.converge()
        run.steps(1)


def test_a_rank_that_waits_while_others_train_ends_with_the_timeout(tmp_path: Any) -> None:
    """DDP waits for it too. Neither is in the other's collective, which would abort the process."""
    one, two = run_faulty(converge_under_ddp, 2, tmp_path, timeout=5.0)
    assert one.exitcode == two.exitcode == 0
    assert "statistics failed in cycle 0 (step 3), in converge() at step 3: " in str(one.error)
    assert "training step failed" in str(two.error) and "as many batches" in str(two.error)
