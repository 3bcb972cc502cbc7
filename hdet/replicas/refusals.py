"""Training set-ups in which averaging over these replicas would mix different parameters, or has
nothing to average: functions that yield what is said of them.

Classes are told by their names, so that nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .layout import brief
from .mesh import dims
from .topology import Replicas

_HSDP = (
    "fully_shard on a mesh ('dp_replicate', 'dp_shard') and Replicas.from_mesh(mesh) "
    "(docs/layouts.md)"
)
_MEGATRON = (
    "is Megatron's wrapper: pass the torch optimizer inside, {}, with "
    "replicas=Replicas.from_megatron(groups); or hdet.integrations.megatron"
)
_WRAPPERS = {
    r"deepspeed\.runtime\..*|.*\.DeepSpeedOptimizerWrapper": (
        "is DeepSpeed's: ZeRO keeps one copy of the state for all ranks, so there are no replicas. "
        f"Use DistributedDataParallel, or FSDP2: {_HSDP}"
    ),
    r".*\.AcceleratedOptimizer": (
        "is accelerate's wrapper, whose step does nothing while gradients accumulate: pass the "
        "torch optimizer inside, its .optimizer (hdet.integrations.accelerate)"
    ),
    # of torch, fairscale and apex
    r".*\.(ZeroRedundancyOptimizer|OSS|DistributedFusedAdam|DistributedFusedLAMB)": (
        "steps each parameter on one rank for all of them, so there are no replicas. Use the plain "
        f"optimizer under DistributedDataParallel, or FSDP2: {_HSDP}"
    ),
    r".*\.ChainedOptimizer": _MEGATRON.format(
        "optimizer.chained_optimizers[0].optimizer if there is one of them; several are not "
        "supported"
    ),
    r"(?!torch\.).*\.(MegatronOptimizer|MixedPrecisionOptimizer|DistributedOptimizer)": (
        _MEGATRON.format("optimizer.optimizer, whose parameters are the master weights")
    ),
}
"""Full names of classes, and what is wrong with an optimizer that is one of them."""


def wrong_wrapper(optimizer: Any) -> Iterator[str]:
    """Of an optimizer that steps shards for everybody, or that wraps the one which steps."""
    kinds = [f"{base.__module__}.{base.__name__}" for base in type(optimizer).__mro__]
    for pattern, problem in _WRAPPERS.items():
        if any(re.fullmatch(pattern, kind) for kind in kinds):
            yield f"optimizer {type(optimizer).__name__} {problem}"


def wrong_sharding(
    optimizer: Any,
    parameters: Sequence[torch.Tensor],
    replicas: Replicas | None,
    gradients: str,
    *,
    decides: bool = False,
) -> Iterator[str]:
    """Do these replicas each have all of these parameters, and an optimizer of their own?
    Communicates nothing.

    Args:
        parameters: the optimizer's; further tensors may follow.
        replicas: None: nobody has said who is a replica, it would be the world.
        gradients: "shared" or "local".
        decides: may a replica's loss move its values, or take its parameters back?
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    several = (world if replicas is None else replicas.count) > 1
    if several and gradients == "shared" and isinstance(optimizer, torch.optim.LBFGS):
        yield (
            f"optimizer {type(optimizer).__name__} runs as many backward passes in a step as the "
            "replica's rate asks for, so replicas would wait for each other for ever: use another "
            "optimizer, or gradients='local'"
        )
    names = _names(optimizer)
    for i, parameter in enumerate(parameters):
        name = names[i] if i < len(names) else f"tensor {i}"
        yield from _wrong_kind(parameter, name)
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or not hasattr(parameter, "placements"):
            continue
        if replicas is not None:
            yield from _wrong_spans(parameter, name, replicas, gradients)
        elif world > 1:
            yield (
                f"{name} is a DTensor over a mesh {dims(mesh)}, so a replica is not one rank of "
                "the world: say who is one, replicas=Replicas.from_mesh(mesh), with replicate=() "
                "where the whole mesh is (docs/layouts.md)"
            )
        if replicas and replicas.members == replicas.count == 1 < mesh.size() and decides:
            yield (
                f"{name} is a DTensor over a mesh {dims(mesh)}, but replicas is this process "
                "alone: each would decide about its shards by its own loss. Say that the mesh is "
                "one: replicas=Replicas.from_mesh(mesh, replicate=())"
            )


def _names(optimizer: Any) -> list[str]:
    names: list[str] = []
    for g, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [None] * len(group["params"])
        names += [
            f"parameter {i} of group {g}" + (f" ({name})" if name else "")
            for i, name in enumerate(known)
        ]
    return names


def _wrong_kind(parameter: Any, name: str) -> Iterator[str]:
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        yield (
            f"{name} is flattened by FullyShardedDataParallel (FSDP1), which is not supported. "
            f"Use FSDP2: {_HSDP}"
        )
    config = getattr(getattr(parameter, "_megatron_fsdp_model", None), "ddp_config", None)
    outer = getattr(config, "outer_dp_sharding_strategy", None)
    if outer not in (None, "no_shard"):
        yield (
            f"{name} is Megatron-FSDP's with outer_dp_sharding_strategy={outer!r}, which keeps one "
            "copy of the optimizer's state for all replicas: set "
            "outer_dp_sharding_strategy='no_shard'"
        )


def _wrong_spans(parameter: Any, name: str, replicas: Replicas, gradients: str) -> Iterator[str]:
    """What lies over ranks of several replicas must be whole on each, and not be all-reduced behind
    local gradients."""
    if replicas.count == 1 or not replicas.ranks:
        return
    mesh, own = parameter.device_mesh, set(replicas.ranks[replicas.index])
    for k, placement in enumerate(parameter.placements):
        ranks = dist.get_process_group_ranks(mesh.get_group(k))
        if own.issuperset(ranks):
            continue
        names = mesh.mesh_dim_names
        dim = repr(names[k]) if names else f"dimension {k}"
        if not placement.is_replicate():  # Shard, strided, Partial
            yield (
                f"{name} is sharded ({placement}) over ranks {brief(ranks)} by {dim} of the mesh "
                f"{dims(mesh)}, which are of several replicas (this one is ranks {brief(own)}). "
                f"Use {_HSDP}: replicate= names the dimension over which parameters are copies. Or "
                "leave replicas out: one replica is enough for search=hdet.AutoLR(model)"
            )
        if gradients == "local":
            yield (
                f"{name} is replicated by {dim} of the mesh {dims(mesh)} over ranks {brief(ranks)} "
                "of several replicas, over which its gradients would be all-reduced, but "
                "gradients='local': shard inside a replica, fully_shard(module, "
                "mesh=mesh['dp_shard'])"
            )
