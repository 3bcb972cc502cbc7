"""FusedMuon on parameters that are laid over a mesh, beside the same step on plain ones."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter

from hdet.optim import FusedMuon, matrices, newton_schulz
from tests.distributed import run_ranks

from .common import copies
from .sharded import Twins, close, full, model_of, train, weights

SHAPES = [(7, 5), (5, 7), (1, 4), (3, 6, 2), (9, 8), (3,), (8, 3), (7, 5)]
MATRICES = [0, 1, 2, 3, 4, 7]
GROUPS: list[tuple[list[int], dict[str, Any]]] = [
    (MATRICES[:3], {"use_muon": True}),
    (MATRICES[3:], {"use_muon": True, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ([5, 6], {"use_muon": False}),
]
HSDP = [[Replicate(), Shard(0)]] * 8
MESHES: dict[str, Any] = {
    "fsdp": ((2,), [[Shard(0)]] * 8),
    "mixed": (
        (2,),
        [[place] for place in (Shard(1), Shard(0), Shard(0), Shard(1), Replicate(), Shard(0))]
        + [[Replicate()], [Shard(-1)]],
    ),
    "hsdp": ((2, 2), HSDP),
    "grid": (
        (2, 2),
        [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(2)]]
        + HSDP[:4],
    ),
    "owners": ((2,), [[Shard(0)]] * 3 + [[Replicate()], [Shard(1)]] + [[Shard(0)]] * 3),
}


def twins_of(mesh: str, dtype: torch.dtype = torch.float32, **options: Any) -> Twins:
    def make(params: list[Parameter]) -> FusedMuon:
        groups = [
            {"params": [params[i] for i in places], "stacked": True, **kind}
            for places, kind in GROUPS
        ]
        return FusedMuon(groups, **{"lr": 2e-2, **options})

    return Twins(make, *MESHES[mesh], SHAPES, dtype)


def as_the_plain_ones(rank: int, world_size: int, mesh: str) -> None:
    for options in ({}, {"max_grad_norm": 0.5, "zero_gradients": True}):
        twins = twins_of(mesh, **options)
        twins.go(range(3))
        twins.check(1e-5)
        if options:
            torch.testing.assert_close(twins.a.grad_norm, twins.b.grad_norm)
            torch.testing.assert_close(twins.a.gradient_norms(), twins.b.gradient_norms())
            gradients: list[Any] = [param.grad for param in twins.laid]
            assert not any(gradient.to_local().any() for gradient in gradients)
    twins = twins_of(mesh, torch.bfloat16, master_weights="fp32")
    twins.both(lambda one: one.set_replicas(2, copies(2)))
    twins.both(lambda one: setattr(one, "multipliers", [[0.5, 1.0, 1.5], [1.5, 1.0, 0.5]]))
    twins.go(range(3))
    twins.check_masters(2, 1e-5)


@pytest.mark.parametrize("mesh", ["fsdp", "mixed", "hsdp", "grid"])
def test_shards_step_as_the_full_tensors_would(mesh: str) -> None:
    run_ranks(as_the_plain_ones, math.prod(MESHES[mesh][0]), mesh)


def each_matrix_is_solved_once(rank: int, world_size: int) -> list[tuple[int, ...]]:
    twins = twins_of("owners")
    twins.gradients(0)
    solved: list[tuple[int, ...]] = []

    def watched(given: list[Tensor], *rest: Any) -> list[Tensor]:
        solved.extend(tuple(tensor.shape) for tensor in given)
        return newton_schulz.orthogonalise(given, *rest)

    with mock.patch.object(matrices, "orthogonalise", watched):
        twins.a.step()
    return solved


def test_each_matrix_has_one_owner_and_owners_equal_work() -> None:
    first, second = run_ranks(each_matrix_is_solved_once, 2)
    assert sorted(first + second) == sorted(SHAPES[i] for i in MATRICES if i != 3)
    alone = first if (9, 8) in first else second
    assert len(alone) == 1, "it is more work than the others together"
    assert matrices.shares([8, 1, 7, 6, 2], 2) == [[0, 4, 1], [2, 3]]


def unusual_gradients(rank: int, world_size: int) -> None:
    """One that is a sum still to be taken, an absent one, and one that is not finite on one
    rank."""
    twins = twins_of("fsdp", max_grad_norm=math.inf)
    twins.go(range(1))
    twins.gradients(1)
    whole = full(twins.laid[0].grad)
    twins.laid[0].grad = DTensor.from_local(whole / 2, twins.mesh, [Partial()])
    twins.laid[1].grad = twins.plain[1].grad = None
    twins.both(lambda one: one.step())
    twins.check(1e-5)
    twins.gradients(2)
    if rank == 1:
        twins.laid[4].grad.to_local()[0] = math.nan  # type: ignore[union-attr, attr-defined]
    twins.a.step()
    assert twins.a.step_skipped.item() == 1
    twins.check(1e-5)


def models_train_as_the_plain_one(rank: int, world_size: int) -> None:
    found = []
    for kind in ("fsdp", "tp", "plain") if world_size == 2 else ("hsdp", "fsdp x tp", "plain"):
        model = model_of(kind)
        optimizer = FusedMuon(model.named_parameters(), lr=2e-2, adamw_lr=1e-2)
        assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
        train(model, optimizer, kind, range(4))
        found.append(weights(model))
    for each in found[:-1]:
        for one, other in zip(each, found[-1], strict=True):
            close(one, other, 1e-4)


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        (unusual_gradients, 2),
        (models_train_as_the_plain_one, 2),
        (models_train_as_the_plain_one, 4),
    ],
)
def test_on_ranks(function: Any, ranks: int) -> None:
    run_ranks(function, ranks)
