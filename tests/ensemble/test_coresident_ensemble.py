"""Co-resident replicas under the Ensemble: the same trajectories as gloo processes, and everything that can happen in a cycle."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run, batch, loss_of, model, probe

from ..distributed import run_ranks
from .helpers import flat

TIMES = ("converge_ms", "probe_ms")


def traced(steps: int, settings: dict[str, Any], **more: Any) -> Any:
    """Weights of each replica here after every step, records, values, the state. The probe samples an average three times in a cycle of five
    steps."""
    controllers = {
        "softmax": hdet.SoftmaxController(1e-3, decay=None),
        "probe": partial(probe, average_every=2),
        None: None,
    }
    run = Run(
        **{
            "optimizer": hdet.FusedAdamW,
            **settings,
            **more,
            "controller": controllers[settings.get("controller")],
        }
    )
    weights = [run.steps(1).all_weights() for _ in range(steps)]
    records = [
        {key: value for key, value in record.items() if key not in TIMES} for record in run.records
    ]
    return weights, records, run.ensemble.values(), run.ensemble.state_dict()


def process(rank: int, world: int, steps: int, settings: dict[str, Any]) -> Any:
    return traced(steps, settings, rank=rank)


CASES = {
    "probe": {"controller": "probe"},
    "softmax controller": {"controller": "softmax", "lr": 1e-4},
    "softmax average": {"weights": "softmax", "spread": 0.9, "lr": 3e-2},
    "spread and decay": {"weight_decay": 0.1},
    "no spread": {"spread": 0.0},
    "Adam": {"optimizer": hdet.FusedAdam},
    "SGD": {"optimizer": partial(hdet.FusedSGD, momentum=0.9), "lr": 1e-3},
    "Lion": {"optimizer": hdet.FusedLion, "lr": 1e-4},
    "clipped": {"optimizer": partial(hdet.FusedAdamW, max_grad_norm=0.5)},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, float32 masters": {
        "dtype": torch.bfloat16,
        "optimizer": partial(hdet.FusedAdamW, master_weights="fp32"),
        "lr": 1e-4,
    },
    "bfloat16, split": {
        "dtype": torch.bfloat16,
        "optimizer": partial(hdet.FusedAdamW, master_weights="split"),
        "controller": "probe",
    },
    "bfloat16, stochastic": {
        "dtype": torch.bfloat16,
        "optimizer": partial(
            hdet.FusedAdamW, stochastic_rounding=True, moment_dtype=torch.bfloat16
        ),
    },
}


@pytest.mark.filterwarnings("ignore:saving in the middle of a cycle")
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_are_two_processes_to_the_bit(case: str) -> None:
    """Weights of every replica after every step, records and states: g0 / 2 + g1 / 2 is what DDP computes for two."""
    steps, settings = 40 if case == "probe" else 12, CASES[case]
    ranks = run_ranks(process, 2, steps, settings)
    ours = traced(steps, settings, together=2)
    for step in range(steps):
        for k in range(2):
            assert torch.equal(ours[0][step][k], ranks[k][0][step][0]), (step, k)
    assert ours[1:] == ranks[0][1:]
    if case == "probe":
        assert ours[1][-1]["corrections"]["lr"] != 1.0, "the case should decide something"


def nearly(a: Any, b: Any) -> bool:
    """Equal as far as another order of adding four gradients allows."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nearly(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(nearly, a, b))
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6))


def test_four_replicas_are_four_processes_up_to_the_order_of_a_sum() -> None:
    settings = {"controller": "probe"}
    ranks = run_ranks(process, 4, 20, settings)
    ours = traced(20, settings, together=4)
    for step in range(20):
        for k in range(4):
            assert torch.allclose(ours[0][step][k], ranks[k][0][step][0], rtol=1e-6, atol=1e-6), (
                step,
                k,
            )
    assert nearly(ours[1], ranks[0][1])


def test_no_spread_is_plain_gradient_accumulation_to_the_bit() -> None:
    run = Run(together=3, spread=0.0).steps(12)
    net = model()
    optimizer = hdet.FusedAdamW(net.parameters(), lr=3e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 40, cycle_momentum=False)
    for step in range(12):
        for k in range(3):
            (loss_of(net, batch(100 * step + k)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert all(torch.equal(weights, flat(net)) for weights in run.all_weights())


# -- a cycle -----------------------------------------------------------------------------------------------------------------


def check_spread(rhos: list[float], weights: list[torch.Tensor], in_sync: bool, end: bool) -> None:
    """At the end of a cycle replicas are equal; before, theta_r = mean + (1 - rho_r) s: the displacements are one vector, scaled."""
    assert in_sync == end == all(torch.equal(w, weights[0]) for w in weights)
    assert sorted(rhos) == pytest.approx([0.7, 0.9, 1.1, 1.3])
    if not end:
        mean = torch.stack(weights).mean(0)
        s = [(w - mean) / (1 - rho) for w, rho in zip(weights, rhos, strict=True)]
        assert s[0].abs().max() > 1e-5 and all(
            torch.allclose(x, s[0], rtol=2e-2, atol=2e-6) for x in s
        )


def test_replicas_differ_as_rho_and_are_equal_after_a_converge() -> None:
    run = Run(together=4)
    for step in range(10):
        rhos = []
        for k in range(4):
            with run.replicas.use(k):
                rhos.append(run.ensemble.multipliers["lr"])
        assert [row[0] for row in run.optimizer.multipliers] == rhos
        check_spread(rhos, run.steps(1).all_weights(), run.ensemble.in_sync, step % 5 == 4)
    run.ensemble.close()
    assert run.optimizer.multipliers == [[1.0]] * 4


def test_a_loss_belongs_to_the_replica_in_use_or_named() -> None:
    run = Run(together=2, every=1)
    with pytest.raises(ValueError, match=r"with replicas\.use\(k\)"):
        run.ensemble.observe(1.0)
    with pytest.raises(ValueError, match="which replica"):
        run.ensemble.step(1.0)
    with pytest.raises(ValueError, match="one of 0 .. 1"):
        run.ensemble.observe(1.0, replica=2)
    run.ensemble.observe(4.0, replica=1)
    with run.replicas.use(0):
        run.ensemble.observe(2.0)
        with pytest.raises(ValueError, match="once per optimizer step"):
            run.ensemble.step()
        with pytest.raises(ValueError, match=r"ensemble.converge\(\) was called inside"):
            run.ensemble.converge()
    loss_of(run.net, batch(0)).backward()
    run.optimizer.step()
    run.ensemble.step()
    assert run.history["losses"] == [2.0, 4.0]


def test_a_process_with_one_replica_takes_no_other_number() -> None:
    run = Run(0)
    run.ensemble.observe(1.0, replica=0)
    with pytest.raises(ValueError, match="this process holds replica 0 alone"):
        run.ensemble.observe(1.0, replica=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replica_without_a_usable_loss_is_left_out_and_recorded(bad: float) -> None:
    run = Run(together=4, controller="probe")
    for i in range(5):
        run.step({1: bad} if i == 2 else None)
    assert run.history["losses"][1] is None and run.history["left_out"] == [1]
    assert run.history["slopes"]["lr"] is not None


def test_a_converge_before_the_first_step_is_of_the_model_as_it_is() -> None:
    run = Run(together=2)
    with torch.no_grad():
        next(run.net.parameters()).fill_(1.0)
    before = run.weights()
    run.ensemble.converge()
    assert all(torch.equal(w, before) for w in run.all_weights())


TINY = {
    "dtype": torch.bfloat16,
    "optimizer": partial(hdet.FusedAdamW, master_weights="fp32"),
    "lr": 1e-7,
}


def masters_after_converge(rank: int, world: int) -> Any:
    run = Run(rank, **TINY).steps(3)
    before = run.weights(), run.optimizer.state[run.net[0].weight]["master_param"].clone()
    run.ensemble.converge()
    return *before, run.optimizer.state[run.net[0].weight]["master_param"]


def test_masters_that_differ_behind_equal_parameters_are_averaged() -> None:
    """At a tiny rate two replicas' bfloat16 parameters are still equal when their masters are not."""
    ranks = run_ranks(masters_after_converge, 2)
    assert torch.equal(ranks[0][0], ranks[1][0]) and not torch.equal(ranks[0][1], ranks[1][1])
    assert all(torch.equal(rank[2], 0.5 * ranks[0][1] + 0.5 * ranks[1][1]) for rank in ranks)
    run = Run(together=2, **TINY).steps(3)
    run.ensemble.converge()
    state = run.optimizer.state[run.net[0].weight]
    assert torch.equal(state["master_param"], ranks[0][2]) and torch.equal(
        state["replica_masters"][0], ranks[0][2]
    )


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


ORDERS = [("net", "optimizer", "ensemble"), ("ensemble", "optimizer", "net")]


ON_A_LINE = {
    "optimizer": partial(hdet.FusedAdamW, decay_at="base"),
    "weight_decay": 0.1,
    "storage": "displacement",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "settings",
    [{}, ON_A_LINE, {**ON_A_LINE, "dtype": torch.bfloat16}],
    ids=["stored", "line", "line of bfloat16"],
)
@pytest.mark.parametrize(
    ("at", "controller"),
    [(20, "probe"), (18, None)],
    ids=["at the end of a cycle", "in the middle"],
)
def test_a_resumed_run_is_the_same_run(
    at: int, controller: str | None, settings: dict[str, Any], order: tuple[str, ...]
) -> None:
    straight = Run(together=3, controller=controller, **settings).steps(at)
    state = straight.saved()
    straight.steps(12)
    resumed = Run(together=3, controller=controller, **settings).loaded(state, order).steps(12)
    assert all(
        torch.equal(a, b)
        for a, b in zip(straight.all_weights(), resumed.all_weights(), strict=True)
    )
    assert straight.saved()["ensemble"] == resumed.saved()["ensemble"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_state_without_other_replicas_makes_all_equal_to_the_model(
    order: tuple[str, ...],
) -> None:
    """A checkpoint of a process run, loaded into replicas that had already parted."""
    first = Run(0, optimizer=hdet.FusedAdamW).steps(20)
    run = Run(together=3).steps(3).loaded(first.saved(), order)
    assert all(torch.equal(w, first.weights()) for w in run.all_weights())
    assert sorted(row[0] for row in run.optimizer.multipliers) == pytest.approx([0.7, 1.0, 1.3])
    run.steps(2)
    assert len({w.numpy().tobytes() for w in run.all_weights()}) == 3


# -- the drop-in -----------------------------------------------------------------------------------------------------------------


def test_the_drop_in_takes_co_resident_replicas() -> None:
    net = model()
    optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-3)
    settings: dict[str, Any] = {
        "total_steps": 20, "cycle_momentum": False, "ensemble_lr_spread_ratio": 0.3, "model_sync_interval": 5, "auto_lr_warmup_steps": 0,
        "replicas": hdet.CoresidentReplicas(net, 4), "enable_auto_lr": True, "loss_scale": 1e-3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="world_size is 4"):
        hdet.OneCycleAutoLR(optimizer, 1e-3, **settings, world_size=4)
    scheduler = hdet.OneCycleAutoLR(optimizer, 1e-3, **settings, rank=0, world_size=1)
    for step in range(20):
        for k in range(4):
            with scheduler.ensemble.replicas.use(k):
                loss = loss_of(net, batch(4 * step + k))
                scheduler.observe(loss)
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert scheduler.ensemble.cycle == 4 and scheduler.in_sync
    assert scheduler.ensemble.corrections["lr"] != 1.0
