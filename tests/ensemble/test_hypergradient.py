"""The hypergradient on real tensors: the products by hand, who has a vote, one replica, groups, co-resident and sharded sums, resume."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import hdet
from hdet.replicas import Replicas
from tests.distributed import run_ranks
from tests.harness import Run, batch, loss_of, model


def run(controller: Any = None, *, groups: bool = False, **settings: Any) -> Run:
    """Plain SGD at a constant rate."""

    def sgd(parameters: Any, **more: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        split: Any = [{"params": own[:2]}, {"params": own[2:]}] if groups else own
        return (hdet.FusedSGD if "together" in settings else torch.optim.SGD)(split, **more)

    defaults = {"lr": 1e-3, "every": 8, "total": 1000, "knobs": [hdet.LearningRate(0.3, groups="each" if groups else None)]}
    controller = controller or hdet.HypergradientController()
    return Run(optimizer=sgd, scheduler=None, controller=controller, **{**defaults, **settings})


def test_one_replica_is_enough_and_no_warning_says_otherwise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = run().steps(80)
    assert trained.ensemble.corrections["lr"] > 2
    assert trained.history["t"]["lr"] < -2 and trained.history["probe"] is None


def test_it_does_not_matter_when_gradients_are_zeroed() -> None:
    before, after = run().steps(40), run()
    for _ in range(40):
        after.step()
        after.optimizer.zero_grad()
    assert before.ensemble.corrections == after.ensemble.corrections != {"lr": 1.0}


def test_the_cosines_are_those_of_gradient_and_displacement() -> None:
    """Eight steps by hand; samples=2 looks before the sixth and the eighth."""
    controller = hdet.HypergradientController(samples=2)
    seen: list[list[list[float]]] = []
    cosines = controller.measurements["cosines"]
    split = cosines.split
    cosines.split = lambda rows: seen.append(split(rows)) or seen[-1]
    run(controller, groups=True).steps(8)
    net, expected = model(), {}
    begin = [p.detach().clone() for p in net.parameters()]
    for step in range(1, 9):
        net.zero_grad()
        loss_of(net, batch(100 * (step - 1))).backward()
        pairs = list(zip(net.parameters(), begin, strict=True))
        for k, own in enumerate((pairs[:2], pairs[2:])):
            g = torch.cat([p.grad.flatten() for p, _ in own if p.grad is not None])
            d = torch.cat([(p.detach() - b).flatten() for p, b in own])
            expected[k, step] = float(torch.nn.functional.cosine_similarity(g, d, dim=0))
        with torch.no_grad():
            for p in net.parameters():
                p -= 1e-3 * p.grad
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
                p.grad[...] = math.inf if step % 8 == 5 else 0.0
            before = [p.detach().clone() for p in net.parameters()]
        optimizer.step(closure) if closure else optimizer.step()
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
    trained = run(hdet.HypergradientController(freeze_after=16)).steps(33)
    assert trained.controller.idle and trained.history["slopes"]["lr"] is None
    assert trained.ensemble.corrections["lr"] > 1


def test_an_average_in_the_middle_of_a_cycle_begins_a_window_and_there_is_a_vote() -> None:
    trained = run(every=10)
    for _ in range(4):
        trained.steps(4).ensemble.converge()
        trained.steps(6)
        assert trained.history["t"]["lr"] is not None and trained.history["left_out"] == []


def test_a_run_resumes_exactly() -> None:
    straight, first = run(total=64), run(total=64).steps(24)
    second = run(total=64).loaded(first.saved()).steps(24)
    assert second.ensemble.corrections == straight.steps(48).ensemble.corrections != {"lr": 1.0}
    assert torch.equal(second.weights(), straight.weights())


def test_co_resident_replicas_share_one_vote() -> None:
    assert run(together=2, total=200).steps(80).ensemble.corrections["lr"] > 2


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
        hdet.HypergradientController(rule=object())
