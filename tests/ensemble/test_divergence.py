"""A replica that diverged is left out; a cycle that diverged as a whole is taken back; and what else a cycle looks after."""

from __future__ import annotations

import math
import statistics
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from hdet.run.moments import Moments
from hdet.run.snapshot import Snapshot, keeps_weights
from tests.harness import Run, batch, loss_of, model, policies

from ..distributed import RankError, run_ranks

# -- taken back ----------------------------------------------------------------------------------------------------------------


def explosion(rank: int, world: int, place: str, fused: bool, local: bool) -> Any:
    """From the third cycle on the rate is absurd: the loss explodes for everybody, until the base value has come down."""
    settings = {"gradients": "local", "moments": "keep"} if local else {}
    run = Run(
        rank, every=4, total=400, lr=1e-3, optimizer=hdet.FusedAdamW if fused else torch.optim.AdamW,
        divergence=hdet.Divergence(rollback=place, lower=0.1), **settings,
    )  # fmt: skip
    if local:
        run.wrapped = run.net
    run.steps(8)
    before, level = run.weights(), run.ensemble.engine.level
    moment = run.optimizer.state[next(run.net.parameters())]["exp_avg"].clone()
    for group in run.optimizer.param_groups:
        group["max_lr"] = group["initial_lr"] = 1000.0  # OneCycleLR reads it
    run.steps(4)
    first = run.ensemble.history
    assert first is not None
    out = [first["rolled_back"], first["rollbacks"], torch.equal(run.weights(), before)]
    out.append(torch.equal(run.optimizer.state[next(run.net.parameters())]["exp_avg"], moment))
    values = run.ensemble.corrections["lr"]
    while run.ensemble.history["rolled_back"] and run.index < 80:
        run.steps(4)
    last = run.ensemble.history
    return out, values, level, run.weights(), last["rollbacks"], last["losses"], run.ensemble.engine.rollbacks_in_row


@pytest.mark.parametrize(("place", "fused", "local"), [("device", False, False), ("host", True, False), ("device", False, True)])
def test_a_cycle_that_diverged_as_a_whole_is_taken_back_with_a_lower_base_value(place: str, fused: bool, local: bool) -> None:
    ranks = run_ranks(explosion, 2, place, fused, local)
    for out, correction, level, weights, rollbacks, losses, in_row in ranks:
        assert out[:2] == [True, 1] and out[3], "state as before the cycle"
        assert out[2], "and parameters"
        assert correction == pytest.approx(0.1)
        assert 2 <= rollbacks <= 8 and in_row == 0
        assert weights.isfinite().all() and torch.equal(weights, ranks[0][3])
        assert statistics.median(losses) < 2 * level


def test_attempts_are_bounded() -> None:
    run = Run(0, every=2, total=100, divergence=hdet.Divergence(rollback="device", attempts=3))
    run.steps(2)
    with pytest.raises(hdet.ReplicasDiverged, match="3 cycles in a row"):
        for _ in range(20):
            run.step(report=math.nan)
    assert run.ensemble.engine.rollbacks == 3


def test_a_cycle_that_was_accepted_in_ruins_is_taken_back_too() -> None:
    """The first cycle explodes in its last step only, too late for its mean loss: its end is no place to go back to."""
    run = Run(0, every=4, total=400, lr=1e-3, divergence=hdet.Divergence(rollback="device", lower=0.1))
    run.steps(4)
    before = run.weights()
    run.steps(3)
    with torch.no_grad():
        for p in run.net.parameters():
            p.mul_(1e4)
    run.step(report=5.0)
    assert run.ensemble.history is not None and not run.ensemble.history["rolled_back"]
    run.steps(8)
    assert run.ensemble.engine.rollbacks_in_row == 2 and run.weights().abs().max() > 100, "twice back to the ruins"
    run.steps(4)
    assert run.ensemble.engine.rollbacks_in_row == 3 and torch.equal(run.weights(), before)
    run.steps(4)
    assert run.ensemble.engine.rollbacks_in_row == 0


def test_what_was_before_a_load_is_no_place_to_go_back_to() -> None:
    run = Run(0, every=2, total=100, divergence=hdet.Divergence(rollback="device"))
    run.steps(6)
    state = run.ensemble.state_dict()
    with torch.no_grad():
        for p in run.net.parameters():
            p.fill_(0.5)
    run.ensemble.load_state_dict(state)
    for _ in range(6):
        run.step(report=math.nan)
    assert run.ensemble.engine.rollbacks_in_row == 3 and run.weights().unique().tolist() == [0.5]


def test_counts_and_level_are_part_of_the_state() -> None:
    run = Run(0, every=2, total=100, divergence=hdet.Divergence(rollback="device"))
    run.steps(2)
    run.step(report=math.nan)
    run.step(report=math.nan)
    state = run.ensemble.state_dict()
    other = Run(0, every=2, total=100, divergence=hdet.Divergence(rollback="device"))
    other.ensemble.load_state_dict(state)
    engine = other.ensemble.engine
    assert (engine.rollbacks, engine.rollbacks_in_row, engine.level) == (1, 1, run.ensemble.engine.level)
    assert other.ensemble.corrections == {"lr": 0.5}


def test_coresident_replicas_are_taken_back_too() -> None:
    """In the very first cycle: the other replicas' parameters did not exist before the first step and become the model's again."""
    run = Run(together=3, every=4, total=100, divergence=hdet.Divergence(rollback="device"))
    before = run.all_weights()
    for _ in range(4):
        run.step(report={k: math.nan for k in range(3)})
    assert run.ensemble.history is not None and run.ensemble.history["rolled_back"]
    # Restored and averaged: three equal numbers' mean may differ in the last bit.
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(run.all_weights(), before, strict=True))
    run.steps(4)
    assert not run.ensemble.history["rolled_back"] and not torch.equal(run.all_weights()[0], before[0])


@pytest.mark.parametrize("make", [torch.optim.AdamW, hdet.FusedAdamW])
def test_an_anchor_holds_parameters_and_state(make: Any) -> None:
    net = model().bfloat16()
    settings = {"master_weights": "fp32"} if make is hdet.FusedAdamW else {}
    optimizer = make(net.parameters(), lr=1e-2, **settings)

    def train(key: int) -> None:
        optimizer.zero_grad()
        loss_of(net, batch(key)).backward()
        optimizer.step()

    train(0)
    anchor = Snapshot(list(net.parameters()), optimizer, "host")
    anchor.take()
    train(1)
    expected = [p.clone() for p in net.parameters()]
    for key in (2, 3):
        train(key)
    anchor.restore()
    train(1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected, strict=True))


# -- moments under local gradients ---------------------------------------------------------------------------------------------


def test_moments_begin_anew_after_a_reset() -> None:
    """Counters too, so that bias correction fits; a master stays."""
    net = model().bfloat16()
    optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-2, master_weights="fp32")
    loss_of(net, batch(0)).backward()
    optimizer.step()
    master = optimizer.state[next(net.parameters())]["master_param"].clone()
    Moments("reset", optimizer, hdet.Replicas(0, 2), 1 << 20).reset()
    state = optimizer.state[next(net.parameters())]
    assert not state["exp_avg"].any() and not state["exp_avg_sq"].any() and state["step"] == 0
    assert torch.equal(state["master_param"], master)


STOCK = ["AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Rprop", "RMSprop", "ASGD", "Adafactor", "SGD"]


class Counting(torch.optim.SGD):
    """Keeps its counter as a number, as many optimizers from elsewhere do."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.data.add_(p.grad, alpha=-0.01 / self.state[p]["step"])


def trained(net: torch.nn.Module, optimizer: torch.optim.Optimizer, keys: Any) -> torch.Tensor:
    for key in keys:
        optimizer.zero_grad()
        loss_of(net, batch(key)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


ELSEWHERE = {"Counting": __name__, "AdamWScheduleFree": "schedulefree", "Prodigy": "prodigyopt", "DAdaptAdam": "dadaptation"}
"""What does not begin as zeros (weights beside the parameters), or is counted in a group."""


@pytest.mark.parametrize("name", [*STOCK, *ELSEWHERE])
def test_any_optimizer_begins_anew_and_goes_back(name: str) -> None:
    kind = getattr(torch.optim if name in STOCK else pytest.importorskip(ELSEWHERE[name], reason="a peer that is not installed"), name)

    def make(parameters: Any, lr: float) -> Any:
        made = kind(parameters, lr=lr)
        if keeps_weights(made):
            made.train()
        return made

    net, other = model(), model()
    optimizer = make(net.parameters(), lr=1e-2)
    anchors = [Snapshot(list(net.parameters()), optimizer, "device") for _ in range(2)]
    moments = Moments("reset", optimizer, hdet.Replicas(0, 2), 1 << 20)
    anchors[0].take()
    expected = trained(net, optimizer, range(3))
    anchors[1].take()
    later = trained(net, optimizer, range(3, 6))
    anchors[1].restore()
    assert torch.equal(trained(net, optimizer, range(3, 6)), later)
    anchors[0].restore()
    assert torch.equal(trained(net, optimizer, range(3)), expected), "to where there was no state yet"
    moments.reset()
    other.load_state_dict(net.state_dict())
    assert torch.equal(trained(net, optimizer, range(3)), trained(other, make(other.parameters(), lr=1e-2), range(3)))


def factored(rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 4)
    optimizer = torch.optim.Adafactor(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2, gradients="local", moments="average"))
    for i in range(2):
        loss = net(batch(10 * i + rank)[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    return [tensor for state in optimizer.state.values() for key, tensor in sorted(state.items()) if key != "step"]


def test_factored_moments_are_averaged_too() -> None:
    one, two = run_ranks(factored, 2)
    assert len(one) == 3 and all(torch.equal(a, b) and a.any() for a, b in zip(one, two, strict=True))


def after_a_step_of_rate_zero(rank: int, world: int) -> torch.Tensor:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(gradients="local", moments="average"))
    loss_of(net, batch(rank)).backward()
    optimizer.step()
    ensemble.converge()
    return optimizer.state[net[0].weight]["exp_avg"]


def test_moments_are_averaged_where_parameters_are_equal() -> None:
    one, two = run_ranks(after_a_step_of_rate_zero, 2)
    assert torch.equal(one, two)


def moments_of_different_shape(rank: int, world: int) -> None:
    """One replica's first layer never has a gradient."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2, gradients="local", moments="average"))
    for i in range(2):
        loss_of(net, batch(10 * i + rank)).backward()
        if rank == 1:
            net[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(1.0)


def test_moments_that_not_all_replicas_have_cannot_be_averaged() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(moments_of_different_shape, 2)
    assert str(error.value).count("moments='average' needs the same on all") == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradients": "local"}, "moments must be one of 'keep', 'average', 'reset'"),
        ({"gradients": "local", "moments": "halve"}, "got 'halve'"),
        ({"moments": "keep"}, "leave it out"),
        ({"gradients": "none"}, "gradients must be"),
        ({"converge": "plain"}, "way of averaging"),
        ({"divergence": 2.0}, "hdet.Divergence"),
        ({"tied": [torch.zeros(1)]}, r"tied\[0\]"),
        ({"tied": [(torch.zeros(1), None)]}, "none of the optimizer's parameters"),
        ({"tied": 5}, "tied must be a list"),
        ({"converge": hdet.converge.Plain}, "way of averaging"),
        ({"refresh": 3}, r"refresh\(\)"),
        ({"buffers": 5}, "buffers must be a module or a list of tensors, got 'int'"),
        ({"buffers": torch.zeros(2, 2)}, "got 'Tensor'"),
        ({"buffers": [1]}, r"got \[1\]"),
    ],
)
def test_settings_are_validated(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        hdet.Ensemble(torch.optim.AdamW(model().parameters()), **policies(**settings))


# -- gradients that are not what they are said to be ---------------------------------------------------------------------------


def undeclared(rank: int, world: int, gradients: str) -> list[str]:
    run = Run(rank, every=2, gradients=gradients, moments="keep" if gradients == "local" else None)
    if gradients == "shared":
        run.wrapped = run.net  # no DDP: nobody averages gradients
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step()
    return [str(w.message) for w in caught]


def by_closure(rank: int, world: int) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    ensemble = hdet.Ensemble(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, batch(rank))
        loss.backward()
        return loss

    ensemble.step(optimizer.step(closure))


def test_gradients_that_a_closure_makes_are_looked_at_too() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(by_closure, 2)
    assert str(error.value).count("differ between replicas (norms") == 2


def test_a_tied_group_must_be_one() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"tied\[0\] must be a process group that this rank is in, got -100"):
        hdet.Ensemble(torch.optim.SGD(net.parameters(), lr=0.1), sync=hdet.Sync(tied=[(net[0].weight, -100)]))


def test_gradients_that_differ_are_not_shared() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(undeclared, 2, "shared")
    assert str(error.value).count("differ between replicas (norms") == 2


def test_gradients_that_are_the_same_are_not_local() -> None:
    for messages in run_ranks(undeclared, 2, "local"):
        assert any("no_sync()" in message for message in messages)


# -- steps that move nothing -----------------------------------------------------------------------------------------------------


def phantom(rank: int, world: int) -> Any:
    run = Run(rank, every=3)
    run.steps(3)
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1]
    try:
        rates = [group["lr"] for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        run.optimizer.step()
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    finally:
        dist.all_reduce = real
    return len(calls), run.ensemble.in_sync, run.ensemble.engine.position, run.ensemble.cycle


def test_a_step_with_rate_zero_counts_nothing_and_parts_nobody() -> None:
    assert run_ranks(phantom, 2) == [(0, True, 0, 1)] * 2


# -- copies --------------------------------------------------------------------------------------------------------------------


def tied(rank: int, world: int) -> Any:
    """2 replicas of 2 stages, whose copies of one tensor have drifted by an ulp."""
    replica, stage = divmod(rank, 2)
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
    copies = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
    own, shared = torch.nn.Parameter(torch.full((3,), float(stage))), torch.nn.Parameter(torch.full((5,), 1.0 + stage * 2.0**-23))
    optimizer = torch.optim.SGD([own, shared], lr=0.1)
    written = []
    replicas = hdet.Replicas(replica, 2, peers, ranks=[[0, 1], [2, 3]], member=stage, world_group=dist.group.WORLD)
    ensemble = hdet.Ensemble(
        optimizer, replicas=replicas, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(2, tied=[(shared, copies)], refresh=lambda: written.append(1))
    )  # fmt: skip
    for _ in range(2):
        own.grad, shared.grad = torch.ones(3), torch.ones(5)
        optimizer.step()
        ensemble.step(None if stage == 0 else 2.0 + replica)  # only the last stage sees a loss
    assert ensemble.history is not None
    return own.detach(), shared.detach(), ensemble.history["losses"], len(written)


def test_tied_copies_are_made_equal_and_only_the_last_stage_needs_a_loss() -> None:
    ranks = run_ranks(tied, 4)
    for own, shared, losses, written in ranks:
        assert torch.equal(shared, ranks[0][1])
        assert losses == [2.0, 3.0] and written == 1
        assert torch.equal(own, ranks[0][0]) or torch.equal(own, ranks[1][0])
    assert torch.allclose(ranks[0][0], torch.full((3,), -0.2)) and torch.allclose(ranks[1][0], torch.full((3,), 0.8))


def tied_state(rank: int, world: int, masters: str | None, moments: str | None) -> list[torch.Tensor]:
    """Copies that lie at different places of a bucket, so that gloo adds them up in another order: 3 replicas of 2 stages."""
    replica, stage = divmod(rank, 2)
    peers = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])][stage]
    copies = [dist.new_group([2 * r, 2 * r + 1]) for r in range(3)][replica]
    generator = torch.Generator().manual_seed(replica if moments else 0)
    dtype = torch.bfloat16 if masters else torch.float32
    matrix = torch.ones(25, 40, dtype=dtype) if masters else torch.ones(40, 25).t()
    own, shared = torch.nn.Parameter(torch.ones(3 + 400 * stage, dtype=dtype)), torch.nn.Parameter(matrix)
    optimizer = hdet.FusedAdamW([own, shared], lr=0.1, master_weights=masters) if masters else torch.optim.AdamW([own, shared], lr=0.1)
    replicas = hdet.Replicas(replica, 3, peers, ranks=[[0, 1], [2, 3], [4, 5]], member=stage, world_group=dist.group.WORLD)
    ensemble = hdet.Ensemble(
        optimizer, replicas=replicas, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(2, tied=[(shared, copies)], gradients="local" if moments else "shared", moments=moments),
    )  # fmt: skip
    for _ in range(4):
        own.grad, shared.grad = torch.ones_like(own), torch.randn(25, 40, generator=generator).to(dtype)
        optimizer.step()
        ensemble.step(None if stage == 0 else 2.0)
    return [shared.detach(), *(value for value in optimizer.state[shared].values() if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize(("masters", "moments"), [(None, "average"), ("split", None)])
def test_tied_copies_are_equal_with_their_masters_and_averaged_moments(masters: str | None, moments: str | None) -> None:
    ranks = run_ranks(tied_state, 6, masters, moments)
    for rank in ranks:
        assert all(torch.equal(a, b) for a, b in zip(rank, ranks[0], strict=True))
