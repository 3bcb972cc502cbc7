"""Outer: DiLoCo's step on the mean displacement, beside its equations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet.converge import Outer

from ..distributed import run_ranks
from .helpers import KINDS, equal, exact, held, rounding_of, task, written

SHAPES = [(5, 7), (40,), (3, 1000)]
BUFFER = torch.arange(4.0)


def drawn(seed: int) -> list[torch.Tensor]:
    """One for each parameter, float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def cycles(rank: int, world: int, kind: str, way: Outer, weights: Any) -> Any:
    """[cycle]: (values before the average, values after it, all bits, notes, the buffer)"""
    kinds = [kind] * len(SHAPES)
    tensors, masters = held(drawn(3), kinds)
    optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1)
    parameters = [p.data for p in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["params"][:] = parameters
    buffer, given = BUFFER + rank, {"optimizer": optimizer, "gradients": "local"}
    made = way.build(task([*parameters, buffer], [*masters, None], **given))
    found = []
    for cycle, shares in enumerate(weights):
        made.on_cycle_start()
        steps = [0.1 * step for step in drawn(1000 + 100 * rank + cycle)]
        pairs = zip(exact(parameters, masters), steps, strict=True)
        moved = held([value + step for value, step in pairs], kinds)
        for old, new in zip((*parameters, *masters), (*moved[0], *moved[1]), strict=True):
            if old is not None:
                old.copy_(new)
        if shares[rank] == 0:
            parameters[0][0] = torch.nan
        before = [value.clone() for value in exact(parameters, masters)]
        notes = made.end_cycle(shares)
        assert made.idle and made.mean() is None
        after = [value.clone() for value in exact(parameters, masters)]
        found.append((before, after, written(parameters, masters), notes, buffer.clone()))
    return found


@pytest.mark.parametrize(("kind", "way"), [
    *((kind, Outer()) for kind in KINDS), ("float32", Outer(0.5, 0.8, nesterov=False)),
    ("bfloat16 split", Outer(1.0, 0.0)),
], ids=repr)  # fmt: skip
def test_it_is_the_equation(kind: str, way: Outer) -> None:
    weights = [[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]
    ranks = run_ranks(cycles, 2, kind, way, weights)
    begin = exact(*held(drawn(3), [kind] * len(SHAPES)))
    momenta = [torch.zeros_like(a) for a in begin]
    for cycle, shares in enumerate(weights):
        before, (_, got, bits, _, _) = [rank[cycle][0] for rank in ranks], ranks[0][cycle]
        for i, (a, v) in enumerate(zip(begin, momenta, strict=True)):
            d = sum(w * (a - values[i]) for w, values in zip(shares, before, strict=True) if w)
            v.mul_(way.momentum).add_(d)
            expected = a - way.rate * (d + way.momentum * v if way.nesterov else v)
            allowed = 8 * rounding_of(kind)
            assert torch.allclose(got[i], expected, rtol=0, atol=allowed), (cycle, i)
        for rank in ranks:
            assert rank[cycle][3] == [] and equal(rank[cycle][2], bits)
        begin = got  # each is written as its format has it; the next cycle begins there
    assert torch.allclose(ranks[0][0][4], BUFFER + 0.5)


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
