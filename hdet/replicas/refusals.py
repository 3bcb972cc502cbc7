"""Training set-ups in which averaging over these replicas would mix different parameters, or has
nothing to average: refused by name.

Classes are told by their names, so that nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .layout import brief
from .mesh import dims
from .topology import Replicas

_ZERO = {
    "ZeroRedundancyOptimizer",
    "OSS",
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
}  # torch, fairscale, apex
_MEGATRON = {"MegatronOptimizer", "MixedPrecisionOptimizer", "ChainedOptimizer"}
_HSDP = (
    "mesh = init_device_mesh(type, (N, ranks // N), mesh_dim_names=('dp_replicate', 'dp_shard')), "
    "fully_shard(module, mesh=mesh) and replicas=Replicas.from_mesh(mesh)"
)


def check_sharding(
    optimizer: Any,
    parameters: Sequence[torch.Tensor],
    replicas: Replicas | None,
    gradients: str,
    *,
    decides: bool = False,
) -> None:
    """Do these replicas each have all of these parameters, and an optimizer of their own?
    Communicates nothing, changes nothing.

    Args:
        parameters: the optimizer's; further tensors may follow.
        replicas: None: nobody has said who is a replica, it would be the world.
        gradients: "shared" or "local".
        decides: may a replica's loss move its values, or take its parameters back?

    Raises:
        ValueError: they do not; names the parameter or the optimizer, and the way out.
    """
    several = (
        replicas.count > 1
        if replicas is not None
        else dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    )
    if (
        several
        and gradients == "shared"
        and any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__)
    ):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} runs as many backward passes in a step as the "
            "replica's own rate asks for, so replicas would wait in their gradients' all-reduce "
            "for each other for ever: use another optimizer, or gradients='local'"
        )
    names = _names(optimizer)
    for i, parameter in enumerate(parameters):
        name = names[i] if i < len(names) else f"tensor {i}"
        if getattr(parameter, "_is_flat_param", False) or getattr(
            parameter, "_fsdp_flattened", False
        ):
            raise ValueError(
                f"{name} is flattened by FullyShardedDataParallel (FSDP1), which is not supported. "
                f"Use FSDP2: {_HSDP}"
            )
        outer = getattr(
            getattr(getattr(parameter, "_megatron_fsdp_model", None), "ddp_config", None),
            "outer_dp_sharding_strategy",
            None,
        )
        if outer not in (None, "no_shard"):
            raise ValueError(
                f"{name} is Megatron-FSDP's with outer_dp_sharding_strategy={outer!r}, which keeps "
                "one copy of the optimizer's state "
                "for all replicas: set outer_dp_sharding_strategy='no_shard'"
            )
        if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
            _check_dtensor(parameter, name, replicas, gradients, decides)


def check_wrapper(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that steps shards for everybody, or that wraps the one
    which steps."""
    kinds = type(optimizer).__mro__
    names, kind = {base.__name__ for base in kinds}, type(optimizer).__name__
    modules = [base.__module__ for base in kinds]
    if (
        any(module.startswith("deepspeed.runtime") for module in modules)
        or "DeepSpeedOptimizerWrapper" in names
    ):
        raise ValueError(
            f"optimizer {kind} is DeepSpeed's: ZeRO keeps one copy of the state, in stage 3 of the "
            "parameters, for all ranks, so there are "
            f"no replicas. Use DistributedDataParallel, or FSDP2: {_HSDP}"
        )
    if "AcceleratedOptimizer" in names:
        raise ValueError(
            f"optimizer {kind} is accelerate's wrapper, whose step does nothing where gradients "
            "are only accumulated: pass the torch optimizer inside, "
            "its .optimizer (hdet.integrations.accelerate)"
        )
    if names & _ZERO:
        raise ValueError(
            f"optimizer {kind} steps each parameter on one rank for all of them, so there are no "
            "replicas. Use the plain optimizer under "
            f"DistributedDataParallel, or to save memory FSDP2: {_HSDP}"
        )
    megatron = names & _MEGATRON or any(
        m.startswith("megatron.") and not isinstance(optimizer, torch.optim.Optimizer)
        for m in modules
    )
    if megatron or (
        "DistributedOptimizer" in names
        and not any(module.startswith("torch.") for module in modules)
    ):
        inner = "optimizer.optimizer, whose parameters are the master weights"
        if "ChainedOptimizer" in names:
            inner = (
                "optimizer.chained_optimizers[0].optimizer if there is one of them; several are "
                "not supported"
            )
        raise ValueError(
            f"optimizer {kind} is Megatron's wrapper: pass the torch optimizer inside, {inner}, "
            "with replicas=Replicas.from_megatron(groups, distributed_optimizer=...); or "
            "hdet.integrations.megatron"
        )


def _names(optimizer: Any) -> list[str]:
    names: list[str] = []
    for g, group in enumerate(getattr(optimizer, "param_groups", ())):
        known = group.get("param_names") or [None] * len(group["params"])
        names += [
            f"parameter {i} of group {g}" + (f" ({name})" if name else "")
            for i, name in enumerate(known)
        ]
    return names


def _check_dtensor(
    parameter: Any, name: str, replicas: Replicas | None, gradients: str, decides: bool
) -> None:
    mesh = parameter.device_mesh
    if replicas is None:
        if dist.get_world_size() > 1:
            raise ValueError(
                f"{name} is a DTensor over a mesh {dims(mesh)}, so a replica is not one rank of "
                "the world: say who is one, replicas=Replicas.from_mesh(mesh), with replicate=() "
                f"where the whole mesh is. Several under FSDP2: {_HSDP}"
            )
        return
    if replicas.members == 1 and replicas.count == 1 and decides and mesh.size() > 1:
        raise ValueError(
            f"{name} is a DTensor over a mesh {dims(mesh)}, but replicas is this process alone: "
            "each would decide about its shards by its own loss. Say that the mesh is one "
            "replica, replicas=Replicas.from_mesh(mesh, replicate=())"
        )
    if replicas.count == 1 or not replicas.ranks:
        return
    own = set(replicas.ranks[replicas.index])
    for dim, placement, group in _spans(parameter):
        if group <= own:
            continue
        if not placement.is_replicate():  # Shard, strided, Partial
            raise ValueError(
                f"{name} is sharded ({placement}) over ranks {brief(group)} by {dim} of the mesh "
                f"{dims(mesh)}, but they are of several replicas (this one is ranks {brief(own)}): "
                f"averaging would mix different shards. Replicas are copies: {_HSDP}; in "
                "from_mesh, replicate= names the dimension over which parameters are replicated. "
                "For one replica, which is enough for hdet.AutoLR(model), leave replicas out"
            )
        if gradients == "local":
            raise ValueError(
                f"{name} is replicated by {dim} of the mesh {dims(mesh)} over ranks {brief(group)} "
                "of several replicas, over which its gradients would be all-reduced, but "
                "gradients='local'. Shard inside a replica only: fully_shard(module, "
                "mesh=mesh['dp_shard']), and keep replicas=Replicas.from_mesh(mesh)"
            )


def _spans(parameter: Any) -> Iterator[tuple[str, Any, set[int]]]:
    """(dimension, placement, ranks over which it goes on this rank), for each dimension of the
    tensor's mesh."""
    mesh = parameter.device_mesh
    for k, placement in enumerate(parameter.placements):
        names = mesh.mesh_dim_names
        yield (
            (repr(names[k]) if names else f"dimension {k}"),
            placement,
            set(dist.get_process_group_ranks(mesh.get_group(k))),
        )
