"""The training by hand, in every layout: replicas of a rank each under DDP, of shards, of ranks
with hand-made parallelism, with gradients that are shared or their own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import hdet
from benchmarks.harness import counted
from hdet.replicas.topology import WIDTH
from tests.distributed import run_ranks
from tests.layouts.common import (
    DECAY,
    INTERVAL,
    RATE,
    Layout,
    Trace,
    batch,
    check,
    flat,
    loss_of,
    model,
    parts_and_meets,
)

STEPS = 6
"""Two cycles."""


def parallel(net: nn.Module, rank: int, wrapped: Any = None, **settings: Any) -> Layout:
    """A rank with the whole model, and a batch of its own."""
    forward = net if wrapped is None else wrapped

    def backward(step: int, observe: Any) -> None:
        loss = loss_of(forward, batch(step, rank))
        loss.backward()
        observe(loss)

    return Layout(list(net.parameters()), backward, settings)


# -- a rank is a replica ---------------------------------------------------------------------------


def under_ddp(rank: int) -> Layout:
    net = model()
    return parallel(net, rank, DDP(net))


def compiled(rank: int) -> Layout:
    net = model()
    return parallel(net, rank, torch.compile(DDP(net), backend="aot_eager"))


def compressed(rank: int) -> Layout:
    """DDP allows the hook by name on NCCL alone; gloo adds bfloat16 too."""
    ddp = DDP(net := model())
    hook = lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
    ddp.register_comm_hook(dist.group.WORLD, hook)
    return parallel(net, rank, ddp)


def accumulated(rank: int) -> Layout:
    """Micro-batches of 6 and 2 rows: the cycle's loss is still that of the whole batch."""
    ddp = DDP(net := model())

    def backward(step: int, observe: Any) -> None:
        (x1, x2), (y1, y2) = (part.split([6, 2]) for part in batch(step, rank))
        for x, y, synchronise in ((x1, y1, ddp.no_sync()), (x2, y2, nullcontext())):
            with synchronise:
                loss = loss_of(ddp, (x, y))
                (loss * len(x) / 8).backward()
            observe(loss, weight=len(x))

    return Layout(list(net.parameters()), backward)


def local(policy: str, rank: int) -> Layout:
    return parallel(model(), rank, gradients="local", moments=policy)


# -- replicas of shards ----------------------------------------------------------------------------

OPTIMIZERS = {"fused": hdet.FusedAdamW, "schedule-free": hdet.FusedScheduleFreeAdamW}
PROBES = [batch(1000 + i, 0) for i in range(4)]


def mesh_of_pairs() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def local_shards(rank: int) -> Layout:
    net, mesh = model(), mesh_of_pairs()
    fully_shard(net, mesh=mesh["dp_shard"])
    replicas = hdet.Replicas.from_mesh(mesh)
    return parallel(net, rank, replicas=replicas, gradients="local", moments="keep")


def sharded(way: str, rank: int) -> Layout:
    """FSDP2 on a mesh of two replicas."""
    mesh, net = mesh_of_pairs(), model()
    net = net.float() if way in ("bf16", *OPTIMIZERS) else net
    settings: dict[str, Any] = {"mesh": mesh}
    if way == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if way == "offload":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(net[0], **settings)
    # the root's own parameters, net[2], stay unsharded after a forward without backward
    fully_shard(net, **settings)
    dtype = next(net.parameters()).dtype
    forward = lambda x: net(x.to(dtype)).double()

    @torch.no_grad()
    def evaluate(step: int) -> None:
        """Gathers the root's parameters as they are now, and leaves them so."""
        if "evaluated" in way or way == "probe":
            forward(batch(step, 0)[0])

    own: dict[str, Any] = {"total_steps": 100, "replicas": hdet.Replicas.from_mesh(mesh)}
    if way == "probe":  # this rule looks and never decides: t is cut at 1000
        rule = {"dead": 1e4, "average_every": 1}
        own["controller"] = hdet.ProbeController(loss_of, PROBES, chunks=4, model=net, **rule)
    if way == "evaluated":
        own["refresh"] = lambda: [module.reshard() for module in (net[0], net)]
    if way == "evaluated, module known":
        own["buffers"] = net
    made = parallel(net, rank, forward, **own)
    make = OPTIMIZERS.get(way, torch.optim.AdamW)
    made.optimizer, made.between = make(made.parameters, lr=RATE, weight_decay=DECAY), evaluate
    return made


# -- replicas of two ranks by hand -----------------------------------------------------------------


def inside_of(replicas: hdet.Replicas) -> Any:
    """The group of a replica's ranks."""
    return dist.new_subgroups_by_enumeration([list(ranks) for ranks in replicas.ranks])[0]


def share(replicas: hdet.Replicas, parameters: Any) -> None:
    """The mean gradient of the replicas."""
    for p in parameters:
        dist.all_reduce(p.grad, group=replicas.peer_group)
        p.grad /= replicas.count


def context_parallel(rank: int) -> Layout:
    """One sample on two ranks, 5 and 3 of its 8 rows; the gradient is that of both shares."""
    replicas = hdet.Replicas.from_layout(cp=2)
    inside, net = inside_of(replicas), model()
    rows, weight = (slice(0, 5), 5) if replicas.member == 0 else (slice(5, 8), 3)

    def backward(step: int, observe: Any) -> None:
        x, y = batch(step, replicas.index)
        loss = loss_of(net, (x[rows], y[rows]))
        (loss * weight / 8).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad, group=inside)
        share(replicas, net.parameters())
        observe(loss, weight=weight)

    return Layout(list(net.parameters()), backward, {"replicas": replicas})


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


def expert_parallel(rank: int) -> Layout:
    """Each of a replica's ranks has an expert, which is averaged with its own kind."""
    replicas = hdet.Replicas.from_layout(ep=2)
    inside, own, net = inside_of(replicas), replicas.member, Experts()
    parameters = [*net.dense.parameters(), *net.experts[own].parameters()]

    def backward(step: int, observe: Any) -> None:
        x, y = (part.split(4)[own] for part in batch(step, replicas.index))
        loss = loss_of(lambda rows: net.experts[own](torch.tanh(net.dense(rows))), (x, y))
        (loss / 2).backward()
        for p in net.dense.parameters():
            dist.all_reduce(p.grad, group=inside)
        share(replicas, parameters)
        observe(loss, weight=4)

    def whole(tensors: Any) -> torch.Tensor:
        expert = flat(tensors[2:])
        both = [torch.empty_like(expert) for _ in range(2)]
        dist.all_gather(both, expert, group=inside)
        return torch.cat([flat(tensors[:2]), *both])

    return Layout(parameters, backward, {"replicas": replicas}, whole=whole)


def groups(rank: int) -> Layout:
    """Ranks 0 and 1 share a rate, and 2 and 3: plain data parallelism inside."""
    net = model()
    return parallel(net, rank, DDP(net), replicas=hdet.Replicas.from_group([[0, 1], [2, 3]]))


# -- all of them -----------------------------------------------------------------------------------


class Case(NamedTuple):
    build: Callable[[int], Layout]
    hand: Mapping[str, Any] | None = MappingProxyType({})
    """Settings of `check`; None where the last bits of small numbers differ."""
    inside: int = 1
    """Ranks of a replica."""


POLICIES = ["keep", "average", "reset"]
SHARDED = ["float64", "offload", "probe", "evaluated", "evaluated, module known"]
# In float32: the gradients' last bits, and Adam's quotient of two of them, against float64.
SINGLE = {"close": {"rtol": 1e-4, "atol": 1e-5}, "loss": 1e-4}
CASES = {
    "ddp": Case(under_ddp), "accumulated": Case(accumulated), "compiled": Case(compiled),
    "bf16 hook": Case(compressed, None),
    **{of: Case(partial(local, of), {"local": True, "policy": of}) for of in POLICIES},
    "local shards": Case(local_shards, {"shards": 2, "local": True}, 2),
    **{way: Case(partial(sharded, way), {"shards": 2}, 2) for way in SHARDED},
    "fused": Case(partial(sharded, "fused"), {"shards": 2, **SINGLE}, 2),
    **{way: Case(partial(sharded, way), None, 2) for way in ("bf16", "schedule-free")},
    "context": Case(context_parallel, {}, 2), "groups": Case(groups, {"shards": 2}, 2),
    "experts": Case(expert_parallel, {"make": Experts}, 2),
}  # fmt: skip


def trained(rank: int, world: int, name: str) -> Trace:
    return CASES[name].build(rank).train(STEPS)


@functools.cache
def traces(name: str) -> list[Trace]:
    return run_ranks(trained, 2 * CASES[name].inside, name)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.hand is not None])
def test_equals_the_training_by_hand(name: str) -> None:
    check(traces(name), **CASES[name].hand or {})


@pytest.mark.parametrize("name", CASES)
def test_gradients_stay_shared_and_parameters_part_and_meet(name: str) -> None:
    local = bool((CASES[name].hand or {}).get("local"))
    parts_and_meets(traces(name), CASES[name].inside, local)


def test_shards_are_halves_of_which_each_is_averaged_with_its_own_kind() -> None:
    assert all((4, 6) in [tuple(p.shape) for p in rank.parts] for rank in traces("float64"))
    first, second, *others = [rank.kept for rank in traces("schedule-free")]
    assert all(map(torch.equal, first, others[0])) and all(map(torch.equal, second, others[1]))
    assert len(first) > 1 and not torch.equal(first[0], second[0])


def test_masters_stay_in_float32_under_mixed_precision() -> None:
    rank, *_ = traces("bf16")
    assert {p.dtype for p in rank.parts} == {torch.float32}
    after = rank.weights(INTERVAL - 1)
    assert not torch.equal(after, after.bfloat16().float())  # the average has more bits
    # Losses were computed from inputs and weights of 8 bits.
    exact, rounded = (traces(name)[0].records[0]["losses"] for name in ("float64", "bf16"))
    assert rounded == pytest.approx(exact, rel=0.02)


def test_a_probe_scores_the_cycle_average_and_leaves_no_trace() -> None:
    """After an evaluation the root's parameters stay gathered, as they were then."""
    plain, probed = (traces(name)[0] for name in ("float64", "probe"))
    assert all(torch.equal(plain.weights(i), probed.weights(i)) for i in range(STEPS))
    hand, net = check([probed], shards=2), model()
    for cycle, record in enumerate(probed.records):
        for replica, score in enumerate(record["probe"]):
            steps = hand.weights[cycle * INTERVAL : (cycle + 1) * INTERVAL]
            mean = torch.stack([weights[replica] for weights in steps]).mean(0)
            torch.nn.utils.vector_to_parameters(mean, net.parameters())
            expected = sum(loss_of(net, data).item() for data in PROBES) / len(PROBES)
            assert score == pytest.approx(expected, rel=1e-6)  # weighted in float32


def sums_sent(rank: int, world: int, name: str) -> list[float]:
    """Bytes in each cycle, from its first `Ensemble.step` on."""
    layout, begins = CASES[name].build(rank), list[int]()
    layout.between = lambda step: begins.append(len(sent))
    with counted() as sent:
        layout.train(3 * INTERVAL)
    sizes = [call.sent if call.name == "all_reduce" else 0 for call in sent]
    cycles = itertools.pairwise([*begins[::INTERVAL], len(sent)])
    return [sum(sizes[first:last]) for first, last in cycles]


def test_a_cycle_of_local_gradients_sends_what_ddp_sends_in_one_step() -> None:
    """1/T of DDP's bytes, three times as much where moments are averaged; and a row of stats a
    replica. In the first cycle three such rows more: of what is to be alike, and of the kind of
    gradients."""
    gradients, stats = sum(p.nbytes for p in model().parameters()), 2 * WIDTH * 8
    for policy in POLICIES:
        expected = gradients * (3 if policy == "average" else 1) + stats
        sent = run_ranks(sums_sent, 2, policy)
        assert sent == [[expected + 3 * stats, expected, expected]] * 2, policy
    # A rank with half of the parameters sends half of that: 4 rows of 8, half of each vector; the
    # single row and number stay on one rank.
    sent = run_ranks(sums_sent, 4, "local shards")
    volumes = [cycles[-1] - 2 * 3 / 4 * 2 * WIDTH * 8 for cycles in sent]
    assert sum(volumes[:2]) == sum(volumes[2:]) == gradients
