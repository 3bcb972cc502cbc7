"""Co-resident replicas and the optimizer that they are given to: hooks, refusals, states."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run

from .helpers import filled, same


def test_a_run_goes_on_with_new_replicas_after_close() -> None:
    run = Run(together=2).steps(5)
    converged = run.all_weights()[0]
    run.ensemble.close()
    run.replicas = hdet.CoresidentReplicas(run.net, 3)
    run.ensemble = hdet.Ensemble(
        run.optimizer, replicas=run.replicas, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(5)
    )
    assert same(run.all_weights(), [converged] * 3)
    assert len({w.numpy().tobytes() for w in run.steps(4).all_weights()}) == 3
    assert run.steps(1).ensemble.cycle == 1 and run.equal()


def test_a_state_from_before_the_first_step_is_of_the_model_as_it_is() -> None:
    first, other = Run(together=2), Run(together=2)
    for run in (first, other):
        filled(run.net, 0.25, parameters=1)
    resumed = Run(together=2).loaded(first.saved()).steps(3)
    assert same(resumed.all_weights(), other.steps(3).all_weights())


def test_a_state_with_a_parameter_that_never_had_a_gradient_loads_into_torchs_optimizer() -> None:
    net = torch.nn.ModuleList(torch.nn.Linear(3, 1, bias=False) for _ in range(2))
    optimizer, resumed = hdet.FusedAdamW(net.parameters()), hdet.FusedAdamW(net.parameters())
    hdet.CoresidentReplicas(net, 2).attach(optimizer)
    net[0].weight.sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(net.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(optimizer.state_dict())
    for stepped in (other, resumed, optimizer):
        net[1].weight.grad = torch.ones(1, 3)
        stepped.step()
        assert [stepped.state[layer.weight]["step"].item() for layer in net] == [2, 1]


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
