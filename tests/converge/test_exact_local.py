"""ExactLocal: the mean without communication, for what has one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import hdet
from benchmarks.harness import counted
from hdet.converge import Compressed, ExactLocal, Plain
from hdet.replicas import Replicas
from hdet.replicas.topology import WIDTH
from hdet.rules import DECOUPLED

from ..distributed import run_ranks
from ..harness import TwoReplicas, model, probe
from .helpers import equal, task

SPREAD = {2: [0.7, 1.3], 4: [0.7, 0.9, 1.1, 1.3]}


def make(name: str, start: torch.Tensor, dtype: Any = torch.float32, **settings: Any) -> Any:
    parameter = torch.nn.Parameter(start.to(dtype, copy=True))
    decoupled = getattr(hdet, name).rule in DECOUPLED
    given = {"weight_decay": 0.1, "decay_at": "base"} if decoupled else {"weight_decay": 0.0}
    if name == "FusedSGD":
        given["momentum"] = 0.9
    return parameter, getattr(hdet, name)([parameter], lr=1e-2, **{**given, **settings})


def train(rank: int, world: int, name: str, way: Any, dtype: Any, **settings: Any) -> Any:
    """The same gradients everywhere, each replica at its own rate: parameters before and after each
    average, what was sent in it, and the mean at each step."""
    start = torch.randn(513, generator=torch.Generator().manual_seed(5))
    parameter, optimizer = make(name, start, dtype, **settings)
    made = way.build(task([parameter], optimizer=optimizer))
    rows = [[rho] for rho in (SPREAD[world][rank], 1.0)]
    optimizer.multipliers[:] = rows[: 1 + made.companions]
    generator, found, sent_in, means = torch.Generator().manual_seed(7), [], [], []

    def values() -> list[torch.Tensor]:
        masters = [m for m in optimizer.masters([parameter], 0) if m is not None]
        return [t.detach().clone() for t in (parameter, *masters)]

    for _ in range(4):
        for _ in range(5):
            parameter.grad = torch.randn(513, generator=generator).to(dtype) + 0.1 * start.to(dtype)
            optimizer.step()
            if made.mean() is not None:
                means.append(made.mean()[0].clone())
        apart = values()
        with counted() as sent:
            assert made.end_cycle([1 / world] * world) == [] and made.idle
        found.append((apart, values()))
        sent_in.append(sum(call.sent for call in sent))
        assert made.mean() is None or torch.equal(made.mean()[0], parameter)
    return found, sent_in, means


@pytest.mark.parametrize(("name", "world"), [
    ("FusedAdamW", 4), ("FusedAdam", 2), ("FusedSGD", 2), ("FusedLion", 2),
])  # fmt: skip
def test_it_is_the_plain_average_and_bitwise_equal_on_all_ranks(name: str, world: int) -> None:
    local = run_ranks(train, world, name, ExactLocal(check_every=2), torch.float32)
    plain = run_ranks(train, world, name, Plain(), torch.float32)
    for cycle in range(4):
        (own,) = local[0][0][cycle][1]
        assert all(torch.equal(rank[0][cycle][1][0], own) for rank in local)
        assert not equal(*(rank[0][cycle][0] for rank in local[:2])), "replicas part in the cycle"
        # fp32 rounding of 20 steps on numbers of order 1. Lion's step is a sign: an ulp more or
        # less does not change it.
        assert torch.allclose(own, plain[0][0][cycle][1][0], rtol=1e-6, atol=2e-6)
    mean = sum(rank[0][0][0][0].double() for rank in local) / world
    assert torch.allclose(local[0][0][0][1][0].double(), mean, rtol=1e-6, atol=5e-7)
    # Compared in the first cycle and every second one after it: a row of numbers a replica.
    check = 2 * (world - 1) / world * WIDTH * 8 * world
    assert local[0][1] == [check, 0, check, 0]
    # At every step the mean is known, and the same everywhere.
    assert all(equal(rank[2], local[0][2]) for rank in local) and len(local[0][2]) == 20


def masters_of(rank: int, world: int, masters: str) -> Any:
    return train(rank, world, "FusedAdamW", ExactLocal(), torch.bfloat16, master_weights=masters)


@pytest.mark.parametrize(("masters", "dtype"), [("fp32", torch.float32), ("split", torch.int16)])
def test_masters_are_copied_too(masters: str, dtype: torch.dtype) -> None:
    (one, _, _), (two, _, _) = run_ranks(masters_of, 2, masters)
    for (_, ours), (_, theirs) in zip(one, two, strict=True):
        assert equal(ours, theirs) and ours[1].dtype == dtype


def falls_back(rank: int, world: int) -> Any:
    parameter, optimizer = make("FusedAdamW", torch.ones(40))
    made: Any = ExactLocal(check_every=3).build(task([parameter], optimizer=optimizer))
    optimizer.multipliers[:] = [[SPREAD[world][rank]], [1.0]]
    report = []

    def cycle(*weights: float, flipped: float = 0.0) -> None:
        parameter.grad = torch.full((40,), 0.5)
        optimizer.step()
        if flipped:
            optimizer.replica_parameters(1)[0].data[7] += flipped
        notes = made.end_cycle(list(weights))
        if not flipped:
            optimizer.state_dict()
            assert equal([parameter] * 2, [made.mean()[0], optimizer.replica_parameters(1)[0]])
        report.append((notes, parameter.detach().clone()))

    with torch.no_grad():
        parameter += 0.5 * rank  # a noisy start: replicas are not equal before the first average
    cycle(0.5, 0.5)
    cycle(0.25, 0.75)
    with torch.no_grad():
        parameter[3] = torch.nan if rank == 1 else parameter[3]
    cycle(1.0, 0.0)
    cycle(0.5, 0.5)
    cycle(0.5, 0.5)
    cycle(0.5, 0.5, flipped=rank * 2.0**-20)  # a bit somewhere
    return report


def test_what_the_mean_track_does_not_know_is_averaged_plainly() -> None:
    one, two = run_ranks(falls_back, 2)
    differ = ["averaged plainly: the mean tracks of the replicas differ"]
    uneven = ["averaged plainly: the replicas' weights are not uniform"]
    assert [notes for notes, _ in one] == [differ, uneven, uneven, [], [], differ]
    for (_, a), (_, b) in zip(one, two, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
    # the mean of 1 and 1.5, a step of 0.01 further
    assert abs(float(one[0][1][0]) - 1.25) < 0.02


def writes_between(rank: int, world: int) -> Any:
    parameter, optimizer = make("FusedAdamW", torch.zeros(8))
    made: Any = ExactLocal(check_every=100).build(task([parameter], optimizer=optimizer))
    with torch.no_grad():
        parameter.fill_(3.0)  # a model loaded after the optimizer was made
    assert bool((made.mean()[0] == 3.0).all())
    # nor does a state have an old one
    assert torch.equal(optimizer.state_dict()["state"][0]["replica_params"][0], parameter)
    optimizer.multipliers[:] = [[SPREAD[world][rank]], [1.0]]
    parameter.grad = torch.ones(8)
    optimizer.step()
    in_cycle = made.mean()[0].clone()
    other, other_optimizer = make("FusedAdamW", parameter.detach())
    other_made: Any = ExactLocal(check_every=100).build(task([other], optimizer=other_optimizer))
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(other_made.mean()[0], in_cycle)
    made.complete([0.5, 0.5])
    assert torch.equal(made.mean()[0], parameter)
    return in_cycle, parameter.detach().clone()


def test_the_mean_follows_the_model_until_it_steps_and_is_in_the_optimizers_state() -> None:
    one, two = run_ranks(writes_between, 2)
    assert equal(one, two)


def parameter(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, dtype=dtype))]


@pytest.mark.parametrize(("optimizer", "changes", "message"), [
    (torch.optim.SGD(parameter(), lr=0.1), {}, "SGD does not step the mean.*or use Plain"),
    (hdet.FusedAdamW(parameter(), lr=0.1), {},
        "weight_decay=0.01 of group 0 acts at each replica's own rate.*decay_at='base'"),
    (hdet.FusedAdamW(parameter(), lr=0.1, decay_at="base", cautious_decay=True), {},
        "acts where each replica's own sign says: use cautious_decay=False"),
    (hdet.FusedSGD(parameter(), lr=0.1, weight_decay=0.1), {},
        "weight_decay=0.1 of group 0 is part of the gradient"),
    (hdet.FusedSGD(parameter(torch.bfloat16), lr=0.1), {},
        "parameter 0 of group 0 is torch.bfloat16 without a master"),
    (hdet.FusedSGD(parameter(), lr=0.1), {"gradients": "local"}, "gradients='shared'"),
    (hdet.FusedSGD(parameter(), lr=0.1), {"buffers": [torch.zeros(3)]},
        "tensor 1 is not the optimizer's.*buffers"),
])  # fmt: skip
def test_what_has_no_mean_of_its_own_is_refused(optimizer: Any, changes: Any, message: str) -> None:
    before, buffers = registered(optimizer), changes.pop("buffers", ())
    tensors = [*optimizer.param_groups[0]["params"], *buffers]
    with pytest.raises(ValueError, match=message):
        ExactLocal().build(task(tensors, optimizer=optimizer, replicas=Replicas(0, 2), **changes))
    assert before == registered(optimizer) and getattr(optimizer, "num_replicas", 1) == 1


def registered(optimizer: torch.optim.Optimizer) -> int:
    """Hooks of an instance, of all kinds."""
    found = [name for name in vars(optimizer) if re.fullmatch(r"_optimizer_\w+_hooks", name)]
    return sum(len(vars(optimizer)[name]) for name in found)


def test_a_run_that_is_refused_leaves_the_optimizer_as_it_is() -> None:
    """Also by a measurement, which sees the run late; this way keeps a second set in it."""
    optimizer = hdet.FusedAdamW(model().parameters(), weight_decay=0.0)
    settings: Any = {"replicas": TwoReplicas(), "sync": hdet.Sync(converge=ExactLocal())}
    with pytest.raises(ValueError, match="no parameter of this optimizer"):
        hdet.Ensemble(optimizer, controller=probe(model()), **settings)
    assert optimizer.num_replicas == 1 and "step" not in vars(optimizer)
    run = hdet.Ensemble(optimizer, **settings)
    assert optimizer.num_replicas == 2 and run.cycle == 0


WAYS = [ExactLocal(), Compressed("int8", block=16)]


def used_and_closed(rank: int, world: int) -> list[Any]:
    """Of each way: nothing is left on the optimizer; and where another Ensemble takes it."""
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
        for _ in range(3):  # in the second cycle, something is kept back
            step(first)
        assert registered(optimizer) > hooks, way
        first.close()
        assert registered(optimizer) == hooks and optimizer.num_replicas == 1, way
        assert sorted(optimizer.state[parameter]) == ["momentum_buffer", "step"], way
        assert list(optimizer.multipliers) == [[1.0]], way
        with torch.no_grad():
            parameter.fill_(float(rank))
        optimizer.load_state_dict(optimizer.state_dict())
        plain = hdet.Ensemble(optimizer, knobs=[hdet.LearningRate(0.0)], sync=hdet.Sync(1))
        first.close()  # once more, which is nothing to the other
        plain.converge()
        step(plain)
        found.append((plain.cycle, parameter.tolist()))
    return found


def test_a_closed_ensemble_leaves_the_optimizer_to_another() -> None:
    one, two = run_ranks(used_and_closed, 2)
    # the mean of 0 and 1, and a fourth step
    values = pytest.approx([0.5 - 0.1 * (1 + 0.9 + 0.81 + 0.729)] * 8, rel=1e-6)
    assert one == two == [(1, values)] * len(WAYS)
