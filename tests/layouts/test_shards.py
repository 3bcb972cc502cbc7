"""A replica of several ranks, in a few lines of hand-made parallelism, against it by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from tests.distributed import run_ranks
from tests.layouts.common import INTERVAL, Trace, adamw, batch, check, flat, loss_of, model, train

STEPS = 6


class Experts(nn.Module):
    """Rows 0 .. 3 of a batch go to the first expert, rows 4 .. 7 to the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.experts = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.experts, x.split(4), strict=True)
        return torch.cat([expert(torch.tanh(self.dense(rows))) for expert, rows in pairs])


Observe = Callable[..., None]
Part = tuple[hdet.Replicas, list[nn.Parameter], Callable[[int, Observe], None]]
"""Each gives its parameters and a backward pass."""


def subgroup(replicas: hdet.Replicas) -> Any:
    """The ranks of this replica."""
    return dist.new_subgroups_by_enumeration([list(ranks) for ranks in replicas.ranks])[0]


def context_parallel(rank: int) -> Part:
    """One sample on two ranks, 5 and 3 of its 8 rows; the gradient is that of both shares."""
    replicas = hdet.Replicas.from_layout(cp=2)
    inside, net = subgroup(replicas), model()
    share, weight = (slice(0, 5), 5) if replicas.member == 0 else (slice(5, 8), 3)

    def backward(step: int, observe: Observe) -> None:
        x, y = batch(step, replicas.index)
        loss = loss_of(net, (x[share], y[share]))
        (loss * weight / 8).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, group=inside)
        observe(loss, weight=weight)

    return replicas, list(net.parameters()), backward


def expert_parallel(rank: int) -> Part:
    replicas = hdet.Replicas.from_layout(ep=2)
    inside, own = subgroup(replicas), replicas.member
    net = Experts()

    def backward(step: int, observe: Observe) -> None:
        x, y = (part.split(4)[own] for part in batch(step, replicas.index))
        loss = loss_of(lambda rows: net.experts[own](torch.tanh(net.dense(rows))), (x, y))
        (loss / 2).backward()
        for p in net.dense.parameters():
            dist.all_reduce(p.grad, group=inside)
        observe(loss, weight=4)

    return replicas, [*net.dense.parameters(), *net.experts[own].parameters()], backward


def groups(rank: int) -> Part:
    """Ranks 0 and 1 share a rate, and 2 and 3: plain data parallelism inside."""
    net = model()
    ddp = nn.parallel.DistributedDataParallel(net)

    def backward(step: int, observe: Observe) -> None:
        loss = loss_of(ddp, batch(step, rank))
        loss.backward()
        observe(loss)

    return hdet.Replicas.from_group([[0, 1], [2, 3]]), list(net.parameters()), backward


CASES = {"context": context_parallel, "expert": expert_parallel, "groups": groups}


class Seen(NamedTuple):
    table: list[list[int]]
    trace: Trace
    shapes: list[torch.Size]

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Of flat parameters, each by itself."""
        parts = vector.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def run(rank: int, case: str) -> Seen:
    replicas, parameters, backward = CASES[case](rank)

    def shared(step: int, observe: Observe) -> None:
        backward(step, observe)
        for p in parameters if case != "groups" else ():
            dist.all_reduce(p.grad, group=replicas.peer_group)
            p.grad /= replicas.count

    trace = train(parameters, adamw(parameters), shared, STEPS, replicas=replicas)
    return Seen([list(ranks) for ranks in replicas.ranks], trace, [p.shape for p in parameters])


def train_all(rank: int, world: int) -> dict[str, Seen]:
    return {case: run(rank, case) for case in CASES}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Seen]]:
    ranks = run_ranks(train_all, 4)
    return {case: [run[case] for run in ranks] for case in CASES}


def check_parts(ranks: list[Seen], assemble: Callable[..., Any], **settings: Any) -> None:
    """``assemble(member 0's parameters, member 1's)`` -> the whole model's, in its order."""
    table = ranks[0].table

    def whole(members: list[int], i: int, when: int) -> torch.Tensor:
        return flat(assemble(*(ranks[m].parts(ranks[m].trace.steps[i][when]) for m in members)))

    traces = []
    for members in table:
        steps = [(torch.empty(0), *(whole(members, i, k) for k in (1, 2))) for i in range(STEPS)]
        traces.append(Trace(steps, ranks[members[0]].trace.records))
    check(traces, **settings)
    losses = [[record["losses"] for record in rank.trace.records] for rank in ranks]
    assert all(own == losses[0] for own in losses), "bitwise, on ranks that see no loss too"
    for i in range(STEPS):
        for peers in zip(*table, strict=True):
            first, *others = (ranks[rank].trace.weights(i) for rank in peers)
            for other in others:  # peers meet after a cycle, not before
                assert torch.equal(first, other) == (i % INTERVAL == INTERVAL - 1)


@pytest.mark.parametrize(("case", "shards"), [("context", 1), ("groups", 2)])
def test_one_sample_on_two_ranks_of_cp(runs: Any, case: str, shards: int) -> None:
    """Or groups of replicas that share a rate: what is inside of one stays equal."""
    ranks = runs[case]
    check_parts(ranks, lambda a, b: a, shards=shards)
    for i in range(STEPS):
        weights = [seen.trace.weights(i) for seen in ranks]
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])


def test_experts_are_averaged_with_their_own_kind(runs: dict[str, list[Seen]]) -> None:
    """And what both ranks have stays equal on them."""
    ranks = runs["expert"]
    check_parts(ranks, lambda a, b: [*a, *b[2:]], make=Experts)
    one, two = (seen.parts(seen.trace.weights(STEPS - 1)) for seen in ranks[:2])
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[2], two[2])
