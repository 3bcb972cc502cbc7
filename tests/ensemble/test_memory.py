"""Copies of the parameters: a controller keeps them while it needs them, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.harness import Run, losses_of, probe, taught

pytestmark = pytest.mark.filterwarnings("ignore:one replica", "ignore:.*Adam's two moments")
SIZE = 300_000


class Large(nn.Module):
    """Of one weight, of which all but a few numbers are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE // 300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:6, :1]


CONTROLLERS: dict[str, Callable[[nn.Module], hdet.Controller]] = {
    "line": hdet.LineController,
    "hypergradient": lambda net: hdet.HypergradientController(freeze_after=0.5),
    "probe": lambda net: probe(net, interval=2, freeze_after=0.5),
    "line, then hypergradient": lambda net: hdet.SequentialController(hdet.LineController(net, late=False), hdet.HypergradientController(freeze_after=0.5)),
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
    assert needed == (2 if name == "hypergradient" else 3), "the parameters are one; what has to wait for another has none yet"
    ran.ensemble.close()
    assert copies(ran) == 1
    del ran
    ran = run(name).steps()
    assert ran.controller.idle and copies(ran) == 1


@pytest.mark.parametrize(("optimizer", "expected"), [(torch.optim.SGD, 3), (torch.optim.AdamW, 5)])
def test_a_line_is_read_without_a_further_copy(optimizer: Any, expected: int) -> None:
    """And moments that do not exist at the beginning are not copied."""
    ran, read = run("line", optimizer), []
    ran.closure = lambda data: read.append(copies(ran)) or losses_of(ran.net, data)
    ran.steps(9)
    assert len(read) > 2 and set(read[1:]) == {copies(ran)} == {expected}
