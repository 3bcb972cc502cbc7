"""Outer: DiLoCo's step on the mean displacement, beside its equations in float64; and in a run, through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.converge import Outer, Plain

from ..distributed import run_ranks
from ..harness import Run, model
from .helpers import KINDS, exact, held, rounding_of, task, written

SHAPES = [(5, 7), (40,), (3, 1000)]
BUFFER = torch.arange(4.0)


def displaced(seed: int, rank: int, cycle: int) -> list[torch.Tensor]:
    """What a replica's cycle adds to each parameter, float64."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * rank + cycle)
    return [0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def beginning(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(3)
    return held(
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES],
        [kind] * len(SHAPES),
    )


def add(
    tensors: list[torch.Tensor],
    masters: list[torch.Tensor | None],
    kind: str,
    steps: list[torch.Tensor],
) -> None:
    moved = held(
        [value + step for value, step in zip(exact(tensors, masters), steps, strict=True)],
        [kind] * len(steps),
    )
    for old, new in zip((*tensors, *masters), (*moved[0], *moved[1]), strict=True):
        if old is not None and new is not None:
            old.copy_(new)


def cycles(
    rank: int, world: int, kind: str, way: Outer, weights: list[list[float]], apart: bool = False
) -> Any:
    """[cycle]: (values before the average, values after it, all bits, notes, the buffer)"""
    tensors, masters = beginning(kind)
    optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1)
    parameters = [p.data for p in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["params"][:] = parameters
    buffer = BUFFER + rank
    made = way.build(
        task([*parameters, buffer], [*masters, None], optimizer=optimizer, gradients="local")
    )
    if apart and rank == 1:
        parameters[1][3] += 0.25
    found = []
    for cycle, shares in enumerate(weights):
        made.on_cycle_start()
        add(parameters, masters, kind, displaced(1, rank, cycle))
        if shares[rank] == 0:
            parameters[0][0] = torch.nan
        before = [value.clone() for value in exact(parameters, masters)]
        notes = made.end_cycle(shares)
        assert made.idle and made.mean() is None and not made.acts_after(1)
        found.append(
            (
                before,
                [value.clone() for value in exact(parameters, masters)],
                written(parameters, masters),
                notes,
                buffer.clone(),
            )
        )
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", [Outer(), Outer(0.5, 0.8, nesterov=False), Outer(1.0, 0.0)], ids=repr
)
def test_it_is_the_equation(kind: str, way: Outer) -> None:
    weights = [[0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]
    ranks = run_ranks(cycles, 2, kind, way, weights)
    begin = exact(*beginning(kind))
    momenta = [torch.zeros_like(a) for a in begin]
    for cycle, shares in enumerate(weights):
        for i, (a, v) in enumerate(zip(begin, momenta, strict=True)):
            d = sum(w * (a - ranks[r][cycle][0][i]) for r, w in enumerate(shares) if w)
            v.mul_(way.momentum).add_(d)
            expected = a - way.rate * (d + way.momentum * v if way.nesterov else v)
            assert torch.allclose(
                ranks[0][cycle][1][i], expected, rtol=0, atol=8 * rounding_of(kind)
            ), (cycle, i)
        for rank in ranks:
            assert rank[cycle][3] == []
            assert all(
                torch.equal(x, y) for x, y in zip(rank[cycle][2], ranks[0][cycle][2], strict=True)
            ), "replicas differ"
        # Each is written as its format has it; the next cycle begins there.
        begin = ranks[0][cycle][1]
    assert torch.allclose(ranks[0][0][4], BUFFER + 0.5)


def test_replicas_that_began_apart_are_averaged_plainly_and_step_from_then_on() -> None:
    ranks = run_ranks(cycles, 2, "float32", Outer(), [[0.5, 0.5]] * 2, True)
    for rank in ranks:
        assert (
            "had not begun the cycle with the same parameters" in rank[0][3][0] and rank[1][3] == []
        )
    for i in range(len(SHAPES)):
        mean = (ranks[0][0][0][i] + ranks[1][0][0][i]) / 2
        assert torch.allclose(ranks[0][0][1][i], mean, rtol=0, atol=1e-6)
        assert torch.equal(ranks[0][1][1][i], ranks[1][1][1][i])
        assert not torch.allclose(
            ranks[0][1][1][i], (ranks[0][1][0][i] + ranks[1][1][0][i]) / 2, rtol=0, atol=1e-3
        )


def forgetful(rank: int, world: int) -> Any:
    """One rank alone loads its optimizer's state within a cycle, with the parameters that all had begun with; and the cycle after that."""
    tensors = [torch.zeros(4)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in tensors], lr=0.1)
    parameters = optimizer.param_groups[0]["params"]
    made = Outer().build(task(parameters, optimizer=optimizer, gradients="local"))
    found = []
    with torch.no_grad():
        for cycle in range(3):
            made.on_cycle_start()
            if cycle == 1 and rank == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            parameters[0] += rank + 1.0
            found.append(
                (made.end_cycle([0.5, 0.5]), parameters[0].tolist(), made.state()[0].tolist())
            )
    return found


def test_what_one_replica_alone_has_forgotten_makes_them_part_neither_in_parameters_nor_in_momentum() -> (
    None
):
    first, second = run_ranks(forgetful, 2)
    assert first == second
    assert [bool(notes) for notes, _, _ in first] == [False, True, False]
    assert (
        first[1][2] == [0.0] * 4 and first[2][2] == [-1.5] * 4
    )  # the momentum begins anew, with a cycle's mean displacement


def sliced(rank: int, world: int) -> Any:
    parameter = torch.zeros(3, 8)[:, ::2].requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    made = Outer().build(task([parameter], optimizer=optimizer, gradients="local"))
    made.on_cycle_start()
    with torch.no_grad():
        parameter += rank
    return made.end_cycle([0.5, 0.5]), parameter.detach()


def test_a_parameter_may_be_a_part_of_another_tensor() -> None:
    for notes, parameter in run_ranks(sliced, 2):
        assert notes == [] and torch.allclose(parameter, torch.tensor(0.7 * 0.5 * 1.9))


# -- in a run ------------------------------------------------------------------------------------------------------------


def local(
    rank: int,
    sharded: bool = False,
    converge: hdet.converge.Averaging | None = None,
    **settings: Any,
) -> Run:
    """Of two replicas; ``sharded``: of two ranks each, which hold a part of the parameters."""
    net = model()
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh["shard"])
        settings["replicas"] = hdet.Replicas.from_mesh(mesh, replicate="replicate")
    return Run(
        rank,
        net=net,
        ddp=False,
        gradients="local",
        moments="keep",
        converge=converge or Outer(),
        total=20,
        **settings,
    )


def weights(run: Run) -> torch.Tensor:
    return torch.cat(
        [getattr(p, "full_tensor", p.detach)().detach().flatten() for p in run.net.parameters()]
    )


def trained(rank: int, world: int, root: str, sharded: bool) -> Any:
    whole = local(rank, sharded).steps()
    first = local(rank, sharded).steps(10)
    hdet.checkpoint.save(root, hdet.checkpoint.RunState(first.net, first.ensemble))
    second = local(rank, sharded)
    second.index = hdet.checkpoint.load(root, hdet.checkpoint.RunState(second.net, second.ensemble))
    second.steps()
    plain = local(rank, sharded, Plain()).steps()
    return (
        weights(whole),
        weights(second),
        weights(plain),
        [record["notes"] for record in whole.records],
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_resumed_run_is_the_run_to_the_bit(tmp_path: Path, sharded: bool) -> None:
    ranks = run_ranks(trained, 4 if sharded else 2, str(tmp_path), sharded)
    for whole, resumed, plain, notes in ranks:
        assert (
            torch.equal(whole, ranks[0][0])
            and torch.equal(whole, resumed)
            and not torch.allclose(whole, plain)
        )
        assert all(note == [] for note in notes)
