"""Outer, where replicas have not begun a cycle alike. (Its equation: test_ways.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet.converge import Outer

from ..distributed import run_ranks
from .helpers import task


def parted(rank: int, world: int, what: str) -> Any:
    """In the second of three cycles one rank alone begins elsewhere, or loads its optimizer's
    state, and with it forgets the momentum."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    made = Outer().build(task([parameter], optimizer=optimizer, gradients="local"))
    found = []
    with torch.no_grad():
        for cycle in range(3):
            is_apart = cycle == 1 and rank == 1
            parameter += 0.25 * (is_apart and what == "parameters")
            made.on_cycle_start()
            if is_apart and what == "momentum":
                optimizer.load_state_dict(optimizer.state_dict())
            parameter += rank + 1.0
            notes = made.end_cycle([0.5, 0.5])
            found.append((notes, parameter.tolist(), made.state()[0].tolist()))
    return found


@pytest.mark.parametrize("what", ["parameters", "momentum"])
def test_replicas_that_began_apart_are_averaged_plainly_and_step_from_then_on(what: str) -> None:
    first, second = run_ranks(parted, 2, what)
    said = ["plain average instead of an outer step: replicas had not begun the cycle alike"]
    assert first == second and [notes for notes, _, _ in first] == [[], said, []]
    moved = first[1][1][0] - first[0][1][0]
    assert moved == pytest.approx(1.5 + (0.125 if what == "parameters" else 0), rel=1e-6)
    # the momentum begins anew, with a cycle's mean displacement
    assert first[1][2] == [0.0] * 4 and first[2][2] == pytest.approx([-1.5] * 4, rel=1e-6)
