"""An outer step of one worker: one process, the shards of one replica, or replicas that are
equal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet import checkpoint
from hdet.converge import Outer
from hdet.tensors.dtensor import local_parts

from ..distributed import run_ranks
from ..harness import Run, model
from ..trial.common import ALL, WITHOUT, auto_run, searched

OUTER = Outer(0.5, 0.8)
EVERY = 5
EQUAL = {"spread": 0.0}
LOCAL = {"gradients": "local", "moments": "keep"}


def run_of(layout: str, rank: int, **settings: Any) -> Run:
    net: Any = model()
    if layout == "shards":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(net, mesh=mesh)
    given = {**EQUAL, "every": EVERY, **settings}
    return Run(0 if layout == "shards" else rank, net=net, ddp=layout == "equal", **given)


def weights_of(run: Run) -> list[torch.Tensor]:
    return [part.detach().clone() for part in local_parts([*run.net.parameters()])]


def stepped(rank: int, world: int, layout: str, settings: dict[str, Any]) -> Any:
    """By cycle: what came, and what the same training comes to with the outer step by hand."""
    run, plain = run_of(layout, rank, converge=OUTER, **settings), run_of(layout, rank, **settings)
    origins, found = weights_of(plain), []
    momenta = [torch.zeros_like(own) for own in origins]
    for _ in range(4):
        run.steps(EVERY), plain.steps(EVERY)
        for i, own in enumerate(local_parts([*plain.net.parameters()])):
            d = origins[i] - own
            momenta[i] = OUTER.momentum * momenta[i] + d
            own.data.copy_(origins[i] - OUTER.rate * (d + OUTER.momentum * momenta[i]))
        origins = weights_of(plain)
        found.append((torch.cat([w.flatten() for w in weights_of(run)]),
                      torch.cat([w.flatten() for w in origins])))  # fmt: skip
    return found


LAYOUTS = [("alone", 1, {}), ("alone", 1, LOCAL), ("equal", 2, {}), ("shards", 2, {})]


@pytest.mark.parametrize(("layout", "world", "settings"), LAYOUTS)
def test_one_worker_moves_along_its_own_displacement(
    layout: str, world: int, settings: dict[str, Any]
) -> None:
    ranks = run_ranks(stepped, world, layout, settings)
    for cycles in ranks:
        for got, expected in cycles:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    if layout == "equal":
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(*ranks, strict=True))


def resumed(rank: int, world: int, layout: str, root: str, settings: dict[str, Any]) -> Any:
    """The outer step's state, and the weights after more cycles, of a run that goes on from what
    one process has saved."""
    run = run_of(layout, rank, converge=OUTER, **settings)
    run.index = checkpoint.load(root, checkpoint.RunState(run.net, run.ensemble))
    state = [t.clone() for t in run.ensemble.averager.state()]
    return state, torch.cat([w.flatten() for w in weights_of(run.steps(2 * EVERY))])


@pytest.mark.parametrize("settings", [EQUAL, LOCAL])
def test_a_cycle_goes_on_with_more_replicas(tmp_path: Path, settings: dict[str, Any]) -> None:
    """From where it began, with the momentum; a save changes nothing."""
    run, other = (run_of("alone", 0, converge=OUTER) for _ in range(2))
    checkpoint.save(tmp_path, checkpoint.RunState(run.steps(7).net, run.ensemble), 7)
    saved = [t.clone() for t in run.ensemble.averager.state()]
    assert len(saved) == 8  # v and a
    assert torch.equal(run.steps(8).weights(), other.steps(15).weights())
    ranks = run_ranks(
        resumed, 2, "equal" if settings is EQUAL else "apart", str(tmp_path), settings
    )
    for state, weights in ranks:
        assert all(map(torch.equal, state, saved)) and weights.isfinite().all()


SEARCHED = {"converge": OUTER, "every": 20}


@pytest.mark.parametrize("settings", [{}, WITHOUT])
def test_a_search_that_moves_nothing_leaves_no_trace(settings: dict[str, Any]) -> None:
    """Although cycles end in it, and its copies train in their middle."""
    run, plain = (auto_run(**SEARCHED, **settings, controlled=on) for on in (True, False))
    searched(run).steps(30)
    assert run.ensemble.corrections == {"lr": 1.0}
    assert torch.equal(run.weights(), plain.steps(run.index).weights())


@pytest.mark.parametrize("settings", [{}, WITHOUT])
def test_a_run_that_begins_again_has_no_momentum_of_before(settings: dict[str, Any]) -> None:
    make = partial(auto_run, 30.0, **SEARCHED, **settings)
    run = searched(make())
    assert run.ensemble.corrections["lr"] < 0.1
    other = make().loaded(run.saved())  # without the outer step's state
    assert torch.equal(run.steps(ALL).weights(), other.steps(ALL).weights())


def test_replicas_that_differ_with_shared_gradients_are_refused() -> None:
    for settings in (
        {"spread": 0.3},
        {"spread": 0.3, "search": hdet.AutoLR, "controller": "probe"},
    ):
        with pytest.raises(ValueError, match=r"knobs=\[hdet.LearningRate\(spread=0\)\]"):
            Run(replicas=hdet.Replicas(0, 2), converge=OUTER, **settings)
    Run(replicas=hdet.Replicas(0, 2), converge=OUTER, spread=0.3, search=hdet.AutoLR)
