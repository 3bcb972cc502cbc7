"""A look that leaves no trace, at modules with a train() of their own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.measure.batch_losses import BatchLosses
from hdet.tensors.eval_mode import eval_mode
from tests.harness import Run, batch, loss_of, taught

from .helpers import watched


class Adapted(nn.Linear):
    """As loralib's: in eval mode the adapter is added to the weight, in training mode it is beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a = nn.Parameter(torch.randn(2, inputs) / 3)
        self.b = nn.Parameter(torch.randn(outputs, 2) / 3)
        self.weight.requires_grad = False
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.b @ self.a)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (0 if self.merged else x @ self.a.T @ self.b.T)


class Around(nn.Module):
    """As loralib's convolutions: what is written to lies in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.merged = nn.Linear(8, 8), False

    def train(self, mode: bool = True) -> Around:
        super().train(mode)
        if mode == self.merged:
            self.inside.weight.data *= 3 if not mode else 1 / 3
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(6, 8), nn.Tanh(), Around(), nn.BatchNorm1d(8), nn.Linear(8, 1))


def facts(net: nn.Module) -> list[Any]:
    return [(m.training, getattr(m, "merged", None)) for m in net.modules()]


@pytest.mark.parametrize("evaluated", [(), (0,), (3,), (0, 2, 3), "all"])
def test_modes_are_changed_as_torch_changes_them_and_parameters_stay_to_the_bit(
    evaluated: Any,
) -> None:
    net = adapted()
    if evaluated == "all":
        net.eval()
    for i in evaluated if evaluated != "all" else ():
        net[i].eval()
    before, state, version = facts(net), copy.deepcopy(net.state_dict()), net[4].weight._version
    for fails in (False, True, False):
        with pytest.raises(ArithmeticError) if fails else nullcontext(), eval_mode(net):
            assert all(not training and merged in (None, True) for training, merged in facts(net))
            if fails:
                raise ArithmeticError
        assert facts(net) == before
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert net[4].weight._version == version, (
        "a module without a train() of its own is not written to"
    )


class Frozen(nn.Module):
    """Keeps its normalisation in eval mode, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


def test_a_module_that_keeps_a_part_in_eval_mode_is_left_as_it_was() -> None:
    for changed in (False, True):
        net = nn.Sequential(Frozen())
        if changed:  # by hand, behind its back
            net[0].norm.train()
        before = facts(net)
        with eval_mode(net):
            assert not any(training for training, _ in facts(net))
        assert facts(net) == before


class Raises(nn.Linear):
    when: bool | None = None

    def train(self, mode: bool = True) -> Raises:
        if mode is self.when:
            raise RuntimeError(f"train({mode})")
        return super().train(mode)


@pytest.mark.parametrize("when", [False, True])
def test_where_train_raises_everything_else_is_restored(when: bool) -> None:
    net = nn.Sequential(Adapted(6, 6), Raises(6, 6), Adapted(6, 6), nn.Dropout())
    net[3].eval()
    before, state = facts(net), copy.deepcopy(net.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    net[1].when = when
    with pytest.raises(RuntimeError, match=rf"train\({when}\)"), eval_mode(net):
        torch.rand(1)
    assert facts(net) == before and torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_adapters_are_trained_by_a_trial_and_scored_under_a_probe() -> None:
    """After the trial the adapter has a gradient again, and what it is added to stays what it was."""
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(6, 8), nn.Tanh(), Adapted(8, 1))
    weights = [net[0].weight.clone(), net[2].weight.clone()]
    run = Run(
        net=net,
        controller=hdet.AutoLR(net),
        closure=True,
        scheduler=None,
        lr=3e-3,
        total=1000,
        data=taught,
        spread=0.0,
    ).steps(60)
    for layer, weight in zip((net[0], net[2]), weights, strict=True):
        assert isinstance(layer, Adapted)
        assert (
            layer.training and not layer.merged and layer.a.grad is not None and layer.a.grad.any()
        )
        assert torch.equal(layer.weight, weight)
    assert any("learning rate 0.003" in note for note in run.notes())

    losses = BatchLosses(loss_of, [batch(i) for i in range(8)], 8, net)
    losses.watch(watched(net))
    losses.measure(0)
    assert not net[0].merged and all(
        torch.equal(layer.weight, w) for layer, w in zip((net[0], net[2]), weights, strict=True)
    )
