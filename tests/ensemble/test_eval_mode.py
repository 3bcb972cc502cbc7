"""A look that leaves no trace, at modules with a train() of their own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hdet.tensors.eval_mode import eval_mode

from .helpers import same


class Adapted(nn.Linear):
    """As loralib's: in eval mode the adapter is added to the weight, else it is beside it."""

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


class Around(nn.Sequential):
    """As loralib's convolutions: what is written to lies in a child."""

    merged = False

    def train(self, mode: bool = True) -> Around:
        super().train(mode)
        if mode == self.merged:
            self[0].weight.data *= 3 if not mode else 1 / 3
            self.merged = not mode
        return self


class Frozen(nn.Sequential):
    """Keeps its normalisation in eval mode, as detectors do."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[0].eval()
        return self


class Raises(nn.Linear):
    when: bool | None = None

    def train(self, mode: bool = True) -> Raises:
        if mode is self.when:
            raise RuntimeError(f"train({mode})")
        return super().train(mode)


def facts(net: nn.Module) -> list[Any]:
    return [(m.training, getattr(m, "merged", None)) for m in net.modules()]


@pytest.mark.parametrize("evaluated", [(), (0,), (3,), (0, 2, 3), None])
def test_modes_are_changed_as_torch_changes_them_and_parameters_stay_to_the_bit(
    evaluated: Any,
) -> None:
    torch.manual_seed(0)
    around = Around(nn.Linear(8, 8))
    net = nn.Sequential(Adapted(6, 8), nn.Tanh(), around, nn.BatchNorm1d(8), nn.Linear(8, 1))
    for part in [net] if evaluated is None else [net[i] for i in evaluated]:
        part.eval()
    before, state, version = facts(net), copy.deepcopy(net.state_dict()), net[4].weight._version
    for fails in (False, True, False):
        with pytest.raises(ArithmeticError) if fails else nullcontext(), eval_mode(net):
            assert all(not training and merged in (None, True) for training, merged in facts(net))
            if fails:
                raise ArithmeticError
        assert facts(net) == before
    assert same(net.state_dict(), state)
    assert net[4].weight._version == version, "without a train() of its own it is not written to"


@pytest.mark.parametrize("changed", [False, True])
def test_a_module_that_keeps_a_part_in_eval_mode_is_left_as_it_was(changed: bool) -> None:
    net = nn.Sequential(Frozen(nn.BatchNorm1d(6), nn.Linear(6, 1))).train()
    if changed:  # by hand, behind its back
        net[0][0].train()
    before = facts(net)
    with eval_mode(net):
        assert not any(training for training, _ in facts(net))
    assert facts(net) == before and before[2][0] is changed


@pytest.mark.parametrize("when", [False, True])
def test_where_train_raises_everything_else_is_restored(when: bool) -> None:
    net = nn.Sequential(Adapted(6, 6), Raises(6, 6), Adapted(6, 6), nn.Dropout())
    net[3].eval()
    before, state = facts(net), copy.deepcopy(net.state_dict())
    random = torch.get_rng_state()
    net[1].when = when
    with pytest.raises(RuntimeError, match=rf"train\({when}\)"), eval_mode(net):
        torch.rand(1)
    assert facts(net) == before and torch.equal(torch.get_rng_state(), random)
    assert same(net.state_dict(), state)
