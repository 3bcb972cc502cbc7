"""Optimizers of other libraries: schedule-free ones, whose state holds weights, and wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from hdet.run.snapshot import keeps_weights, reset_moments
from tests.harness import Run, TwoReplicas, model, policies

from ..distributed import run_ranks

schedulefree = pytest.importorskip("schedulefree", reason="the peer is not installed")


def free(parameters: Any, lr: float, weight_decay: float = 0.0) -> Any:
    optimizer = schedulefree.AdamWScheduleFree(parameters, lr=lr, weight_decay=weight_decay)
    optimizer.train()
    return optimizer


def ensemble(**settings: Any) -> hdet.Ensemble:
    settings = policies(**{"replicas": TwoReplicas(), **settings})
    return hdet.Ensemble(free(model().parameters(), 1e-3), **settings)


@pytest.mark.parametrize(
    ("gradients", "moments"),
    [("local", "keep"), ("local", "reset"), ("shared", "reset"), ("shared", None)],
)
def test_replicas_that_part_have_to_average_the_weights_in_its_state(
    gradients: str, moments: str | None
) -> None:
    said = "AdamWScheduleFree keeps weights of its own beside the parameters.*"
    with pytest.raises(ValueError, match=said + "pass moments='average'"):
        ensemble(gradients=gradients, moments=moments)


def test_where_they_cannot_part_nothing_is_asked() -> None:
    ensemble(knobs=[hdet.LearningRate(0)])
    ensemble(replicas=hdet.Replicas(0, 1))


class Prepared(torch.optim.Optimizer):
    """As accelerate wraps every optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_wrapper_is_what_it_wraps() -> None:
    net = model()
    optimizer = Prepared(hdet.FusedAdamW(net.parameters(), lr=1e-3))
    assert not keeps_weights(optimizer) and keeps_weights(Prepared(free(net.parameters(), 1e-3)))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(moment.any() for moment in moments)
    reset_moments(optimizer)
    for state, moment in zip(optimizer.state.values(), moments, strict=True):
        assert state["exp_avg"] is moment and not moment.any(), "in place"


def evaluated(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = Run(rank, optimizer=free, every=4, moments="average").steps(8)
    trained = run.weights()
    run.optimizer.eval()
    at = run.weights()
    run.optimizer.train()
    return trained, at, run.steps(2).weights()


def test_replicas_evaluate_the_same_weights() -> None:
    one, two = run_ranks(evaluated, 2)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[0], one[1]) and not torch.equal(one[2], two[2])
