"""What cannot be averaged is refused before anything is changed, with the way out."""

from __future__ import annotations

import re
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
from hdet.replicas.refusals import wrong_wrapper
from tests.distributed import run_ranks

NAMES = ("dp_replicate", "dp_shard")


def refusal(optimizer: Any, replicas: Any, gradients: str = "shared", **settings: Any) -> str:
    """What an Ensemble says of it; nothing, if it takes it."""
    step = optimizer.step
    sync = hdet.Sync(gradients=gradients, moments="keep" if gradients == "local" else None)
    try:
        hdet.Ensemble(optimizer, replicas=replicas, sync=sync, **settings).close()
    except ValueError as error:
        assert optimizer.step == step, "refused before anything is changed"
        return str(error)
    return ""


def sharded(mesh: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) if model is None else model
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.named_parameters(), lr=0.1)


def one_dimension(rank: int, world: int) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = sharded(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), model)
    single, auto = hdet.Replicas.single(), {"search": hdet.AutoLR(model), "total_steps": 100}
    return [
        refusal(optimizer, None), refusal(optimizer, hdet.Replicas.from_group()),
        refusal(optimizer, single, **auto), refusal(optimizer, single),
        refusal(optimizer, None, **auto),
    ]  # fmt: skip


def test_one_dimensional_fsdp_is_one_replica() -> None:
    for several, said, own, single, auto in run_ranks(one_dimension, 2):
        assert several.startswith("ranks 0-1 are one replica")
        assert "search=hdet.AutoLR(model)" in several
        for part in (
            "(0.weight) is sharded (S(0)) over ranks 0-1 by 'dp' of the mesh (dp=2)",
            "('dp_replicate', 'dp_shard')", "fully_shard", "leave replicas out",
        ):  # fmt: skip
            assert part in said
        assert "decide about its shards by its own loss" in own
        assert single == auto == ""


def two_dimensions(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    both, inner = sharded(mesh), sharded(mesh["dp_shard"])
    right, wrong = (hdet.Replicas.from_mesh(mesh, replicate=name) for name in NAMES)
    return [
        refusal(both, right), refusal(inner, right, "local"), refusal(both, None),
        refusal(both, wrong), refusal(inner, wrong, "local"), refusal(both, right, "local"),
        refusal(inner, hdet.Replicas.from_group()),
    ]  # fmt: skip


def test_two_dimensional_fsdp_is_taken_by_its_replicas_alone() -> None:
    for rank, said in enumerate(run_ranks(two_dimensions, 4)):
        hsdp, inner, nobody_said, *wrong, local, the_world = said
        assert hsdp == inner == ""
        assert "so a replica is not one rank of the world" in nobody_said
        shard, line = "0-1" if rank < 2 else "2-3", "0, 2" if rank % 2 == 0 else "1, 3"
        for text in wrong:
            assert f"over ranks {shard} by 'dp_shard'" in text
            assert f"(this one is ranks {line})" in text
            assert "replicate= names the dimension" in text
        mesh = "the mesh (dp_replicate=2, dp_shard=2)"
        assert f"replicated by 'dp_replicate' of {mesh} over ranks {line}" in local
        assert "fully_shard(module, mesh=mesh['dp_shard'])" in local
        assert f"over ranks {shard} by 'dp_shard'" in the_world


def tensor_parallel(rank: int, world: int) -> list[str]:
    """Columns and a norm over tp alone, under DDP: nothing lies across replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sgd(over: Any, *placements: list[Any]) -> torch.optim.SGD:
        tensors = [distribute_tensor(torch.ones(4, 4), over, places) for places in placements]
        return torch.optim.SGD([nn.Parameter(tensor) for tensor in tensors], lr=0.1)

    inside = sgd(mesh["tp"], [Shard(0)], [Shard(1)], [Replicate()])
    across = sgd(mesh, [Replicate(), Shard(0)])
    replicas = hdet.Replicas.from_mesh(mesh, replicate="dp")
    asked = [(inside, "local"), (across, "shared"), (across, "local")]
    return [refusal(optimizer, replicas, gradients) for optimizer, gradients in asked]


def test_tensor_parallel_parameters_pass_unless_they_lie_across_local_replicas() -> None:
    for inside, across, local in run_ranks(tensor_parallel, 4):
        assert inside == across == ""
        assert local.startswith("parameter 0 of group 0 is replicated by 'dp'")


def older(rank: int, world: int) -> list[str]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # brings torch.jit and its warnings

    made, device = [], torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        for own in (False, True):
            net = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=own, device_id=device)
            made.append(torch.optim.SGD(net.parameters(), lr=0.1))
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    made.append(ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1))
    said = [refusal(optimizer, hdet.Replicas.from_group()) for optimizer in made]
    return [*said, refusal(torch.optim.AdamW(ddp.parameters()), None)]


def test_fsdp1_and_zero_redundancy() -> None:
    flattened = "parameter 0 of group 0 is flattened by FullyShardedDataParallel"
    for *fsdp1, zero, ddp in run_ranks(older, 2):
        assert all(said.startswith(flattened) and "Use FSDP2" in said for said in fsdp1)
        assert zero.startswith("optimizer ZeroRedundancyOptimizer steps each parameter on one rank")
        assert "the plain optimizer" in zero and ddp == ""


def named(name: str, module: str, *bases: type) -> Any:
    """As of a package that is not installed."""
    made = type(name, bases, {"__module__": module})
    return made.__new__(made)


TORCH, OF_MEGATRON = torch.optim.Optimizer, "megatron.core.optimizer."
MEGATRON = type("MegatronOptimizer", (), {"__module__": f"{OF_MEGATRON}optimizer"})
MIXED = type("MixedPrecisionOptimizer", (MEGATRON,), {"__module__": f"{OF_MEGATRON}optimizer"})


@pytest.mark.parametrize(("optimizer", "message"), [
    (named("DeepSpeedZeroOptimizer", "deepspeed.runtime.zero.stage_1_and_2"),
        "DeepSpeedZeroOptimizer is DeepSpeed's.*FSDP2"),
    (named("DeepSpeedOptimizerWrapper", "accelerate.utils.deepspeed"), "is DeepSpeed's"),
    (named("AcceleratedOptimizer", "accelerate.optimizer", TORCH),
        "accelerate's wrapper.*its .optimizer"),
    (named("DistributedOptimizer", f"{OF_MEGATRON}distrib_optimizer", MIXED),
        "pass .*optimizer.optimizer.*from_megatron"),
    (named("ChainedOptimizer", f"{OF_MEGATRON}optimizer", MEGATRON),
        "chained_optimizers\\[0\\].optimizer"),
    (named("OSS", "fairscale.optim.oss", TORCH), "on one rank for all"),
])  # fmt: skip
def test_other_peoples_optimizers(optimizer: Any, message: str) -> None:
    said = next(wrong_wrapper(optimizer))  # which is raised
    assert re.search(message, said)


@pytest.mark.parametrize("optimizer", [
    named("FusedAdam", "deepspeed.ops.adam.fused_adam", TORCH),
    named("HybridDeviceOptimizer", f"{OF_MEGATRON}cpu_offloading", TORCH),
])  # fmt: skip
def test_plain_optimizers_pass_wherever_they_come_from(optimizer: Any) -> None:
    assert not list(wrong_wrapper(optimizer))


def test_lbfgs_has_its_own_number_of_backward_passes() -> None:
    optimizer, two = torch.optim.LBFGS([nn.Parameter(torch.zeros(2))]), hdet.Replicas(0, 2)
    assert "backward passes" in refusal(optimizer, two)
    assert refusal(optimizer, two, "local") == ""
    assert refusal(optimizer, hdet.Replicas.single()) == refusal(optimizer, None) == ""


@pytest.mark.parametrize(("strategy", "refused"), [("optim", True), ("no_shard", False)])
def test_megatron_fsdp(strategy: str, refused: bool) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    config = SimpleNamespace(outer_dp_sharding_strategy=strategy)
    vars(parameter)["_megatron_fsdp_model"] = SimpleNamespace(ddp_config=config)
    said = refusal(torch.optim.SGD([parameter], lr=0.1), hdet.Replicas(0, 2))
    assert ("outer_dp_sharding_strategy='no_shard'" in said) is refused
