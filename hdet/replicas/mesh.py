"""Replicas of a `torch.distributed.device_mesh.DeviceMesh` of any number of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ..tensors.dtensor import is_sharded
from .agreement import digest
from .layout import Table, brief, grouped
from .process_groups import Request, together


def mesh_table(
    mesh: Any, replicate: str | Sequence[str]
) -> tuple[Table, Callable[[], dist.ProcessGroup] | None]:
    """For `Replicas.from_mesh`, on all ranks: [replica][member], and what gives this rank's peers,
    if the mesh has a group of them."""
    names = (replicate,) if isinstance(replicate, str) else tuple(replicate)
    places = together("from_mesh", lambda: _request(mesh, names))
    peers = grouped(places)  # members are in the order of their lines' first ranks
    # The mesh keeps its groups' ranks ascending, and makes one for each dimension only.
    has_group = len(names) == 1 and all(list(ranks) == sorted(ranks) for ranks in peers)
    return tuple(zip(*peers, strict=True)), (
        (lambda: mesh.get_group(names[0])) if has_group else None
    )


def _request(mesh: Any, names: Sequence[str]) -> Request:
    """Of a rank in the mesh: who is first on its line, and its place there, which is the number of
    its replica.

    A line is the ranks that differ in the replicating dimensions only. From these of all ranks the
    table follows for every kind of mesh, also for a part of a larger one, whose other dimensions
    then lie inside a replica.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise ValueError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}"
        )
    known = tuple(mesh.mesh_dim_names or ())
    if not set(names) <= set(known):
        have = (
            f"the mesh has dimensions {', '.join(known)}"
            if known
            else "the mesh has no names: give init_device_mesh mesh_dim_names"
        )
        raise ValueError(
            f"replicate is {', '.join(map(repr, names))}, but {have}: name those over which "
            "parameters are replicated"
        )
    # Not public; without it a part of a mesh cannot be told from a mesh of its own.
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    sizes = ", ".join(map(str, root.mesh.shape))
    ranks = root.mesh.flatten().tolist()
    call = (
        f"(mesh {dims(mesh)} of ({sizes}) ranks {brief(ranks)} [{digest(root.mesh.tolist()):x}], "
        f"replicate={', '.join(names)})"
    )
    place = mesh.get_coordinate()
    if place is None:
        return call, None
    index, start = 0, list(place)
    for k, name in enumerate(known):
        if name in names:
            index, start[k] = index * mesh.mesh.shape[k] + place[k], 0
    return call, (int(mesh.mesh[tuple(start)]), index)


def mesh_of_the_world(tensors: Iterable[Any]) -> Any:
    """The mesh of one dimension that is the whole world, over which some of the tensors are sharded
    (plain FSDP2); None: there is no such mesh."""
    sharded = (t for t in tensors if is_sharded(t) and not t.placements[0].is_replicate())
    meshes = (tensor.device_mesh for tensor in sharded)
    return next((m for m in meshes if m.ndim == 1 and m.size() == dist.get_world_size() > 1), None)


def dims(mesh: Any) -> str:
    """'(dp_replicate=2, dp_shard=4)'."""
    names = mesh.mesh_dim_names or [f"dimension {k}" for k in range(mesh.ndim)]
    sizes = [f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True)]
    return f"({', '.join(sizes)})"
