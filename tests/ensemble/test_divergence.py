"""What is kept for a cycle that diverges, and moments. (In processes: tests/faults.)"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.run.moments import Moments
from tests.harness import Run, model

from ..distributed import run_ranks
from .helpers import TAKEN_BACK, all_reduces, filled, same, told, trained
from .test_beginning import OPTIMIZERS, dtype_of


def taken_back(every: int = 2, **settings: Any) -> Run:
    return Run(every=every, total=100, **{"divergence": TAKEN_BACK, **settings})


def broken(run: Run, steps: int) -> Run:
    for _ in range(steps):
        run.step(math.nan if run.replicas is None else dict.fromkeys(range(3), math.nan))
    return run


def test_a_cycle_that_was_accepted_in_ruins_is_taken_back_too() -> None:
    """It explodes in its last step, too late for its mean loss: no place to go back to."""
    run = Run(every=4, total=400, lr=1e-3, divergence=hdet.Divergence(rollback="device", lower=0.1))
    before = run.steps(4).weights()
    run.steps(3)
    with torch.no_grad():
        for p in run.net.parameters():
            p.mul_(1e4)
    run.step(report=5.0)
    assert not run.history["rolled_back"]
    engine = run.steps(8).ensemble.engine
    assert engine.rollbacks_in_row == 2 and run.weights().abs().max() > 100, "back to the ruins"
    assert torch.equal(run.steps(4).weights(), before) and engine.rollbacks_in_row == 3
    run.steps(4)
    assert engine.rollbacks_in_row == 0


def test_what_was_before_a_load_is_no_place_to_go_back_to() -> None:
    run = taken_back().steps(6)
    state = run.ensemble.state_dict()
    filled(run.net, 0.5)
    run.ensemble.load_state_dict(state)
    assert broken(run, 6).ensemble.engine.rollbacks_in_row == 3
    assert run.weights().unique().tolist() == [0.5]


def test_a_cycle_taken_back_lowers_rates_alone() -> None:
    engine = Engine([KnobSpec("lr", 0.1), KnobSpec("eps", 0.1, rate=False)], 2, Clock(2))
    engine.roll_back(0.5)
    assert engine.corrections == [0.5, 1.0]


def test_counts_and_level_are_part_of_the_state() -> None:
    run = broken(taken_back().steps(2), 2)
    other = taken_back().loaded(run.saved()).ensemble
    engine, level = other.engine, run.ensemble.engine.level
    assert (engine.rollbacks, engine.rollbacks_in_row, engine.level) == (1, 1, level)
    assert other.corrections == {"lr": 0.5}


def test_coresident_replicas_are_taken_back_too() -> None:
    """In the first cycle, before which the other replicas' parameters did not exist."""
    run = taken_back(4, together=3)
    before = run.all_weights()
    assert broken(run, 4).history["rolled_back"]
    for a, b in zip(run.all_weights(), before, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)  # the mean of three equal numbers is rounded
    assert not run.steps(4).history["rolled_back"]
    assert not torch.equal(run.all_weights()[0], before[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_any_optimizer_begin_anew(name: str) -> None:
    def make(net: torch.nn.Module) -> Any:
        return OPTIMIZERS[name](net.parameters(), lr=1e-2)

    net, other = (model().to(dtype_of(name)) for _ in range(2))
    optimizer = make(net)
    moments = Moments("reset", optimizer, hdet.Replicas(0, 2), 1 << 20)
    trained(net, optimizer, range(3))
    has_masters, own = name in ("fp32", "split"), list(net.parameters())
    masters = [x.clone() for x in optimizer.masters(own, 0)] if has_masters else []
    moments.reset()
    other.load_state_dict(net.state_dict())
    if has_masters:  # which stay
        assert len(masters) == 4 and same(list(optimizer.masters(own, 0)), masters)
        for state in optimizer.state.values():
            assert not any(state[key].any() for key in ("exp_avg", "exp_avg_sq", "step"))
    else:
        anew = trained(other, make(other), range(3))
        assert torch.equal(trained(net, optimizer, range(3)), anew)


AVERAGED: dict[str, dict[str, Any]] = {
    "factored": {"optimizer": torch.optim.Adafactor},
    "parameters stand still": {"lr": 0.0},
    "a gradient is missing": {},
}


def averaged_moments(rank: int, world: int, case: str) -> Any:
    settings = {"gradients": "local", "moments": "average", **AVERAGED[case]}
    run = Run(rank, ddp=False, scheduler=None, every=2, **settings)
    if case == "a gradient is missing" and rank == 1:
        run.optimizer.register_step_pre_hook(lambda *_: setattr(run.net[0].weight, "grad", None))
    message = told(lambda: run.steps(2).ensemble.converge())
    states = run.optimizer.state.values()
    return message, [{k: v for k, v in state.items() if k != "step"} for state in states]


@pytest.mark.parametrize("case", AVERAGED)
def test_moments_are_averaged_if_all_replicas_have_them(case: str) -> None:
    (message, one), (other, two) = run_ranks(averaged_moments, 2, case)
    if case == "a gradient is missing":
        assert message == other and "moments='average' needs the same on all" in message
    else:
        assert message == other == "no error" and len(one) == 4 and same(one, two)


def undeclared(rank: int, world: int, gradients: str, closure: bool = False) -> list[str]:
    local = gradients == "local"
    run = Run(rank, every=2, ddp=local, gradients=gradients, moments="keep" if local else None)
    step = (lambda: run.ensemble.step(run.optimizer.step(run.backward))) if closure else run.step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = told(step)
    return [error, *(str(w.message) for w in caught)]


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_that_differ_are_not_shared(closure: bool) -> None:
    for messages in run_ranks(undeclared, 2, "shared", closure):
        assert "differ between replicas (norms" in messages[0]


def test_gradients_that_are_the_same_are_not_local() -> None:
    for error, *messages in run_ranks(undeclared, 2, "local"):
        assert error == "no error" and any("no_sync()" in message for message in messages)


def phantom(rank: int, world: int) -> Any:
    run = Run(rank, every=3).steps(3)
    group = run.optimizer.param_groups[0]
    with all_reduces() as calls:
        rate, group["lr"] = group["lr"], 0.0
        run.optimizer.step()
        group["lr"] = rate
    return len(calls), run.ensemble.in_sync, run.ensemble.engine.position, run.ensemble.cycle


def test_a_step_with_rate_zero_counts_nothing_and_parts_nobody() -> None:
    assert run_ranks(phantom, 2) == [(0, True, 0, 1)] * 2


def test_a_tied_group_must_be_one() -> None:
    net = model()
    said = r"tied\[0\] must be a process group that this rank is in, got -100"
    with pytest.raises(ValueError, match=said):
        Run(net=net, tied=[(net[0].weight, -100)])


def tied_state(rank: int, world: int, masters: str | None, moments: str | None) -> list[Any]:
    """3 replicas of 2 stages, whose copies lie at different places of a bucket.

    So gloo adds them up in another order.
    """
    replica, stage = divmod(rank, 2)
    peers = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])][stage]
    copies = [dist.new_group([2 * r, 2 * r + 1]) for r in range(3)][replica]
    generator = torch.Generator().manual_seed(replica if moments else 0)
    dtype = torch.bfloat16 if masters else torch.float32
    matrix = torch.ones(25, 40, dtype=dtype) if masters else torch.ones(40, 25).t()
    own, shared = map(torch.nn.Parameter, (torch.ones(3 + 400 * stage, dtype=dtype), matrix))
    kind, settings = torch.optim.AdamW, {}
    if masters:
        kind, settings = hdet.FusedAdamW, {"master_weights": masters}
    optimizer = kind([own, shared], lr=0.1, **settings)
    world_group, ranks = dist.group.WORLD, [[0, 1], [2, 3], [4, 5]]
    ensemble = hdet.Ensemble(
        optimizer, knobs=[hdet.LearningRate(0.3)],
        replicas=hdet.Replicas(
            replica, 3, peers, ranks=ranks, member=stage, world_group=world_group
        ),
        sync=hdet.Sync(
            2, tied=[(shared, copies)], gradients="local" if moments else "shared", moments=moments
        ),
    )  # fmt: skip
    for _ in range(4):
        own.grad = torch.ones_like(own)
        shared.grad = torch.randn(25, 40, generator=generator).to(dtype)
        optimizer.step()
        ensemble.step(None if stage == 0 else 2.0)
    state = optimizer.state[shared].values()
    return [shared.detach(), *(value for value in state if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize(("masters", "moments"), [(None, "average"), ("split", None)])
def test_tied_copies_are_equal_with_all_their_state(masters: Any, moments: Any) -> None:
    first, *others = run_ranks(tied_state, 6, masters, moments)
    assert same(others, [first] * 5)
