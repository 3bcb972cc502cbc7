"""What is kept for a cycle that diverges, and what else a cycle looks after. (Divergence in processes: tests/faults/test_survived.py.)"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.run.moments import Moments
from hdet.run.snapshot import Snapshot, keeps_weights
from tests.harness import Run, model

from ..checkpoint.helpers import FusedEightBit
from ..distributed import run_ranks
from .helpers import STOCK, all_reduces, same, told, trained

# -- taken back ----------------------------------------------------------------------------------------------------------------


def test_a_cycle_that_was_accepted_in_ruins_is_taken_back_too() -> None:
    """The first cycle explodes in its last step only, too late for its mean loss: its end is no place to go back to."""
    run = Run(
        0, every=4, total=400, lr=1e-3, divergence=hdet.Divergence(rollback="device", lower=0.1)
    )
    run.steps(4)
    before = run.weights()
    run.steps(3)
    with torch.no_grad():
        for p in run.net.parameters():
            p.mul_(1e4)
    run.step(report=5.0)
    assert not run.history["rolled_back"]
    run.steps(8)
    assert run.ensemble.engine.rollbacks_in_row == 2 and run.weights().abs().max() > 100, (
        "twice back to the ruins"
    )
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


def test_a_cycle_taken_back_lowers_rates_alone() -> None:
    engine = Engine([KnobSpec("lr", 0.1), KnobSpec("eps", 0.1, rate=False)], 2, Clock(2))
    engine.roll_back(0.5)
    assert engine.corrections == [0.5, 1.0]


def test_counts_and_level_are_part_of_the_state() -> None:
    run, other = (
        Run(0, every=2, total=100, divergence=hdet.Divergence(rollback="device")) for _ in range(2)
    )
    run.steps(2)
    for _ in range(2):
        run.step(report=math.nan)
    engine = other.loaded(run.saved()).ensemble.engine
    assert (engine.rollbacks, engine.rollbacks_in_row, engine.level) == (
        1,
        1,
        run.ensemble.engine.level,
    )
    assert other.ensemble.corrections == {"lr": 0.5}


def test_coresident_replicas_are_taken_back_too() -> None:
    """In the very first cycle: the other replicas' parameters did not exist before the first step and become the model's again."""
    run = Run(together=3, every=4, total=100, divergence=hdet.Divergence(rollback="device"))
    before = run.all_weights()
    for _ in range(4):
        run.step(report={k: math.nan for k in range(3)})
    assert run.history["rolled_back"]
    # Restored and averaged: three equal numbers' mean may differ in the last bit.
    assert all(
        torch.allclose(a, b, rtol=1e-6) for a, b in zip(run.all_weights(), before, strict=True)
    )
    run.steps(4)
    assert not run.history["rolled_back"] and not torch.equal(run.all_weights()[0], before[0])


# -- moments under local gradients ---------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Keeps its counter as a number, tensors in lists and dicts, and something that is nobody's parameter's."""

    def step(self, closure: Any = None) -> None:
        everyone = self.state.setdefault("all", {"steps": 0})
        everyone["steps"] += 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("past", []).append(p.grad.clone())
            state.setdefault("inner", {"sum": torch.zeros_like(p)})["sum"].add_(p.grad)
            p.data.sub_(
                0.01
                / state["step"]
                * (state["inner"]["sum"] + state["past"][0])
                / everyone["steps"]
            )


OPTIMIZERS = {
    **{name: getattr(torch.optim, name) for name in STOCK},
    "Counting": Counting,
    "masters": partial(hdet.FusedAdamW, master_weights="fp32"),
    "8 bits": FusedEightBit,
}
ELSEWHERE = {
    "AdamWScheduleFree": "schedulefree",
    "Prodigy": "prodigyopt",
    "DAdaptAdam": "dadaptation",
}
"""What does not begin as zeros (weights beside the parameters), or is counted in a group."""


@pytest.mark.parametrize("name", [*OPTIMIZERS, *ELSEWHERE])
def test_any_optimizer_begins_anew_and_goes_back(name: str) -> None:
    kind: Any = OPTIMIZERS.get(name) or getattr(
        pytest.importorskip(ELSEWHERE[name], reason="a peer that is not installed"), name
    )

    def make(parameters: Any, lr: float) -> Any:
        made = kind(parameters, lr=lr)
        if keeps_weights(made):
            made.train()
        return made

    net, other = (
        model().to(torch.bfloat16 if name == "masters" else torch.float32) for _ in range(2)
    )
    optimizer = make(net.parameters(), lr=1e-2)
    snapshots = [Snapshot(list(net.parameters()), optimizer, place) for place in ("device", "host")]
    moments = Moments("reset", optimizer, hdet.Replicas(0, 2), 1 << 20)
    snapshots[0].take()
    expected = trained(net, optimizer, range(3))
    snapshots[1].take()
    later = trained(net, optimizer, range(3, 6))
    snapshots[1].restore()
    assert torch.equal(trained(net, optimizer, range(3, 6)), later)
    snapshots[0].restore()
    assert torch.equal(trained(net, optimizer, range(3)), expected), (
        "to where there was no state yet"
    )
    kept = [
        state["master_param"].clone()
        for state in optimizer.state.values()
        if "master_param" in state
    ]
    moments.reset()
    other.load_state_dict(net.state_dict())
    if name == "masters":  # which stay
        states = list(optimizer.state.values())
        assert all(
            torch.equal(state["master_param"], master)
            for state, master in zip(states, kept, strict=True)
        )
        assert not any(
            state[key].any() for state in states for key in ("exp_avg", "exp_avg_sq", "step")
        )
    else:
        assert torch.equal(
            trained(net, optimizer, range(3)),
            trained(other, make(other.parameters(), lr=1e-2), range(3)),
        )


AVERAGED: dict[str, dict[str, Any]] = {
    "factored": {"optimizer": torch.optim.Adafactor},
    "parameters stand still": {"lr": 0.0},
    "a gradient is missing": {},
}


def averaged_moments(rank: int, world: int, case: str) -> Any:
    run = Run(
        rank,
        ddp=False,
        scheduler=None,
        every=2,
        gradients="local",
        moments="average",
        **AVERAGED[case],
    )
    if case == "a gradient is missing" and rank == 1:
        run.optimizer.register_step_pre_hook(lambda *_: setattr(run.net[0].weight, "grad", None))
    message = told(lambda: run.steps(2).ensemble.converge())
    return message, [
        {key: value for key, value in state.items() if key != "step"}
        for state in run.optimizer.state.values()
    ]


@pytest.mark.parametrize("case", AVERAGED)
def test_moments_are_averaged_if_all_replicas_have_them(case: str) -> None:
    (message, one), (other, two) = run_ranks(averaged_moments, 2, case)
    if case == "a gradient is missing":
        assert message == other and "moments='average' needs the same on all" in message
    else:
        assert message == other == "no error" and len(one) == 4 and same(one, two)


# -- gradients that are not what they are said to be ---------------------------------------------------------------------------


def undeclared(rank: int, world: int, gradients: str, closure: bool) -> list[str]:
    local = gradients == "local"
    run = Run(rank, every=2, ddp=local, gradients=gradients, moments="keep" if local else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = told(
            lambda: run.ensemble.step(run.optimizer.step(run.backward)) if closure else run.step()
        )
    return [error, *(str(w.message) for w in caught)]


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_that_differ_are_not_shared(closure: bool) -> None:
    for messages in run_ranks(undeclared, 2, "shared", closure):
        assert "differ between replicas (norms" in messages[0]


def test_gradients_that_are_the_same_are_not_local() -> None:
    for error, *messages in run_ranks(undeclared, 2, "local", False):
        assert error == "no error" and any("no_sync()" in message for message in messages)


def test_a_tied_group_must_be_one() -> None:
    net = model()
    with pytest.raises(
        ValueError, match=r"tied\[0\] must be a process group that this rank is in, got -100"
    ):
        hdet.Ensemble(
            torch.optim.SGD(net.parameters(), lr=0.1), sync=hdet.Sync(tied=[(net[0].weight, -100)])
        )


# -- steps that move nothing -----------------------------------------------------------------------------------------------------


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


# -- copies --------------------------------------------------------------------------------------------------------------------


def tied_state(
    rank: int, world: int, masters: str | None, moments: str | None
) -> list[torch.Tensor]:
    """Copies that lie at different places of a bucket, so that gloo adds them up in another order: 3 replicas of 2 stages."""
    replica, stage = divmod(rank, 2)
    peers = [dist.new_group([0, 2, 4]), dist.new_group([1, 3, 5])][stage]
    copies = [dist.new_group([2 * r, 2 * r + 1]) for r in range(3)][replica]
    generator = torch.Generator().manual_seed(replica if moments else 0)
    dtype = torch.bfloat16 if masters else torch.float32
    matrix = torch.ones(25, 40, dtype=dtype) if masters else torch.ones(40, 25).t()
    own, shared = (
        torch.nn.Parameter(torch.ones(3 + 400 * stage, dtype=dtype)),
        torch.nn.Parameter(matrix),
    )
    optimizer = (
        hdet.FusedAdamW([own, shared], lr=0.1, master_weights=masters)
        if masters
        else torch.optim.AdamW([own, shared], lr=0.1)
    )
    replicas = hdet.Replicas(
        replica,
        3,
        peers,
        ranks=[[0, 1], [2, 3], [4, 5]],
        member=stage,
        world_group=dist.group.WORLD,
    )
    ensemble = hdet.Ensemble(
        optimizer, replicas=replicas, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(2, tied=[(shared, copies)], gradients="local" if moments else "shared", moments=moments),
    )  # fmt: skip
    for _ in range(4):
        own.grad, shared.grad = (
            torch.ones_like(own),
            torch.randn(25, 40, generator=generator).to(dtype),
        )
        optimizer.step()
        ensemble.step(None if stage == 0 else 2.0)
    return [
        shared.detach(),
        *(value for value in optimizer.state[shared].values() if isinstance(value, torch.Tensor)),
    ]


@pytest.mark.parametrize(("masters", "moments"), [(None, "average"), ("split", None)])
def test_tied_copies_are_equal_with_their_masters_and_averaged_moments(
    masters: str | None, moments: str | None
) -> None:
    ranks = run_ranks(tied_state, 6, masters, moments)
    for rank in ranks:
        assert all(torch.equal(a, b) for a, b in zip(rank, ranks[0], strict=True))
