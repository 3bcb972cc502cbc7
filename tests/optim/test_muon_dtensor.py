"""FusedMuon on parameters that are laid over a mesh, beside the same step on plain ones."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import Parameter

from hdet.optim import FusedMuon, matrices, newton_schulz
from hdet.tensors import dtensor as shards
from tests.distributed import run_ranks

from .test_dtensor import full, laid, mesh_of, model_of, train, values, weights
from .test_replicas import copies

SHAPES = [(7, 5), (5, 7), (1, 4), (3, 6, 2), (9, 8), (3,), (8, 3), (7, 5)]
MATRICES = [0, 1, 2, 3, 4, 7]

ROWS = [[Shard(0)]] * 8
MIXED = [
    [Shard(1)],
    [Shard(0)],
    [Shard(0)],
    [Shard(1)],
    [Replicate()],
    [Shard(0)],
    [Replicate()],
    [Shard(-1)],
]
HSDP = [[Replicate(), Shard(0)]] * 8
GRID = [
    [Shard(0), Shard(1)],
    [Shard(1), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(0), Shard(2)],
    *HSDP[:4],
]


class Twins:
    """Equal parameters, plain and laid over a mesh, each with an optimizer."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        placements: Sequence[Any],
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.mesh, self.placements, self.dtype = mesh_of(*sizes), placements, dtype
        self.plain = [Parameter(tensor) for tensor in values(0, dtype, SHAPES)]
        self.laid = [
            Parameter(tensor) for tensor in laid(values(0, dtype, SHAPES), self.mesh, placements)
        ]
        self.a, self.b = (self._make(params, **options) for params in (self.laid, self.plain))

    @staticmethod
    def _make(params: list[Parameter], **options: Any) -> FusedMuon:
        first, second, rest = (
            MATRICES[:3],
            MATRICES[3:],
            [i for i in range(len(SHAPES)) if i not in MATRICES],
        )
        kinds = [
            {"use_muon": True},
            {"use_muon": True, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
            {"use_muon": False},
        ]
        return FusedMuon(
            [
                {"params": [params[i] for i in chosen], **kind}
                for chosen, kind in zip((first, second, rest), kinds, strict=True)
            ],
            **{"lr": 2e-2, **options},
        )

    def gradients(self, step: int) -> None:
        given = values(100 + step, self.dtype, SHAPES)
        for param, gradient in zip(self.plain, given, strict=True):
            param.grad = gradient
        for param, gradient in zip(self.laid, laid(given, self.mesh, self.placements), strict=True):
            param.grad = gradient

    def go(self, steps: range) -> None:
        for step in steps:
            self.gradients(step)
            self.a.step()
            self.b.step()

    def check(self, tolerance: float = 1e-5) -> None:
        for one, other in zip(self.laid, self.plain, strict=True):
            torch.testing.assert_close(full(one), other.detach(), rtol=tolerance, atol=tolerance)
            ours, theirs = self.a.state[one], self.b.state[other]
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert isinstance(value, list) or key == "step" or shards.alike(value, one)
                if key in ("momentum_buffer", "step"):
                    assert torch.equal(full(value), theirs[key])


def as_the_plain_ones(
    rank: int, world_size: int, sizes: tuple[int, ...], placements: Sequence[Any]
) -> None:
    for options in ({}, {"max_grad_norm": 0.5, "zero_gradients": True}):
        twins = Twins(sizes, placements, **options)
        twins.go(range(3))
        twins.check()
        if options:
            torch.testing.assert_close(twins.a.grad_norm, twins.b.grad_norm)
            torch.testing.assert_close(twins.a.gradient_norms(), twins.b.gradient_norms())
            assert not any(param.grad.to_local().any() for param in twins.laid)
    twins = Twins(sizes, placements, torch.bfloat16, master_weights="fp32")
    for optimizer in (twins.a, twins.b):
        optimizer.set_replicas(2, copies(2))
        optimizer.multipliers = [[0.5, 1.0, 1.5], [1.5, 1.0, 0.5]]
    twins.go(range(3))
    for param, other in zip(twins.laid, twins.plain, strict=True):
        for k in range(2):
            one, two = twins.a.masters([param], k)[0], twins.b.masters([other], k)[0]
            torch.testing.assert_close(full(shards.like(one, param)), two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [((2,), ROWS), ((2,), MIXED), ((2, 2), HSDP), ((2, 2), GRID)],
    ids=["fsdp", "mixed", "hsdp", "grid"],
)
def test_shards_step_as_the_full_tensors_would(
    sizes: tuple[int, ...], placements: Sequence[Any]
) -> None:
    run_ranks(as_the_plain_ones, math.prod(sizes), sizes, placements)


def each_matrix_is_solved_once(rank: int, world_size: int) -> list[tuple[int, ...]]:
    twins = Twins((2,), [*ROWS[:3], [Replicate()], [Shard(1)], *ROWS[:3]])
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


def adopted_kinds(rank: int, world_size: int) -> None:
    """A gradient that is a sum still to be taken, an absent one, and one that is not finite on one
    rank."""
    twins = Twins((2,), ROWS, max_grad_norm=math.inf)
    twins.go(range(1))
    twins.gradients(1)
    whole = twins.laid[0].grad
    from torch.distributed.tensor import DTensor

    twins.laid[0].grad = DTensor.from_local(full(whole) / 2, twins.mesh, [Partial()])
    twins.laid[1].grad = twins.plain[1].grad = None
    twins.a.step()
    twins.b.step()
    twins.check()
    twins.gradients(2)
    if rank == 1:
        twins.laid[4].grad.to_local()[0] = math.nan  # type: ignore[union-attr]
    twins.a.step()
    assert twins.a.step_skipped.item() == 1  # type: ignore[union-attr]
    twins.check()


def models_train_as_the_plain_one(rank: int, world_size: int) -> None:
    found = []
    for kind in ("fsdp", "tp", "plain") if world_size == 2 else ("hsdp", "fsdp x tp", "plain"):
        model = model_of(kind)
        optimizer = FusedMuon(model.named_parameters(), lr=2e-2, adamw_lr=1e-2)
        assert len(optimizer.param_groups) == 2
        train(model, optimizer, kind, range(4))
        found.append(weights(model))
    for each in found[:-1]:
        for one, other in zip(each, found[-1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "ranks"),
    [(adopted_kinds, 2), (models_train_as_the_plain_one, 2), (models_train_as_the_plain_one, 4)],
)
def test_on_ranks(function: Any, ranks: int) -> None:
    run_ranks(function, ranks)


def muon_of(kind: str) -> tuple[nn.Module, FusedMuon]:
    model = model_of(kind, torch.bfloat16)
    return model, FusedMuon(model.named_parameters(), lr=2e-2, master_weights="split")


def saved(rank: int, world_size: int, folder: str) -> list[Tensor]:
    model, optimizer = muon_of("fsdp")
    train(model, optimizer, "fsdp", range(2))
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )
    train(model, optimizer, "fsdp", range(2, 4))
    return weights(model)


def loaded(rank: int, world_size: int, folder: str) -> list[Tensor]:
    model, optimizer = muon_of("hsdp")
    before = weights(model)
    state = {
        "model": model.state_dict(),
        "optimizer": copy.copy(get_optimizer_state_dict(model, optimizer)),
    }  # by a step of rate 0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    train(model, optimizer, "hsdp", range(2, 4))
    return weights(model)


def test_a_distributed_checkpoint_is_resharded() -> None:
    """Saved by two ranks, loaded by four in two replicas: the same run."""
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(saved, 2, folder)
        found = run_ranks(loaded, 4, folder)
    for each in found:
        for one, other in zip(each, expected[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-3)
