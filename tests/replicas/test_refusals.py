"""What cannot be averaged is refused before anything is changed, with the way out; real sharding on gloo ranks."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hdet
from hdet.replicas.refusals import check_wrapper
from tests.distributed import run_ranks

NAMES = ("dp_replicate", "dp_shard")


def refusal(
    optimizer: Any, replicas: hdet.Replicas | None, gradients: str = "shared", **settings: Any
) -> str:
    """What an Ensemble says of it; nothing, if it takes it."""
    step = optimizer.step
    sync = hdet.Sync(gradients=gradients, moments="keep" if gradients == "local" else None)
    try:
        hdet.Ensemble(optimizer, replicas=replicas, sync=sync, **settings).close()
    except ValueError as error:
        assert optimizer.step == step, "refused before anything is changed"
        return str(error)
    return ""


def sharded(mesh: Any) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.named_parameters(), lr=0.1)


def one_dimension(rank: int, world: int) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    single, auto = hdet.Replicas.single(), {"controller": hdet.AutoLR(model), "total_steps": 100}
    return [
        refusal(optimizer, None),
        refusal(optimizer, hdet.Replicas.from_group()),
        refusal(optimizer, single),
        refusal(optimizer, single, divergence=hdet.Divergence(rollback="device")),
        refusal(optimizer, single, **auto),
        refusal(optimizer, None, **auto),
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_one_dimensional_fsdp_is_one_replica(world: int) -> None:
    for several, said, single, rolled, alone, auto in run_ranks(one_dimension, world):
        assert (
            several.startswith(f"ranks 0-{world - 1} are one replica")
            and "AutoLR(model) needs one replica only" in several
        )
        assert (
            f"(0.weight) is sharded (S(0)) over ranks 0-{world - 1} by 'dp' of the mesh (dp={world})"
            in said
        )
        assert (
            "('dp_replicate', 'dp_shard')" in said
            and "fully_shard" in said
            and "leave replicas out" in said
        )
        for own in (rolled, alone):
            assert (
                "decide about its shards by its own loss" in own
                and "from_mesh(mesh, replicate=())" in own
            )
        assert single == auto == ""


def two_dimensions(rank: int, world: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    both, inner = sharded(mesh), sharded(mesh["dp_shard"])
    right, wrong = (
        hdet.Replicas.from_mesh(mesh),
        hdet.Replicas.from_mesh(mesh, replicate="dp_shard"),
    )
    return {
        "hsdp": refusal(both, right),
        "hsdp, nobody said": refusal(both, None),
        "hsdp, wrong dimension": refusal(both, wrong),
        "hsdp, local": refusal(both, right, "local"),
        "inner, local": refusal(inner, right, "local"),
        "inner, wrong dimension": refusal(inner, wrong, "local"),
        "the world": refusal(inner, hdet.Replicas.from_group()),
    }


def test_two_dimensional_fsdp() -> None:
    for rank, said in enumerate(run_ranks(two_dimensions, 4)):
        assert said["hsdp"] == said["inner, local"] == ""
        assert "so a replica is not one rank of the world" in said["hsdp, nobody said"]
        shard, line = "0-1" if rank < 2 else "2-3", "0, 2" if rank % 2 == 0 else "1, 3"
        for wrong in ("hsdp, wrong dimension", "inner, wrong dimension"):
            assert (
                f"over ranks {shard} by 'dp_shard'" in said[wrong]
                and f"(this one is ranks {line})" in said[wrong]
            )
            assert "replicate= names the dimension" in said[wrong]
        assert (
            f"replicated by 'dp_replicate' of the mesh (dp_replicate=2, dp_shard=2) over ranks {line}"
            in said["hsdp, local"]
        )
        assert "fully_shard(module, mesh=mesh['dp_shard'])" in said["hsdp, local"]
        assert f"over ranks {shard} by 'dp_shard'" in said["the world"]


def tensor_parallel(rank: int, world: int) -> list[str]:
    """Columns and a norm over tp alone, under DDP: nothing lies across replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors = [
        distribute_tensor(torch.ones(4, 4), mesh["tp"], [placement])
        for placement in (Shard(0), Shard(1), Replicate())
    ]
    optimizer = torch.optim.SGD([nn.Parameter(tensor) for tensor in tensors], lr=0.1)
    across = torch.optim.SGD(
        [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]))], lr=0.1
    )
    replicas = hdet.Replicas.from_mesh(mesh, replicate="dp")
    return [
        refusal(optimizer, replicas, "local"),
        refusal(across, replicas),
        refusal(across, replicas, "local"),
    ]


def test_tensor_parallel_parameters() -> None:
    for inside, across, local in run_ranks(tensor_parallel, 4):
        assert inside == across == "" and local.startswith(
            "parameter 0 of group 0 is replicated by 'dp'"
        )


def older(rank: int, world: int) -> list[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # brings torch.jit and its warnings

    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        for originals in (False, True):
            model = FullyShardedDataParallel(
                nn.Linear(4, 4), use_orig_params=originals, device_id=torch.device("cpu")
            )
            said.append(
                refusal(torch.optim.SGD(model.parameters(), lr=0.1), hdet.Replicas.from_group())
            )
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    said.append(
        refusal(
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1),
            hdet.Replicas.from_group(),
        )
    )
    said.append(refusal(torch.optim.AdamW(model.parameters()), None))
    return said


def test_fsdp1_and_zero_redundancy() -> None:
    for flat, original, zero, ddp in run_ranks(older, 2):
        for said in (flat, original):
            assert (
                said.startswith("parameter 0 of group 0 is flattened by FullyShardedDataParallel")
                and "Use FSDP2" in said
            )
        assert (
            zero.startswith("optimizer ZeroRedundancyOptimizer steps each parameter on one rank")
            and "the plain optimizer" in zero
        )
        assert ddp == ""


# -- told by name, without the packages -------------------------------------------------------------------------------------------------


def named(name: str, module: str, *bases: type) -> Any:
    return type(name, bases, {"__module__": module}).__new__(
        type(name, bases, {"__module__": module})
    )


MEGATRON = type("MegatronOptimizer", (), {"__module__": "megatron.core.optimizer.optimizer"})
MIXED = type(
    "MixedPrecisionOptimizer", (MEGATRON,), {"__module__": "megatron.core.optimizer.optimizer"}
)


@pytest.mark.parametrize(("optimizer", "message"), [
    (named("DeepSpeedZeroOptimizer", "deepspeed.runtime.zero.stage_1_and_2"),
        "DeepSpeedZeroOptimizer is DeepSpeed's.*FSDP2"),
    (named("DeepSpeedEngine", "deepspeed.runtime.engine", nn.Module),
        "DeepSpeedEngine is DeepSpeed's"),
    (named("DeepSpeedOptimizerWrapper", "accelerate.utils.deepspeed"), "is DeepSpeed's"),
    (named("AcceleratedOptimizer", "accelerate.optimizer", torch.optim.Optimizer),
        "accelerate's wrapper.*its .optimizer"),
    (named("DistributedOptimizer", "megatron.core.optimizer.distrib_optimizer", MIXED),
        "pass .*optimizer.optimizer.*from_megatron"),
    (named("FP32Optimizer", "megatron.core.optimizer.optimizer", MEGATRON),
        "pass .*optimizer.optimizer"),
    (named("ChainedOptimizer", "megatron.core.optimizer.optimizer", MEGATRON),
        "chained_optimizers\\[0\\].optimizer"),
    (named("DistributedFusedAdam", "apex.contrib.optimizers.distributed_fused_adam",
        torch.optim.Optimizer), "on one rank for all"),
    (named("OSS", "fairscale.optim.oss", torch.optim.Optimizer), "on one rank for all"),
])  # fmt: skip
def test_other_peoples_optimizers(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_wrapper(optimizer)


@pytest.mark.parametrize("optimizer", [
    named("FusedAdam", "deepspeed.ops.adam.fused_adam", torch.optim.Optimizer),
    named("HybridDeviceOptimizer", "megatron.core.optimizer.cpu_offloading",
        torch.optim.Optimizer),
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]),
    hdet.FusedAdamW([torch.zeros(1, requires_grad=True)]),
])  # fmt: skip
def test_plain_optimizers_pass_wherever_they_come_from(optimizer: Any) -> None:
    check_wrapper(optimizer)


def test_lbfgs_has_its_own_number_of_backward_passes() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])
    assert "backward passes" in refusal(optimizer, hdet.Replicas(0, 2))
    assert (
        refusal(optimizer, hdet.Replicas(0, 2), "local")
        == refusal(optimizer, hdet.Replicas.single())
        == refusal(optimizer, None)
        == ""
    )


@pytest.mark.parametrize(("strategy", "refused"), [("optim", True), ("no_shard", False)])
def test_megatron_fsdp(strategy: str, refused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    config = SimpleNamespace(outer_dp_sharding_strategy=strategy)
    parameter._megatron_fsdp_model = SimpleNamespace(ddp_config=config)  # type: ignore[attr-defined]
    said = refusal(torch.optim.SGD([parameter], lr=0.1), hdet.Replicas(0, 2))
    assert ("outer_dp_sharding_strategy='no_shard'" in said) is refused
