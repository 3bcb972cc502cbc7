"""What goes on from one average to the next: errors of rounding, whose codecs these are, and an
outer momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdet.converge import Compressed, Outer
from hdet.converge.compressed import BFloat16, Int8

from ..distributed import run_ranks
from .helpers import task


def long_run(rank: int, world: int) -> Any:
    """Beside a large displacement, which swings, a constant one far below its rounding."""
    tensor = torch.zeros(64)
    made = Compressed("int8", 64).build(task([tensor]))
    made.end_cycle([1 / world] * world)
    for step in range(200):
        tensor[0] += 1.0 if step % 2 == 0 else -1.0
        tensor[1:] += 1e-4 * (1 + rank)
        made.end_cycle([1 / world] * world)
    return tensor[1:].mean().item()


def test_what_rounding_takes_away_arrives_later() -> None:
    """1e-4 beside 1 is below int8's half step, 0.5 / 127: alone it would never arrive."""
    for arrived in run_ranks(long_run, 2):
        # all of it but the two errors that are kept back, each of half a step or less
        assert abs(arrived - 200 * 1.5e-4) <= 2 / 127


def forgets(rank: int, world: int, left_out: bool) -> Any:
    """Replica 1 moves by 1e-3 beside 1, which its error keeps back; what of it arrives later."""
    tensor = torch.zeros(64)
    made = Compressed("int8", 64).build(task([tensor]))
    made.end_cycle([0.5, 0.5])
    tensor[0], tensor[1:] = 1.0, 1e-3 * rank
    made.end_cycle([0.5, 0.5])
    found = [tensor.clone()]
    if left_out:
        if rank == 1:
            tensor.fill_(torch.nan)
        made.end_cycle([1.0, 0.0])
    for _ in range(3):
        made.end_cycle([0.5, 0.5])
    return [*found, tensor]


@pytest.mark.parametrize("left_out", [False, True])
def test_a_replica_of_weight_zero_forgets_its_error(left_out: bool) -> None:
    for at_once, later in run_ranks(forgets, 2, left_out):
        assert at_once.tolist() == [1.0] + [0.0] * 63
        assert later.tolist() == pytest.approx([1.0] + [0.0 if left_out else 5e-4] * 63, rel=1e-2)


@pytest.mark.parametrize("codec", [BFloat16(), Int8(16)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_codec_rounds_to_nearest(codec: Any, dtype: Any) -> None:
    generator, exponents = torch.Generator().manual_seed(0), torch.logspace(-30, 30, 3, dtype=dtype)
    rows = torch.randn(3, 64, generator=generator, dtype=dtype) * exponents.unsqueeze(1)
    rows[0, :16] = 0.0
    rows[0, 16:32] = 1e-44  # its scale would be 0 in fp32
    decoded = codec.decode(codec.encode(rows), torch.empty_like(rows))
    if isinstance(codec, BFloat16):
        bound = rows.abs() * 2.0**-8
    else:
        bound = rows.view(3, -1, 16).abs().amax(-1).repeat_interleave(16, 1) / 253.9
    assert bool(((decoded - rows).abs() <= bound.clamp(min=2e-44)).all())


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
