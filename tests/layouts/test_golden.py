"""Parameters after each cycle under fixed gradients, in each layout, against golden/*.json; and those against the equations (twin.py).

The files are of one machine: torch's kernels may round otherwise elsewhere, so a run must be near them, not equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.core import engine
from tests.distributed import run_ranks
from tests.harness import policies
from tests.layouts import twin
from tests.layouts.common import flat
from tests.reference import simulator

FOLDER = Path(__file__).parent / "golden"

Layout = tuple[nn.Module, dict[str, Any], Callable[[int], list[float]]]
"""The parameters, the Ensemble's settings, and the backward pass of a step: it gives the losses to observe."""


class Dot(nn.Module):
    """loss = gradient . theta, so the gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(twin.start(), dtype=torch.float64))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.theta @ gradient


def gradient(step: int, replica: int) -> torch.Tensor:
    return torch.tensor(twin.gradient(step, replica), dtype=torch.float64)


def ddp() -> Layout:
    net, rank = Dot(), dist.get_rank()
    wrapped = DDP(net)

    def backward(step: int) -> list[float]:
        wrapped(gradient(step, rank)).backward()
        return [twin.loss(step, rank)]

    return net, {}, backward


def on_two_ranks(net: Any, replicas: hdet.Replicas) -> Callable[[int], list[float]]:
    """A quarter and three quarters of the replica's gradient and loss on its ranks."""
    share = (0.5, 1.5)[replicas.member]

    def backward(step: int) -> list[float]:
        net(share * gradient(step, replicas.index)).backward()
        return [share * twin.loss(step, replicas.index)]

    return backward


def hsdp() -> Layout:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    replicas = hdet.Replicas.from_mesh(mesh, replicate="dp_replicate")
    net = fully_shard(Dot(), mesh=mesh)
    return net, {"replicas": replicas}, on_two_ranks(net, replicas)


def groups() -> Layout:
    replicas = hdet.Replicas.from_group([[0, 1], [2, 3]])
    net = Dot()
    return net, {"replicas": replicas}, on_two_ranks(DDP(net), replicas)


def tp_pp_dp() -> Layout:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    replicas = hdet.Replicas.from_layout(tp=2, pp=2)
    assert replicas.index == mesh.get_local_rank("dp")
    stage = mesh.get_local_rank("pp")
    own = slice(6 * stage, 6 * stage + 6)
    net = nn.Module()
    net.theta = nn.Parameter(distribute_tensor(Dot().theta.detach()[own], mesh["tp"], [Shard(0)]))

    def backward(step: int) -> list[float]:
        mean = (gradient(step, 0) + gradient(step, 1)) / 2
        net.theta.grad = distribute_tensor(mean[own], mesh["tp"], [Shard(0)])
        return [twin.loss(step, replicas.index)] if stage == 1 else []

    return net, {"replicas": replicas}, backward


def local() -> Layout:
    net, rank = Dot(), dist.get_rank()

    def backward(step: int) -> list[float]:
        net(gradient(step, rank)).backward()
        return [twin.loss(step, rank)]

    return net, {"gradients": "local", "moments": "average"}, backward


LAYOUTS = {"ddp": (2, ddp), "hsdp": (4, hsdp), "groups": (4, groups), "tp_pp_dp": (8, tp_pp_dp), "local": (2, local)}


def train(rank: int, world: int, name: str) -> dict[str, Any]:
    settings = twin.SETTINGS[name]
    net, options, backward = LAYOUTS[name][1]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, weight_decay=settings.weight_decay)
    controller = hdet.SoftmaxController(settings.sigma, settings.step_size, settings.momentum, settings.decay)
    rates, cycles = [], []
    with mock.patch.object(engine, "assignment", lambda seed, cycle, knob, count: simulator.order(settings, cycle)):
        ensemble = hdet.Ensemble(
            optimizer,
            OneCycleLR(optimizer, settings.peak, settings.steps, cycle_momentum=False),
            knobs=[hdet.LearningRate(settings.spread)],
            controller=controller if settings.controller else None,
            **policies(every=settings.interval, weights=settings.average, **options),
        )
        for step in range(settings.steps):
            optimizer.zero_grad()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            for loss in backward(step):
                ensemble.observe(loss)
            optimizer.step()
            ensemble.step()
            record = ensemble.history
            if record is not None and record["step"] == step + 1:
                cycles.append(
                    {
                        "step": step + 1,
                        "multipliers": record["multipliers"]["lr"],
                        "losses": record["losses"],
                        "correction": record["corrections"]["lr"],
                        "after": flat(net.parameters()).tolist(),
                    }
                )
    return {"rates": rates, "cycles": cycles}


def whole(name: str, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each replica's every rank, or pair of stages: the trajectory of all parameters."""
    if name != "tp_pp_dp":
        return ranks
    return [
        {**one, "cycles": [{**a, "after": a["after"] + b["after"]} for a, b in zip(one["cycles"], two["cycles"], strict=True)]}
        for one, two in zip(ranks[:4], ranks[4:], strict=True)  # the first stage has ranks 0 .. 3
    ]


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    name = request.param
    runs = whole(name, run_ranks(train, LAYOUTS[name][0], name))
    if request.config.getoption("--write-golden", default=False):
        cycles = ",\n".join(json.dumps(cycle) for cycle in runs[0]["cycles"])
        (FOLDER / f"{name}.json").write_text(f'{{"rates": {json.dumps(runs[0]["rates"])},\n"cycles": [\n{cycles}\n]}}\n', encoding="utf-8")
    return name, runs


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def compare(ours: dict[str, Any], golden: dict[str, Any]) -> None:
    """To 1e-6: float64 on both sides, so ten digits are to spare for what another machine's exp, sqrt and order of sums may do."""
    assert ours["rates"] == pytest.approx(golden["rates"], rel=1e-6)
    assert len(ours["cycles"]) == len(golden["cycles"])
    for cycle, expected in zip(ours["cycles"], golden["cycles"], strict=True):
        assert cycle["step"] == expected["step"]
        for key in ("multipliers", "losses", "correction", "after"):
            assert cycle[key] == pytest.approx(expected[key], rel=1e-6), key


def test_every_rank_follows_the_golden_trajectory(run: tuple[str, list[dict[str, Any]]]) -> None:
    name, ranks = run
    golden = read(name)
    for rank in ranks:
        compare(rank, golden)
        assert [cycle["after"] for cycle in rank["cycles"]] == [cycle["after"] for cycle in ranks[0]["cycles"]], "equal to the bit"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_golden_trajectory_is_what_the_equations_give(name: str) -> None:
    """So that the files are not hdet's word for its own."""
    golden = read(name)
    compare(golden, twin.trajectory(name))
    assert all(len(cycle["after"]) == twin.SIZE for cycle in golden["cycles"])
    if twin.SETTINGS[name].controller:
        assert golden["rates"][-1] != pytest.approx(twin.trajectory("groups")["rates"][-1], rel=1e-3), "the controller has moved something"
