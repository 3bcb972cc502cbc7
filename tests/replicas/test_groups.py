"""Replicas on real gloo ranks: who is with whom, what ranks disagree on, and losses that add up."""

from __future__ import annotations

import inspect
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hdet
from hdet.replicas.agreement import who_has
from hdet.replicas.layout import Layout
from tests.distributed import run_ranks

SORTS = "sort_ranks" not in inspect.signature(dist.new_group).parameters
"""Does this torch know ascending groups alone?"""
CAN_UNFLATTEN = hasattr(DeviceMesh, "_unflatten")
HSDP = ("dp_replicate", "dp_shard")
Table = list[list[int]]


def seen(replicas: hdet.Replicas) -> dict[str, Any]:
    """What a rank knows, and sums of rank numbers over its groups, in the groups' own order."""
    found = {name: getattr(replicas, name) for name in ("index", "count", "member")}
    for name in ("peer_group", "world_group"):
        group = getattr(replicas, name)
        number = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(number, group=group)
        found[name] = (dist.get_process_group_ranks(group), dist.get_rank(group), number.item())
    return {**found, "ranks": [list(ranks) for ranks in replicas.ranks]}


def check(results: list[dict[str, Any]], ranks: Table) -> None:
    world = sorted(rank for replica in ranks for rank in replica)
    for rank, result in enumerate(results):
        index = next(r for r, replica in enumerate(ranks) if rank in replica)
        member = ranks[index].index(rank)
        peers = [replica[member] for replica in ranks]
        assert result == {
            "index": index, "count": len(ranks), "member": member, "ranks": ranks,
            "peer_group": (peers, index, float(sum(peers))),
            "world_group": (world, world.index(rank), float(sum(world))),
        }  # fmt: skip


def made(make: Any) -> Any:
    """What a rank sees, or is told."""
    try:
        return seen(make())
    except (ValueError, hdet.ReplicaDisagreement) as error:
        return f"{type(error).__name__}: {error}"


def on_rank(rank: int, world: int, make: Any) -> Any:
    return made(make)


def from_sizes(sizes: Any) -> Any:
    return hdet.Replicas.from_layout(**sizes)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# -- each way to say who is a replica -------------------------------------------------------------


def from_mesh(names: Any, replicate: Any = "dp_replicate", part: Any = None) -> Any:
    mesh = mesh_of((2,) * len(names), names)
    replicas = hdet.Replicas.from_mesh(mesh[part] if part else mesh, replicate)
    # no second communicator for the same ranks
    own = replicas.peer_group is not mesh.get_group("dp_replicate")
    assert own is isinstance(replicate, tuple)
    return replicas


def from_view(part: Any) -> Any:
    """As torchtitan's: the root of such a mesh knows neither the dimension nor the others."""
    dense = mesh_of((8,), ("world",))._unflatten(0, (2, 2, 2), ("pp", "dp_replicate", "tp"))
    return hdet.Replicas.from_mesh(dense[part] if part else dense)


def from_ordered(ranks: Table) -> Any:
    """A mesh whose own group of ranks 2 and 0 has 0 first."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=HSDP)
    return hdet.Replicas.from_mesh(mesh)


def megatron(layout: Layout, instances: int = 1) -> SimpleNamespace:
    """A collection as Megatron-Core makes it; what is not parallel is None or missing."""
    groups = SimpleNamespace(cp=None)
    axes = {"tp": "tp", "pp": "pp", "ep": "ep", "dp": "dp", "expt_tp": "etp", "expt_dp": "edp"}
    tables: dict[str, Any] = {
        name: layout.groups(axis) for name, axis in axes.items() if axis != "ep" or layout.ep > 1
    }
    tables["embd"] = [(group[0], group[-1]) for group in layout.groups("pp") if layout.pp > 1]
    if instances > 1:
        world, half = layout.world, layout.world // instances
        tables["inter_dist_opt"] = [range(k, world, half) for k in range(half)]
    for name, table in tables.items():
        for ranks in table:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                setattr(groups, name, group)
    return groups


def from_megatron(sizes: Any, instances: int = 1, drop: tuple[str, ...] = ()) -> Any:
    groups = megatron(Layout(dist.get_world_size(), **sizes), instances)
    for name in drop:
        delattr(groups, name)
    return hdet.Replicas.from_megatron(groups)


ONES, STAGES = [[0], [1], [2], [3]], [[0, 1, 4, 5], [2, 3, 6, 7]]
LISTS: list[Any] = [[[0, 2], [1, 3]], [[0, 3], [2, 1]], ((0,), (1,), (2,), (3,))]
FOURS = [[0, 1, 2, 3], [4, 5, 6, 7]]
SIZES: list[Any] = [({}, ONES), ({"tp": 2, "pp": 2}, STAGES), ({"ep": 4}, FOURS)]
NODES = "node", "tp", "dp_replicate"
MADE: list[tuple[int, Any, Any]] = [
    # In the order given; torch 2.11 and older know ascending peers only, others are refused.
    *((4, partial(hdet.Replicas.from_group, lists), lists) for lists in LISTS),
    # A submesh of one dimension still belongs to a mesh of two.
    (4, partial(from_mesh, HSDP, part="dp_replicate"), [[0, 1], [2, 3]]),
    (4, partial(from_mesh, HSDP[::-1]), [[0, 2], [1, 3]]),
    (8, partial(from_mesh, NODES, ("node", "dp_replicate")), [[0, 2], [1, 3], [4, 6], [5, 7]]),
    (8, partial(from_mesh, (*HSDP, "tp"), part=HSDP), FOURS),
    *((8, partial(from_view, part), STAGES) for part in (None, "dp_replicate") if CAN_UNFLATTEN),
    (4, partial(from_ordered, [[2, 3], [0, 1]]), [[2, 3], [0, 1]]),
    # ranks that a mesh leaves out are told
    (6, partial(from_ordered, [[0, 1], [3, 2]]), [[0, 1], [3, 2]]),
    *((sum(map(len, ranks)), partial(make, sizes), ranks) for sizes, ranks in SIZES
        for make in (from_megatron, from_sizes)),
]  # fmt: skip


@pytest.mark.parametrize(("world", "make", "ranks"), MADE)
def test_who_is_a_replica(world: int, make: Any, ranks: Any) -> None:
    results = run_ranks(on_rank, world, make)
    if SORTS and any(list(peers) != sorted(peers) for peers in zip(*ranks, strict=True)):
        assert all("sorts a group's ranks" in result for result in results)
        return
    members = sum(map(len, ranks))
    check(results[:members], [list(replica) for replica in ranks])
    assert all("no replica, only ranks 0-3 do" in result for result in results[members:])


@pytest.mark.parametrize(("sizes", "instances", "drop", "message"), [
    ({}, 2, (), "set use_distributed_optimizer=False"),
    ({"tp": 2}, 1, ("dp",), "at least dp"),
    ({"tp": 2}, 1, ("tp",), "not in one dp group.*missing"),
])  # fmt: skip
def test_what_is_wrong_with_megatrons_groups_is_said(
    sizes: dict[str, int], instances: int, drop: Any, message: str
) -> None:
    for result in run_ranks(on_rank, 4, partial(from_megatron, sizes, instances, drop)):
        assert re.match(f"ValueError: .*{message}", result), result


# -- ranks that ask for different things ----------------------------------------------------------


def ask(rank: int, world: int, calls: list[tuple[str, dict[str, Any]]]) -> str:
    kind, arguments = calls[rank]
    if arguments.get("mesh"):
        arguments = {**arguments, "mesh": mesh_of((2, 2), HSDP)}
    said = made(lambda: getattr(hdet.Replicas, kind)(**arguments))
    dist.barrier()  # Everybody is out and the world is whole: it can still be used.
    return said


FINE, MESH = ("from_layout", {"tp": 2}), ("from_mesh", {"mesh": True})
HALVES = ("from_group", {"group": [[0, 1], [2, 3]]})


@pytest.mark.parametrize(("calls", "parts"), [
    ([FINE, ("from_layout", {"tp": 3}), FINE, FINE],
        ["ranks 0, 2-3: from_layout: Layout(", "rank 1: from_layout refused with ValueError"]),
    ([FINE, FINE, HALVES, FINE],
        ["ranks 0-1, 3: from_layout: Layout(world=4, tp=2,",
         "rank 2: from_group([[0, 1], [2, 3]])"]),
    ([MESH, MESH, MESH, ("from_mesh", {"mesh": True, "replicate": "dp_shard"})],
        ["ranks 0-2: from_mesh(mesh (dp_replicate=2, dp_shard=2)", "replicate=dp_shard"]),
])  # fmt: skip
def test_ranks_that_ask_for_different_replicas_all_say_so(calls: Any, parts: list[str]) -> None:
    (said,) = set(run_ranks(ask, 4, calls))
    assert said.startswith("ReplicaDisagreement: ")
    for part in [*parts, "on all ranks with the same arguments"]:
        assert part in said


@pytest.mark.parametrize(("kind", "arguments", "message"), [
    ("from_layout", {"tp": 3}, "not divisible"),
    ("from_mesh", {"mesh": True, "replicate": "dp"},
        "replicate is 'dp', but the mesh has dimensions dp_replicate, dp_shard"),
    ("from_mesh", {"mesh": None}, "must be a torch.distributed.device_mesh.DeviceMesh, got N"),
    ("from_group", {"group": [[0, 1, 3], [2]]}, "lists of 3, 1 ranks: all replicas must be"),
    ("from_group", {"group": [[0, 1], [1, 4]]}, "ranks 0-3 once, which is not so of ranks 1-4"),
    ("from_group", {"group": [0, 1, 2, 3]}, "lists of rank numbers"),
])  # fmt: skip
def test_what_all_ranks_get_wrong_is_their_own_error(kind, arguments, message) -> None:
    for said in run_ranks(ask, 4, [(kind, arguments)] * 4):
        assert re.match(f"ValueError: .*{message}", said), said


@pytest.mark.parametrize(("kind", "arguments"), [("from_group", []), ("from_mesh", [None])])
def test_without_processes_the_way_out_is_named(kind: str, arguments: list[Any]) -> None:
    with pytest.raises(ValueError, match="init_process_group first, or use Replicas.single"):
        getattr(hdet.Replicas, kind)(*arguments)


def alone(rank: int, world: int) -> list[int]:
    mesh, kinds = mesh_of((1,), ("dp_replicate",)), hdet.Replicas
    made = [kinds.from_layout(), kinds.from_mesh(mesh), kinds.from_group([[0]])]
    return [replicas.count for replicas in made]


def test_a_world_of_one_process_is_one_replica() -> None:
    assert run_ranks(alone, 1) == [[1, 1, 1]]


# -- what is compared before the first step, and what is added up ---------------------------------


def test_many_ranks_are_shortened() -> None:
    text = who_has({rank: rank % 2 if rank < 1000 else rank for rank in range(1024)})
    assert len(text) < 300 and "and 492 more: 0" in text and text.endswith("and 22 more values")


def add_up(rank: int, world: int) -> list[Table]:
    """tp 2: both ranks of a replica see its loss, one has twice the weight.
    pp 2: the first stages have no loss; a NaN stays with its replica."""
    tp, pp = hdet.Replicas.from_layout(tp=2), hdet.Replicas.from_layout(pp=2)
    weight = 1.0 + tp.member
    rows = [[10.0 * (tp.index + 1) * weight, weight], [0.0, 0.0]]
    if pp.member == 1:
        rows[1] = [7.0, 2.0] if pp.index else [float("nan"), 1.0]
    rows = map(torch.tensor, rows)
    sums = [r.sum_rows(row, purpose="") for r, row in zip((tp, pp), rows, strict=True)]
    return [total.nan_to_num(nan=-1.0).tolist() for total in sums]


def test_rows_add_up_over_the_ranks_of_a_replica() -> None:
    expected = [[[30.0, 3.0], [60.0, 3.0]], [[-1.0, 1.0], [7.0, 2.0]]]
    assert run_ranks(add_up, 4) == [expected] * 4
