"""Copies of the parameters: a controller keeps them while it needs them, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import Run, probe, taught

pytestmark = pytest.mark.filterwarnings("ignore:one replica")
SIZE = 300_000


class Large(nn.Module):
    """Of one weight, of which all but a few numbers are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE // 300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:6, :1]


CONTROLLERS: dict[str, Callable[[nn.Module], hdet.Controller]] = {
    "auto": lambda net: hdet.AutoLR(net, budget=0.9),
    "hypergradient": lambda net: hdet.HypergradientController(freeze_after=0.5),
    "probe": lambda net: probe(net, interval=2, freeze_after=0.5),
    "auto, then hypergradient": lambda net: hdet.SequentialController(hdet.AutoLR(net, budget=0.9), hdet.HypergradientController(freeze_after=0.95)),
}  # fmt: skip


def run(name: str, optimizer: Any = torch.optim.SGD) -> Run:
    return Run(net=Large(), controller=CONTROLLERS[name], optimizer=optimizer, lr=1e-3, total=200, every=2, data=taught, closure=True)


def copies(run: Run) -> int:
    run.optimizer.zero_grad()
    gc.collect()
    return len({x.data_ptr() for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.numel() == SIZE})


@pytest.mark.parametrize("name", CONTROLLERS)
def test_copies_are_kept_while_they_are_needed(name: str) -> None:
    ran = run(name).steps(7)
    needed = copies(ran)
    expected = {"hypergradient": 2, "probe": 3}.get(name, 6)  # of a scan: the run, its beginning and three arms
    assert needed == expected, "the parameters are one; what has to wait for another has none yet"
    ran.ensemble.close()
    assert copies(ran) == 1
    del ran
    ran = run(name).steps()
    assert ran.controller.idle and copies(ran) == 1
