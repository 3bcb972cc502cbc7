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


def cycles(rank: int, world: int, kind: str, way: Outer, weights: Any, apart: bool = False) -> Any:
    """[cycle]: (values before the average, values after it, all bits, notes, the buffer)"""
    kinds = [kind] * len(SHAPES)
    tensors, masters = held(drawn(3), kinds)
    optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1)
    parameters = [p.data for p in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["params"][:] = parameters
    buffer, given = BUFFER + rank, {"optimizer": optimizer, "gradients": "local"}
    made = way.build(task([*parameters, buffer], [*masters, None], **given))
    if apart and rank == 1:
        parameters[1][3] += 0.25
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
        assert made.idle and made.mean() is None and not made.acts_after(1)
        after = [value.clone() for value in exact(parameters, masters)]
        found.append((before, after, written(parameters, masters), notes, buffer.clone()))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", [Outer(), Outer(0.5, 0.8, nesterov=False), Outer(1.0, 0.0)], ids=repr
)
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


def test_replicas_that_began_apart_are_averaged_plainly_and_step_from_then_on() -> None:
    one, two = run_ranks(cycles, 2, "float32", Outer(), [[0.5, 0.5]] * 2, True)
    for rank in (one, two):
        assert "had not begun the cycle alike" in rank[0][3][0]
        assert rank[1][3] == []
    means = [[(a + b) / 2 for a, b in zip(one[c][0], two[c][0], strict=True)] for c in (0, 1)]
    for first, mean in zip(one[0][1], means[0], strict=True):
        assert torch.allclose(first, mean, rtol=0, atol=1e-6)
    assert equal(one[1][1], two[1][1])
    for second, mean in zip(one[1][1], means[1], strict=True):
        assert not torch.allclose(second, mean, rtol=0, atol=1e-3)


def forgetful(rank: int, world: int) -> Any:
    """In the second of three cycles one rank alone loads its optimizer's state."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    made = Outer().build(task([parameter], optimizer=optimizer, gradients="local"))
    found = []
    with torch.no_grad():
        for cycle in range(3):
            made.on_cycle_start()
            if cycle == 1 and rank == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            parameter += rank + 1.0
            notes = made.end_cycle([0.5, 0.5])
            found.append((bool(notes), parameter.tolist(), made.state()[0].tolist()))
    return found


def test_what_one_replica_alone_has_forgotten_parts_neither_parameters_nor_momentum() -> None:
    first, second = run_ranks(forgetful, 2)
    assert first == second and [noted for noted, _, _ in first] == [False, True, False]
    # the momentum begins anew, with a cycle's mean displacement
    assert first[1][2] == [0.0] * 4 and first[2][2] == [-1.5] * 4
