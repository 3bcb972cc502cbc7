"""Co-resident replicas and the optimizer that they are given to: hooks, refusals, states of another number of replicas."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run


def test_a_run_goes_on_with_new_replicas_after_close() -> None:
    run = Run(together=2).steps(5)
    converged = run.all_weights()[0]
    run.ensemble.close()
    run.replicas = hdet.CoresidentReplicas(run.net, 3)
    run.ensemble = hdet.Ensemble(
        run.optimizer, replicas=run.replicas, knobs=[hdet.LearningRate(0.3)], sync=hdet.Sync(5)
    )
    assert all(torch.equal(w, converged) for w in run.all_weights())
    run.steps(4)
    assert len({w.numpy().tobytes() for w in run.all_weights()}) == 3
    run.steps(1)
    assert run.ensemble.cycle == 1 and len({w.numpy().tobytes() for w in run.all_weights()}) == 1


def test_a_converged_run_continues_with_another_number_of_replicas() -> None:
    first = Run(together=4).steps(20)
    run = Run(together=2).steps(3).loaded(first.saved())
    assert all(torch.equal(w, first.all_weights()[0]) for w in run.all_weights())
    run.steps(2)
    with pytest.raises(ValueError, match="4 replicas that are not equal, this optimizer 2"):
        Run(together=2).loaded(first.steps(2).saved())


def test_a_state_from_before_the_first_step_is_of_the_model_as_it_is() -> None:
    first, other = Run(together=2), Run(together=2)
    for run in (first, other):
        with torch.no_grad():
            next(run.net.parameters()).fill_(0.25)
    resumed = Run(together=2).loaded(first.saved()).steps(3)
    other.steps(3)
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.all_weights(), other.all_weights(), strict=True)
    )


def test_a_state_with_a_parameter_that_never_had_a_gradient_loads_into_torchs_optimizer() -> None:
    net = torch.nn.ModuleList(
        [torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False)]
    )
    optimizer = hdet.FusedAdamW(net.parameters())
    hdet.CoresidentReplicas(net, 2).attach(optimizer)
    net[0].weight.sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(net.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = hdet.FusedAdamW(net.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for stepped in (other, resumed, optimizer):
        net[1].weight.grad = torch.ones(1, 3)
        stepped.step()
        assert [stepped.state[layer.weight]["step"].item() for layer in net] == [2, 1]


@pytest.mark.parametrize("fused", [True, False])
def test_a_group_is_refused_while_an_ensemble_drives_the_optimizer(fused: bool) -> None:
    """What it averages and explores is settled."""
    layers = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizer = (hdet.FusedAdamW if fused else torch.optim.AdamW)(layers[0].parameters())
    ensemble = hdet.Ensemble(optimizer)
    with pytest.raises(
        ValueError, match="driven by an Ensemble, which would not average the new group"
    ):
        optimizer.add_param_group({"params": layers[1].parameters()})
    assert len(optimizer.param_groups) == 1
    ensemble.close()
    optimizer.add_param_group({"params": layers[1].parameters()})
    assert len(hdet.Ensemble(optimizer).parameters) == 4


@pytest.mark.parametrize("k", [0, 1])
def test_a_step_inside_of_use_is_refused_and_changes_nothing(k: int) -> None:
    run = Run(together=2).steps(1)
    run.backward()
    before = run.all_weights()
    with run.replicas.use(k), pytest.raises(ValueError, match="optimizer.step.. was called inside"):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(run.all_weights(), before, strict=True))
    run.optimizer.step()
    assert not torch.equal(run.all_weights()[k], before[k])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_replicas_are_not_copied(copied: Callable[[Any], Any]) -> None:
    run = Run(together=2)
    with pytest.raises(TypeError, match="Make new ones of the copied model"):
        copied((run.net, run.replicas) if copied is not copy.copy else run.replicas)


def test_a_model_that_was_cast_afterwards_is_refused_by_name() -> None:
    run = Run(together=2).steps(1)
    run.net.bfloat16()
    own = list(run.net.parameters())
    with (
        pytest.raises(
            ValueError, match=r"bfloat16 on cpu now, its copy for replica 1 torch.float32 on cpu"
        ),
        run.replicas.use(1),
    ):
        pass
    assert (
        all(one is other for one, other in zip(run.net.parameters(), own, strict=True))
        and not run.replicas.in_use
    )


def test_a_parameter_in_a_nested_list_is_found() -> None:
    class Nested(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.nest: list[Any] = [{"a": (1, [])}]
            self.nest.append(self.nest)

    net = Nested()
    hdet.CoresidentReplicas(net, 2)
    net.nest[0]["a"][1].append(net.weight)
    with pytest.raises(ValueError, match="keeps a parameter in the plain attribute 'nest'"):
        hdet.CoresidentReplicas(net, 2)
