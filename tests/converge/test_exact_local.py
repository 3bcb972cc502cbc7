"""ExactLocal: the mean without communication, for what has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from hdet.converge import Compressed, ExactLocal, Overlapped, Plain, Streaming
from hdet.kernels.spec.interface import DECOUPLED
from hdet.replicas import Replicas

from ..distributed import run_ranks
from .helpers import account, task

SPREAD = {2: [0.7, 1.3], 4: [0.7, 0.9, 1.1, 1.3]}


def make(
    name: str, start: torch.Tensor, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(start.to(dtype, copy=True))
    decay = (
        {"weight_decay": 0.1, "decay_at": "base"}
        if getattr(hdet, name).rule in DECOUPLED
        else {"weight_decay": 0.0}
    )
    if name == "FusedSGD":
        decay["momentum"] = 0.9
    return parameter, getattr(hdet, name)([parameter], lr=1e-2, **{**decay, **settings})


def train(
    rank: int,
    world: int,
    name: str,
    way: Any,
    dtype: torch.dtype,
    settings: dict[str, Any],
    cycles: int = 4,
) -> Any:
    """The same gradients everywhere, each replica at its own rate; returns parameters after each cycle, and what was sent."""
    start = torch.randn(513, generator=torch.Generator().manual_seed(5))
    parameter, optimizer = make(name, start, dtype, **settings)
    made = way.build(task([parameter], optimizer=optimizer, masters=None))
    rows = [[rho] for rho in (SPREAD[world][rank], 1.0)]
    optimizer.multipliers[:] = rows[: 1 + made.companions]
    generator, found, sent_in, means = torch.Generator().manual_seed(7), [], [], []
    for _ in range(cycles):
        for _ in range(5):
            parameter.grad = torch.randn(513, generator=generator).to(dtype) + 0.1 * start.to(dtype)
            optimizer.step()
            if made.mean() is not None:
                means.append(made.mean()[0].clone())
        master = optimizer.masters([parameter], 0)[0]
        apart = (
            (parameter if master is None or master.dtype == torch.int16 else master)
            .detach()
            .clone()
        )
        with account() as sent:
            notes = made.end_cycle([1 / world] * world)
        assert notes == [] and made.idle, notes
        master = optimizer.masters([parameter], 0)[0]
        found.append(
            (apart, parameter.detach().clone(), None if master is None else master.clone())
        )
        sent_in.append(sum(b for _, b in sent))
        mean = made.mean()
        assert mean is None or torch.equal(mean[0], parameter)
    return found, sent_in, means


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["FusedAdamW", "FusedAdam", "FusedSGD", "FusedLion"])
def test_it_is_the_plain_average_and_bitwise_equal_on_all_ranks(name: str, world: int) -> None:
    local = run_ranks(train, world, name, ExactLocal(check_every=2), torch.float32, {})
    plain = run_ranks(train, world, name, Plain(), torch.float32, {})
    for cycle in range(4):
        _, own, _ = local[0][0][cycle]
        assert all(torch.equal(local[r][0][cycle][1], own) for r in range(world))
        assert not torch.equal(local[0][0][cycle][0], local[1][0][cycle][0]), (
            "replicas have parted in the cycle"
        )
        expected = plain[0][0][cycle][1]
        # fp32 rounding of 20 steps on numbers of order 1. Lion's step is a sign: an ulp more or less does not change it.
        assert torch.allclose(own, expected, rtol=1e-6, atol=2e-6)
        if cycle == 0:
            mean = sum(local[r][0][0][0].double() for r in range(world)) / world
            assert torch.allclose(own.double(), mean, rtol=1e-6, atol=5e-7)
    # Compared in the first cycle and every second one after it: two numbers a replica, nothing else.
    check = 2 * (world - 1) / world * 2 * 8 * world
    assert local[0][1] == [check, 0, check, 0]
    # At every step the mean is known, and the same everywhere.
    assert (
        all(
            torch.equal(a, b)
            for r in range(1, world)
            for a, b in zip(local[r][2], local[0][2], strict=True)
        )
        and len(local[0][2]) == 20
    )


@pytest.mark.parametrize("masters", ["fp32", "split"])
def test_masters_are_copied_too(masters: str) -> None:
    ranks = run_ranks(
        train, 2, "FusedAdamW", ExactLocal(), torch.bfloat16, {"master_weights": masters}
    )
    for cycle in range(4):
        (_, p0, m0), (_, p1, m1) = ranks[0][0][cycle], ranks[1][0][cycle]
        assert (
            torch.equal(p0, p1)
            and torch.equal(m0, m1)
            and m0.dtype == (torch.float32 if masters == "fp32" else torch.int16)
        )


def falls_back(rank: int, world: int) -> Any:
    parameter, optimizer = make("FusedAdamW", torch.ones(40))
    made: Any = ExactLocal(check_every=3).build(task([parameter], optimizer=optimizer))
    optimizer.multipliers[:] = [[SPREAD[world][rank]], [1.0]]
    report = []

    def cycle(weights: list[float]) -> None:
        parameter.grad = torch.full((40,), 0.5)
        optimizer.step()
        notes = made.end_cycle(weights)
        optimizer.state_dict()
        agree = torch.equal(parameter, made.mean()[0]) and torch.equal(
            parameter, optimizer.replica_parameters(1)[0]
        )
        report.append((notes, parameter.detach().clone(), agree))

    with torch.no_grad():
        parameter += 0.5 * rank  # a noisy start: replicas are not equal before the first average
    cycle([0.5, 0.5])
    cycle([0.25, 0.75])
    with torch.no_grad():
        if rank == 1:
            parameter[3] = torch.nan
    cycle([1.0, 0.0])
    cycle([0.5, 0.5])
    cycle([0.5, 0.5])
    parameter.grad = torch.full((40,), 0.5)
    optimizer.step()
    with torch.no_grad():
        if rank == 1:
            optimizer.replica_parameters(1)[0][7] += 2.0**-20  # a flipped bit somewhere
    notes = made.end_cycle([0.5, 0.5])
    report.append((notes, parameter.detach().clone(), True))
    return report


def test_what_the_mean_track_does_not_know_is_averaged_plainly() -> None:
    ranks = run_ranks(falls_back, 2)
    notes = [cycle[0] for cycle in ranks[0]]
    assert notes == [
        ["averaged plainly: the mean tracks of the replicas differ"],
        ["averaged plainly: the replicas' weights are not uniform"],
        ["averaged plainly: the replicas' weights are not uniform"],
        [],
        [],
        ["averaged plainly: the mean tracks of the replicas differ"],
    ]
    for cycle in range(6):
        (_, a, follows), (_, b, _) = ranks[0][cycle], ranks[1][cycle]
        assert torch.equal(a, b) and a.isfinite().all() and follows
    assert abs(float(ranks[0][0][1][0]) - 1.25) < 0.02, (
        "the mean of 1 and 1.5, a step of 0.01 further"
    )


def writes_between(rank: int, world: int) -> Any:
    parameter, optimizer = make("FusedAdamW", torch.zeros(8))
    made = ExactLocal(check_every=100).build(task([parameter], optimizer=optimizer))
    with torch.no_grad():
        parameter.fill_(3.0)  # a model loaded after the optimizer was made
    first = made.mean()[0].clone()  # type: ignore[index]
    assert torch.equal(optimizer.state_dict()["state"][0]["replica_params"][0], parameter), (
        "nor does a state have an old one"
    )
    optimizer.multipliers[:] = [[SPREAD[world][rank]], [1.0]]
    parameter.grad = torch.ones(8)
    optimizer.step()
    in_cycle = made.mean()[0].clone()  # type: ignore[index]
    saved = optimizer.state_dict()
    other, other_optimizer = make("FusedAdamW", parameter.detach())
    other_made = ExactLocal(check_every=100).build(task([other], optimizer=other_optimizer))
    other_optimizer.load_state_dict(saved)
    resumed = other_made.mean()[0].clone()  # type: ignore[index]
    made.complete([0.5, 0.5])
    return first, in_cycle, resumed, parameter.detach().clone(), made.mean()[0].clone()  # type: ignore[index]


def test_the_mean_follows_the_model_until_it_steps_and_is_in_the_optimizers_state() -> None:
    ranks = run_ranks(writes_between, 2)
    for first, in_cycle, resumed, parameter, mean in ranks:
        assert bool((first == 3.0).all()) and torch.equal(resumed, in_cycle)
        assert (
            torch.equal(in_cycle, ranks[0][1])
            and torch.equal(parameter, ranks[0][3])
            and torch.equal(parameter, mean)
        )


def parameter(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, dtype=dtype))]


def stepping_three() -> hdet.FusedAdamW:
    optimizer = hdet.FusedAdamW(parameter(), lr=0.1, decay_at="base")
    optimizer.set_replicas(3, lambda p: [p, p.detach().clone(), p.detach().clone()])
    return optimizer


@pytest.mark.parametrize(("optimizer", "changes", "message"), [
    (torch.optim.SGD(parameter(), lr=0.1), {},
        "ExactLocal needs one of hdet's fused optimizers.*got SGD"),
    (hdet.FusedAdamW(parameter(), lr=0.1), {},
        "weight_decay=0.01 of group 0 acts at each replica's own rate.*decay_at='base'"),
    (hdet.FusedSGD(parameter(), lr=0.1, weight_decay=0.1), {},
        "weight_decay=0.1 of group 0 is part of the gradient"),
    (hdet.FusedSGD(parameter(torch.bfloat16), lr=0.1), {},
        "parameter 0 of group 0 is torch.bfloat16 without a master"),
    (hdet.FusedSGD(parameter(), lr=0.1), {"gradients": "local"}, "gradients='shared'"),
    (hdet.FusedSGD(parameter(), lr=0.1), {"buffers": [torch.zeros(3)]},
        "tensor 1 is not the optimizer's.*buffers"),
    (stepping_three(), {}, "steps 3 replicas already"),
])  # fmt: skip
def test_what_has_no_mean_of_its_own_is_refused(
    optimizer: Any, changes: dict[str, Any], message: str
) -> None:
    before = getattr(optimizer, "num_replicas", 1), registered(optimizer)
    tensors = [*optimizer.param_groups[0]["params"], *changes.pop("buffers", ())]
    with pytest.raises((ValueError, TypeError), match=message):
        ExactLocal().build(task(tensors, optimizer=optimizer, replicas=Replicas(0, 2), **changes))
    assert before == (getattr(optimizer, "num_replicas", 1), registered(optimizer)), (
        "nothing is left on a refused optimizer"
    )


def registered(optimizer: torch.optim.Optimizer) -> int:
    """Hooks of an instance, of all kinds."""
    return sum(
        len(hooks)
        for name, hooks in vars(optimizer).items()
        if name.startswith("_optimizer_") and name.endswith("_hooks")
    )


WAYS = [ExactLocal(), Compressed("int8", block=16), Overlapped(1), Streaming(2)]


def used_and_closed(rank: int, world: int) -> list[Any]:
    """Of each way: hooks before, under and after an Ensemble, what is left on the optimizer, and where another Ensemble takes it."""
    found = []
    for way in WAYS:
        parameter = torch.nn.Parameter(torch.zeros(8))
        optimizer = hdet.FusedSGD([parameter], lr=0.1, momentum=0.9)

        def step(ensemble: hdet.Ensemble) -> None:
            parameter.grad = torch.ones(8)  # noqa: B023
            optimizer.step()  # noqa: B023
            ensemble.step(1.0)

        hooks = registered(optimizer)
        first = hdet.Ensemble(optimizer, sync=hdet.Sync(2, converge=way))
        for _ in range(3):  # in the second cycle, something is under way or kept back
            step(first)
        during = registered(optimizer)
        first.close()
        left = (
            registered(optimizer) - hooks, optimizer.num_replicas,
            sorted(optimizer.state[parameter]), list(optimizer.multipliers),
        )  # fmt: skip
        with torch.no_grad():
            parameter.fill_(float(rank))
        optimizer.load_state_dict(optimizer.state_dict())
        plain = hdet.Ensemble(optimizer, knobs=[hdet.LearningRate(0.0)], sync=hdet.Sync(1))
        first.close()  # once more, which is nothing to the other
        plain.converge()
        step(plain)
        found.append((during > hooks, left, plain.cycle, parameter.tolist()))
    return found


def test_a_closed_ensemble_leaves_the_optimizer_to_another() -> None:
    ranks = run_ranks(used_and_closed, 2)
    assert ranks[0] == ranks[1]
    for way, (hooked, left, cycle, values) in zip(WAYS, ranks[0], strict=True):
        assert hooked and left == (0, 1, ["momentum_buffer", "step"], [[1.0]]) and cycle == 1, way
        # the mean of 0 and 1, and a fourth step
        assert values == pytest.approx([0.5 - 0.1 * (1 + 0.9 + 0.81 + 0.729)] * 8, rel=1e-6), way
