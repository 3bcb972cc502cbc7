"""Warm noise of models that are split over ranks: the noise of an element depends on where it is in
the full tensor, not on who has it."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hdet
from tests.distributed import run_ranks


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator, shapes = torch.Generator().manual_seed(7), ((7, 5), (3,), (1, 4), (8, 8))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def expected(theta: torch.Tensor, key: str) -> torch.Tensor:
    """With nu 0.1, as it has been since version 1."""
    seed = int.from_bytes(hashlib.sha256(f"warm_noise/{key}".encode()).digest()[:8], "big") >> 1
    noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(seed))
    return (theta + noise * (0.1 * theta.float().norm() / math.sqrt(theta.numel()))).to(theta.dtype)


def noisy(given: Any, replica: int = 1) -> None:
    hdet.warm_noise_(given, 0.1, 5, hdet.Replicas(replica, 4, None))


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """The norm of a full tensor is summed in another order."""
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replica", [0, 3])
def test_plain_tensors_get_the_noise_they_always_got(replica: int, dtype: torch.dtype) -> None:
    given = tensors(dtype)
    noisy(given, replica)
    for i, (one, theta) in enumerate(zip(given, tensors(dtype), strict=True)):
        assert torch.equal(one, expected(theta, f"5/{replica}/{i}"))


def test_names_speak_for_tensors() -> None:
    """A pipeline stage that holds the last of four tensors."""
    stage = tensors()[3]
    noisy([("layers.3", stage)])
    assert torch.equal(stage, expected(tensors()[3], "5/1/layers.3"))


LAYOUTS = [
    ((4,), [[Shard(0)], [Shard(0)], [Replicate()], [Shard(1)]]),
    ((2, 2), [
        [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Replicate()],
        [Shard(0), Shard(1)],
    ]),
]  # fmt: skip


def laid_out(rank: int, world: int) -> None:
    for sizes, placements in LAYOUTS:
        mesh = init_device_mesh("cpu", sizes)
        pairs = zip(tensors(), placements, strict=True)
        given = [distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in pairs]
        versions = [tensor._version for tensor in given]
        noisy(given)
        for i, (one, theta) in enumerate(zip(given, tensors(), strict=True)):
            full = one.full_tensor()
            close(full, expected(theta, f"5/1/{i}"))
            assert one._version > versions[i] or not one.to_local().numel()
            everyones = [torch.empty_like(full) for _ in range(world)]
            dist.all_gather(everyones, full)
            assert all(torch.equal(each, full) for each in everyones), "copies of a shard are equal"


def test_shards_of_a_mesh_get_their_slices() -> None:
    run_ranks(laid_out, 4)


def sharded_and_tensor_parallel(rank: int, world: int) -> None:
    """FSDP over tensor parallelism splits a dimension twice, in a stride (a placement of its own in
    torch)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(5, 16)
    theta = torch.randn(16, 5, generator=torch.Generator().manual_seed(2))
    model.weight = torch.nn.Parameter(distribute_tensor(theta, mesh["tp"], [Shard(0)]))
    model.bias = torch.nn.Parameter(distribute_tensor(torch.ones(16), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model.weight, DTensor) and model.weight.device_mesh.ndim == 2
    noisy(model.named_parameters())
    close(model.weight.full_tensor().detach(), expected(theta, "5/1/weight"))


def test_a_dimension_that_is_split_twice() -> None:
    run_ranks(sharded_and_tensor_parallel, 4)


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    laid = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    plain = torch.ones(4)
    for given, message in [
        ([partial], "a sum that has not been taken"),
        ([("a", plain), ("a", laid)], "two parameters have the name a"),
    ]:
        with pytest.raises(ValueError, match=message):
            noisy(given)
    assert torch.equal(plain, torch.ones(4)) and torch.equal(laid.full_tensor(), torch.ones(4))


def test_what_cannot_be_placed_is_refused_before_anything_is_changed() -> None:
    run_ranks(refused, 2)
