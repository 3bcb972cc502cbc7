"""Activation checkpointing: backward runs a forward pass again at the right weights, or raises."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hdet
from tests.harness import Batch, Run, batch, loss_of

from .helpers import same
from .test_coresident import apart, by_hand, gradients

BOTH = pytest.mark.parametrize("reentrant", [False, True])
REMEDY = r"call backward inside the same `with replicas.use\(k\):`"


class Blocks(nn.Module):
    """The layers are checkpointed, all or but for the first."""

    def __init__(self, reentrant: bool | None = None, first_too: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        self.layers, self.last = nn.Sequential(nn.Linear(6, 8), *blocks), nn.Linear(8, 1)
        self.reentrant, self.first_too = reentrant, first_too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            again = self.reentrant is not None and (i > 0 or self.first_too)
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if again else layer(x)
        return self.last(x)


def differentiable(key: int) -> Batch:
    x, y = batch(key)
    return x.requires_grad_(), y


def loss_at(net: nn.Module, k: int) -> torch.Tensor:
    return loss_of(net, differentiable(k))


@BOTH
@pytest.mark.parametrize("first_too", [False, True])
def test_inside_of_use_gradients_are_those_of_training_by_hand(
    reentrant: bool, first_too: bool
) -> None:
    net = Blocks(reentrant, first_too)
    replicas = apart(net)
    for k in range(3):
        with replicas.use(k):
            (loss_at(net, k) / 3).backward()
    assert same(gradients(net), by_hand(Blocks, 3))


@BOTH
@pytest.mark.parametrize(("first_too", "k", "j"), [
    *((first_too, k, None) for first_too in (False, True) for k in (1, 2)),
    *((False, k, j) for k, j in ((0, 1), (1, 0), (1, 2))),
])  # fmt: skip
def test_outside_of_use_backward_is_an_error(
    reentrant: bool, first_too: bool, k: int, j: int | None
) -> None:
    """And inside of the use of another replica, j."""
    net = Blocks(reentrant, first_too)
    replicas = apart(net)
    with replicas.use(k):
        loss = loss_at(net, k)
    use = nullcontext() if j is None else replicas.use(j)
    said = "" if j is None else f"replica {k}'s backward .* those of replica {j}: "
    with pytest.raises(ValueError, match=said + REMEDY), use:
        loss.backward()


def test_one_backward_pass_of_all_replicas_is_an_error_too() -> None:
    net = Blocks(False)
    replicas, total = apart(net), torch.zeros(())
    for k in range(3):
        with replicas.use(k):
            total = total + loss_at(net, k)
    with pytest.raises(ValueError, match=REMEDY), replicas.use(0):
        total.backward()


@BOTH
@pytest.mark.parametrize("state", ["never used", "driven", "closed"])
def test_the_model_by_itself_is_replica_zero(reentrant: bool, state: str) -> None:
    net = Blocks(reentrant, first_too=state == "closed")
    if state == "never used":
        apart(net)
    else:
        replicas = hdet.CoresidentReplicas(net, 2)
        ensemble = hdet.Ensemble(hdet.FusedAdamW(net.parameters(), lr=1e-3), replicas=replicas)
        if state == "closed":
            ensemble.close()
    loss_at(net, 0).backward()
    assert same(gradients(net), by_hand(Blocks, 1))


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_compiled_models_have_the_gradients_of_training_by_hand(way: str) -> None:
    torch.compiler.reset()
    net = Blocks(False)
    for i in (1, 2) if way == "blocks" else ():
        net.layers[i] = torch.compile(net.layers[i], backend="aot_eager")
    replicas = apart(net)
    run = torch.compile(net, backend="aot_eager") if way == "whole" else net
    for k in range(3):
        with replicas.use(k):
            (loss_at(run, k) / 3).backward()
    for one, other in zip(gradients(net), by_hand(Blocks, 3), strict=True):
        assert torch.allclose(one, other, rtol=1e-4)
    if way == "blocks":
        with replicas.use(1):
            loss = loss_at(run, 1)
        with pytest.raises(ValueError, match=REMEDY):
            loss.backward()
    torch.compiler.reset()


def test_a_copy_or_a_pickle_of_the_model_is_a_model() -> None:
    net = Blocks(True, first_too=True)
    apart(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        loss_at(other, 0).backward()
        assert same(gradients(other), by_hand(Blocks, 1))


@BOTH
def test_whole_runs_are_those_without_checkpointing_to_the_bit(reentrant: bool) -> None:
    def end(net: nn.Module) -> list[torch.Tensor]:
        run = Run(net=net, together=3, lr=1e-2, every=3, scheduler=None, data=differentiable)
        return run.steps(6).all_weights()

    assert same(end(Blocks()), end(Blocks(reentrant, first_too=True)))
