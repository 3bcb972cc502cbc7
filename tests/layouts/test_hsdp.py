"""Two replicas of two ranks each under fully_shard on a 2 x 2 mesh, averaged shard by shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import hdet
from tests.distributed import run_ranks
from tests.layouts.common import (
    DECAY,
    INTERVAL,
    RATE,
    Trace,
    batch,
    check,
    loss_of,
    model,
    parts_and_meets,
    train,
)  # fmt: skip

STEPS = 6
WAYS = [
    "float64", "bf16", "offload", "probe", "evaluated", "evaluated, module known", "fused",
    "schedule-free",
]  # fmt: skip
OPTIMIZERS = {"fused": hdet.FusedAdamW, "schedule-free": hdet.FusedScheduleFreeAdamW}
PROBES = [batch(1000 + i, 0) for i in range(4)]


def sharded(mesh: DeviceMesh, way: str) -> Any:
    net = model().float() if way in ("bf16", *OPTIMIZERS) else model()
    settings: dict[str, Any] = {"mesh": mesh}
    if way == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if way == "offload":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(net[0], **settings)
    # the root's own parameters, net[2], stay unsharded after a forward without backward
    return fully_shard(net, **settings)


def run(rank: int, way: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    net = sharded(mesh, way)
    parameters = list(net.parameters())  # shards; while a module is gathered it shows others
    dtype = parameters[0].dtype

    def forward(x: torch.Tensor) -> torch.Tensor:
        return net(x.to(dtype)).double()

    def backward(step: int, observe: Any) -> None:
        loss = loss_of(forward, batch(step, rank))
        loss.backward()
        observe(loss)

    @torch.no_grad()
    def evaluate(step: int) -> None:
        """Gathers the root's parameters as they are now, and leaves them so."""
        if "evaluated" in way or way == "probe":
            forward(batch(step, 0)[0])

    make = OPTIMIZERS.get(way, torch.optim.AdamW)
    own: dict[str, Any] = {}
    if way == "probe":  # this rule looks and never decides: t is cut at 1000
        rule = {"dead": 1e4, "average_every": 1}
        own["controller"] = hdet.ProbeController(loss_of, PROBES, chunks=4, model=net, **rule)
    if way == "evaluated":
        own["refresh"] = lambda: [module.reshard() for module in (net[0], net)]
    if way == "evaluated, module known":
        own["buffers"] = net
    own["replicas"] = hdet.Replicas.from_mesh(mesh, replicate="dp_replicate")
    optimizer = make(parameters, lr=RATE, weight_decay=DECAY)
    trace = train(parameters, optimizer, backward, STEPS, evaluate, total_steps=STEPS, **own)
    kept = {tuple(p.to_local().shape) for p in parameters}
    z = [state["z"].to_local() for state in optimizer.state.values() if "z" in state]
    dtypes = {p.to_local().dtype for p in parameters}
    return {"trace": trace, "shards": kept, "dtypes": dtypes, "z": z}


def train_all(rank: int, world: int) -> dict[str, Any]:
    return {way: run(rank, way) for way in WAYS}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_ranks(train_all, 4)


def traces(runs: list[dict[str, Any]], way: str) -> list[Trace]:
    return [run[way]["trace"] for run in runs]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("bf16", *OPTIMIZERS)])
def test_equals_the_training_by_hand(runs: list[dict[str, Any]], way: str) -> None:
    """With both ranks' batches on each replica, whose shards' losses add up."""
    assert all((4, 6) in run[way]["shards"] for run in runs), "the 8 x 6 matrix is in halves"
    check(traces(runs, way), shards=2)


def test_the_fused_optimizer_steps_and_averages_shards(runs: list[dict[str, Any]]) -> None:
    """In float32: the gradients' last bits, and Adam's quotient of two of them, against float64."""
    check(traces(runs, "fused"), shards=2, close={"rtol": 1e-4, "atol": 1e-5}, loss=1e-4)


def test_shards_of_schedule_frees_z_are_averaged(runs: list[dict[str, Any]]) -> None:
    first, second, *others = [run["schedule-free"]["z"] for run in runs]
    assert all(map(torch.equal, first, others[0])) and all(map(torch.equal, second, others[1]))
    assert len(first) > 1 and not torch.equal(first[0], second[0])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_stay_shared_and_parameters_part_and_meet(runs: Any, way: str) -> None:
    parts_and_meets(traces(runs, way), inside=2)


def test_masters_stay_in_float32_under_mixed_precision(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["bf16"]["dtypes"] == {torch.float32}
    after = runs[0]["bf16"]["trace"].weights(INTERVAL - 1)
    assert not torch.equal(after, after.bfloat16().float())  # the average has more bits
    # Losses were computed from inputs and weights of 8 bits.
    exact, rounded = (traces(runs, way)[0].records[0]["losses"] for way in ("float64", "bf16"))
    assert rounded == pytest.approx(exact, rel=0.02)


def test_a_probe_scores_the_cycle_average_and_leaves_no_trace(runs: list[dict[str, Any]]) -> None:
    """After an evaluation the root's parameters stay gathered, as they were then."""
    plain, probed = (traces(runs, way)[0] for way in ("float64", "probe"))
    assert all(torch.equal(plain.weights(i), probed.weights(i)) for i in range(STEPS))
    hand, net = check([probed], shards=2), model()
    for cycle, record in enumerate(probed.records):
        for replica, score in enumerate(record["probe"]):
            steps = hand.weights[cycle * INTERVAL : (cycle + 1) * INTERVAL]
            mean = torch.stack([weights[replica] for weights in steps]).mean(0)
            torch.nn.utils.vector_to_parameters(mean, net.parameters())
            expected = sum(loss_of(net, data).item() for data in PROBES) / len(PROBES)
            assert score == pytest.approx(expected, rel=1e-6)  # weighted in float32
