"""Co-resident replicas under the Ensemble: trajectories of processes, and what a cycle brings."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run, batch, loss_of, model, probe

from ..distributed import run_ranks
from .helpers import MASTERS, SPLIT, same

BF16, SOFTMAX = torch.bfloat16, hdet.SoftmaxController(1e-3, decay=None)
SGD = partial(hdet.FusedSGD, momentum=0.9)
FREE = partial(hdet.FusedScheduleFreeAdamW, betas=(0.8, 0.99), master_weights="split")
STOCHASTIC = partial(hdet.FusedAdamW, stochastic_rounding=True, moment_dtype=BF16)


def traced(rank: int, world: int, steps: int, settings: dict[str, Any], **more: Any) -> Any:
    """Weights of each replica here after every step, records, values, the state."""
    # The probe samples an average three times in a cycle of five steps.
    controllers = {"softmax": SOFTMAX, "probe": partial(probe, average_every=2), None: None}
    settings = {"optimizer": hdet.FusedAdamW, **settings, **more}
    settings["controller"] = controllers[settings.get("controller")]
    run = Run(rank, **settings)
    weights = [run.steps(1).all_weights() for _ in range(steps)]
    records = [{k: v for k, v in r.items() if not k.endswith("_ms")} for r in run.records]
    return weights, records, run.ensemble.values(), run.ensemble.state_dict()


CASES: dict[str, dict[str, Any]] = {
    "probe": {"controller": "probe"},
    "softmax controller": {"controller": "softmax", "lr": 1e-4},
    "spread and decay": {"weight_decay": 0.1},
    "no spread": {"spread": 0.0},
    "Adam": {"optimizer": hdet.FusedAdam},
    "SGD": {"optimizer": SGD, "lr": 1e-3},
    "Lion": {"optimizer": hdet.FusedLion, "lr": 1e-4},
    "clipped": {"optimizer": partial(hdet.FusedAdamW, max_grad_norm=0.5)},
    "schedule-free": {"optimizer": hdet.FusedScheduleFreeAdamW, "weight_decay": 0.1},
    "schedule-free, split": {"dtype": BF16, "optimizer": FREE, "scheduler": None},
    "bfloat16": {"dtype": BF16},
    "bfloat16, float32 masters": {"dtype": BF16, "optimizer": MASTERS, "lr": 1e-4},
    "bfloat16, split": {"dtype": BF16, "optimizer": SPLIT, "controller": "probe"},
    "bfloat16, stochastic": {"dtype": BF16, "optimizer": STOCHASTIC},
    "averages over time": {"dtype": BF16, "optimizer": partial(SPLIT, ema=(0.5, 0.9))},
}


def steps_of(case: str) -> int:
    return 40 if case == "probe" else 12


def traced_all(rank: int, world: int) -> Any:
    return {case: traced(rank, world, steps_of(case), CASES[case]) for case in CASES}


@pytest.fixture(scope="module")
def processes() -> list[Any]:
    return run_ranks(traced_all, 2)


@pytest.mark.filterwarnings("ignore:saving in the middle of a cycle")
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_are_two_processes_to_the_bit(case: str, processes: list[Any]) -> None:
    """Because g0 / 2 + g1 / 2 is what DDP computes for two."""
    ranks, steps = [rank[case] for rank in processes], steps_of(case)
    ours = traced(0, 1, steps, CASES[case], together=2)
    for step in range(steps):
        assert same(ours[0][step], [rank[0][step][0] for rank in ranks]), step
    assert ours[1:] == ranks[0][1:]
    if case == "probe":
        assert ours[1][-1]["corrections"]["lr"] != 1.0, "the case should decide something"


# -- a cycle -----------------------------------------------------------------------------------


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
        with pytest.raises(ValueError, match=r"of all replicas: call it after"):
            run.ensemble.step()
        with pytest.raises(ValueError, match=r"ensemble.converge\(\) was called inside"):
            run.ensemble.converge()
    loss_of(run.net, batch(0)).backward()
    run.optimizer.step()
    run.ensemble.step()
    assert run.history["losses"] == [2.0, 4.0]
    alone = Run()
    alone.ensemble.observe(1.0, replica=0)
    with pytest.raises(ValueError, match="this process holds replica 0 alone"):
        alone.ensemble.observe(1.0, replica=1)


def masters_after_converge(rank: int, world: int, **settings: Any) -> Any:
    """At a tiny rate two replicas' bfloat16 parameters are still equal when masters are not."""
    run = Run(rank, dtype=BF16, optimizer=MASTERS, lr=1e-7, **settings).steps(3)
    state, before = run.optimizer.state[run.net[0].weight], run.weights()
    master = state["master_param"].clone()
    run.ensemble.converge()
    return before, master, state["master_param"], *state.get("replica_masters", ())


def test_masters_that_differ_behind_equal_parameters_are_averaged() -> None:
    one, two = run_ranks(masters_after_converge, 2)
    assert same(one[0], two[0]) and not same(one[1], two[1])
    mean = 0.5 * one[1] + 0.5 * two[1]
    assert same([one[2], two[2]], [mean] * 2)
    assert same(list(masters_after_converge(0, 1, together=2)[2:]), [mean] * 2)


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [("net", "optimizer", "ensemble"), ("ensemble", "optimizer", "net")]
)
@pytest.mark.parametrize("settings", [{"optimizer": hdet.FusedAdamW}, {"together": 4}])
def test_a_state_of_other_replicas_makes_all_equal(settings: Any, order: Any) -> None:
    """Of a process run, or of another number, loaded into replicas that had already parted."""
    first = Run(**settings).steps(20)
    run = Run(together=3).steps(3).loaded(first.saved(), order)
    assert same(run.all_weights(), first.all_weights()[:1] * 3)
    assert sorted(row[0] for row in run.optimizer.multipliers) == pytest.approx([0.7, 1.0, 1.3])
    assert len({w.numpy().tobytes() for w in run.steps(2).all_weights()}) == 3


# -- the optimizer that they are given to ------------------------------------------------------


@pytest.mark.parametrize("kind", [hdet.FusedAdamW, torch.optim.AdamW])
def test_a_group_is_refused_while_an_ensemble_drives_the_optimizer(kind: Any) -> None:
    layers = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizer = kind(layers[0].parameters())
    ensemble, group = hdet.Ensemble(optimizer), {"params": list(layers[1].parameters())}
    said = "driven by an Ensemble, which would not average the new group"
    with pytest.raises(ValueError, match=said):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    ensemble.close()
    optimizer.add_param_group(group)
    assert len(hdet.Ensemble(optimizer).parameters) == 4


@pytest.mark.parametrize("k", [0, 1])
def test_a_step_inside_of_use_is_refused_and_changes_nothing(k: int) -> None:
    run = Run(together=2).steps(1)
    run.backward()
    before = run.all_weights()
    with run.replicas.use(k), pytest.raises(ValueError, match="optimizer.step.. was called inside"):
        run.optimizer.step()
    assert same(run.all_weights(), before)
    run.optimizer.step()
    assert not torch.equal(run.all_weights()[k], before[k])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_replicas_are_not_copied(copied: Callable[[Any], Any]) -> None:
    run = Run(together=2)
    with pytest.raises(TypeError, match="make new ones of the copied model"):
        copied((run.net, run.replicas) if copied is not copy.copy else run.replicas)


def test_a_model_that_was_cast_afterwards_is_refused_by_name() -> None:
    run = Run(together=2).steps(1)
    own = list(run.net.bfloat16().parameters())
    said = r"bfloat16 on cpu now, the other replicas are torch.float32 on cpu"
    with pytest.raises(ValueError, match=said), run.replicas.use(1):
        pass
    assert all(one is other for one, other in zip(run.net.parameters(), own, strict=True))
    assert not run.replicas.in_use


def test_the_drop_in_refuses_another_number_than_there_are() -> None:
    net = model()
    replicas, optimizer = hdet.CoresidentReplicas(net, 4), hdet.FusedAdamW(net.parameters())
    with pytest.raises(ValueError, match="world_size is 4"):
        hdet.OneCycleAutoLR(optimizer, 1e-3, 20, replicas=replicas, world_size=4)
