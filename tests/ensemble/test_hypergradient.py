"""The hypergradient on real tensors: the products by hand, who has a vote, one replica, groups, co-resident and sharded sums, resume."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch

import hdet
from hdet.replicas import Replicas
from tests.distributed import run_ranks
from tests.ensemble.helpers import batch, loss_of, model


def trained(
    steps: int, *, lr: float = 1e-3, interval: int = 8, zero: str = "after", groups: bool = False, **settings: Any
) -> hdet.Ensemble:
    """A loop with one replica; ``zero``: is zero_grad called before or after the step?"""
    net = model()
    params: Any = [{"params": net[0].parameters()}, {"params": net[2].parameters()}] if groups else net.parameters()
    optimizer = torch.optim.SGD(params, lr=lr)
    knobs = [hdet.LearningRate(0.3, groups="each" if groups else None)]
    controller = settings.pop("controller", None) or hdet.HypergradientController(**settings)
    ensemble = hdet.Ensemble(optimizer, controller=controller, sync=hdet.Sync(interval), knobs=knobs, total_steps=1000)
    for step in range(steps):
        loss = loss_of(net, batch(step))
        if zero == "before":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()
        ensemble.step(loss)
    return ensemble


def test_one_replica_is_enough_and_no_warning_says_otherwise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble = trained(80)
    assert ensemble.corrections["lr"] > 2
    assert ensemble.history is not None and ensemble.history["t"]["lr"] < -2 and ensemble.history["probe"] is None


def test_it_does_not_matter_when_gradients_are_zeroed() -> None:
    before, after = trained(40, zero="before"), trained(40, zero="after")
    assert before.corrections == after.corrections != {"lr": 1.0}


def test_the_cosines_are_those_of_gradient_and_displacement() -> None:
    """Eight steps by hand; samples=2 looks before the sixth and the eighth."""
    controller = hdet.HypergradientController(samples=2)
    seen: list[list[list[float]]] = []
    cosines = controller.measurements["cosines"]
    split = cosines.split
    cosines.split = lambda rows: seen.append(split(rows)) or seen[-1]  # type: ignore[func-returns-value]
    trained(8, controller=controller, groups=True)
    net, expected = model(), {}
    begin = [p.detach().clone() for p in net.parameters()]
    for step in range(1, 9):
        net.zero_grad()
        loss_of(net, batch(step - 1)).backward()
        pairs = list(zip(net.parameters(), begin, strict=True))
        for k, own in enumerate((pairs[:2], pairs[2:])):
            g = torch.cat([p.grad.flatten() for p, _ in own if p.grad is not None])
            d = torch.cat([(p.detach() - b).flatten() for p, b in own])
            expected[k, step] = float(torch.nn.functional.cosine_similarity(g, d, dim=0))
        with torch.no_grad():
            for p in net.parameters():
                p -= 1e-3 * p.grad  # type: ignore[operator]
    assert seen[0][0] == pytest.approx([expected[0, 6], expected[0, 8], expected[1, 6], expected[1, 8]], rel=1e-4)


@pytest.mark.parametrize("what", ["nothing", "closure", "infinite"])
def test_without_finite_gradients_there_is_no_vote(what: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    ensemble = hdet.Ensemble(optimizer, controller=hdet.HypergradientController(), sync=hdet.Sync(8), total_steps=100)
    for step in range(24):
        loss = loss_of(net, batch(step))
        closure = None
        if what == "closure":
            closure = lambda loss=loss: loss.backward(retain_graph=True) or loss
        elif what == "infinite":
            loss.backward()
            for p in net.parameters():
                p.grad[...] = math.inf if step % 8 == 5 else 0.0  # type: ignore[index]
            before = [p.detach().clone() for p in net.parameters()]
        optimizer.step(closure) if closure else optimizer.step()  # type: ignore[arg-type]
        if what == "infinite":
            with torch.no_grad():
                for p, b in zip(net.parameters(), before, strict=True):
                    p.copy_(b)
        ensemble.step(loss.detach())
    assert ensemble.corrections == {"lr": 1.0}
    assert ensemble.history is not None and ensemble.history["slopes"]["lr"] is None
    assert any("no gradients" in note for note in ensemble.history["notes"])


def test_knobs_that_are_no_rates_are_refused_by_name() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="'eps' is no learning rate"):
        hdet.Ensemble(optimizer, knobs=[hdet.LearningRate(), hdet.Eps()], controller=hdet.HypergradientController(), total_steps=100)


def test_looks_rest_when_it_is_idle() -> None:
    ensemble = trained(33, freeze_after=16)
    assert ensemble.engine.controller is not None and ensemble.engine.controller.idle
    assert ensemble.history is not None and ensemble.history["slopes"]["lr"] is None
    assert ensemble.corrections["lr"] > 1


def test_an_average_in_the_middle_of_a_cycle_begins_a_window_and_there_is_a_vote() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, controller=hdet.HypergradientController(), sync=hdet.Sync(10), total_steps=1000)
    for step in range(40):
        loss = loss_of(net, batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss.detach())
        if step % 10 == 3:
            ensemble.converge()
        if step % 10 == 9:
            assert ensemble.history is not None and ensemble.history["t"]["lr"] is not None and ensemble.history["left_out"] == []


def test_a_run_resumes_exactly() -> None:
    def build() -> tuple[Any, Any, hdet.Ensemble]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        return net, optimizer, hdet.Ensemble(optimizer, controller=hdet.HypergradientController(), sync=hdet.Sync(8), total_steps=64)

    def steps(net: Any, optimizer: Any, ensemble: hdet.Ensemble, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            loss = loss_of(net, batch(step))
            loss.backward()
            optimizer.step()
            ensemble.step(loss)

    straight, first, second = build(), build(), build()
    steps(*straight, range(48))
    steps(*first, range(24))
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    second[2].load_state_dict(first[2].state_dict())
    steps(*second, range(24, 48))
    assert second[2].corrections == straight[2].corrections != {"lr": 1.0}
    assert all(torch.equal(a, b) for a, b in zip(second[0].parameters(), straight[0].parameters(), strict=True))


def test_co_resident_replicas_share_one_vote() -> None:
    net = model()
    optimizer = hdet.FusedSGD(net.parameters(), lr=1e-3)
    replicas = hdet.CoresidentReplicas(net, 2)
    ensemble = hdet.Ensemble(optimizer, replicas=replicas, controller=hdet.HypergradientController(), sync=hdet.Sync(8), total_steps=200)
    for step in range(80):
        for k in range(2):
            with replicas.use(k):
                loss = loss_of(net, batch(2 * step + k))
                ensemble.observe(loss)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step()
    assert ensemble.corrections["lr"] > 2


def _correction(own: slice, replicas: Replicas) -> float:
    """Of a run on some elements of ten; gradients are the same in all replicas."""
    torch.manual_seed(0)
    p, target = torch.nn.Parameter(torch.randn(10)[own].clone()), torch.randn(10)[own]
    ensemble = hdet.Ensemble(
        optimizer := torch.optim.SGD([p], lr=1e-3), replicas=replicas, controller=hdet.HypergradientController(),
        knobs=[hdet.LearningRate(0.0)], sync=hdet.Sync(8), total_steps=100,
    )  # fmt: skip
    for step in range(40):
        p.grad = p.detach() - target + 0.3 * torch.randn(10, generator=torch.Generator().manual_seed(step))[own]
        optimizer.step()
        ensemble.step(torch.tensor(1.0))
    return ensemble.corrections["lr"]


def _shards(rank: int, world_size: int) -> tuple[float, float]:
    half = slice(5 * (rank % 2), 5 * (rank % 2) + 5)
    return _correction(slice(0, 10), Replicas.single()), _correction(half, Replicas.from_group([[0, 1], [2, 3]]))


def test_shards_of_a_replica_add_up() -> None:
    """Two replicas of two ranks with half of the elements each, and a spread of 0: what one process with all elements decides."""
    for whole, shards in run_ranks(_shards, 4):
        assert shards == pytest.approx(whole, rel=1e-4) and whole > 1.2


@pytest.mark.parametrize("samples", [1, 0, True, 2.5])
def test_settings_are_validated(samples: Any) -> None:
    with pytest.raises(ValueError, match="samples"):
        hdet.HypergradientController(samples)
    with pytest.raises(ValueError, match="freeze_after"):
        hdet.HypergradientController(rule=hdet.HypergradientRule(), freeze_after=0.5)
    with pytest.raises(TypeError, match="rule"):
        hdet.HypergradientController(rule=object())  # type: ignore[arg-type]
