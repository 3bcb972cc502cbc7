"""Optimizers whose state is no list of float tensors: codes, numbers, what follows from weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import hdet
from hdet.optim.snapshot import keeps_weights, reset_moments
from hdet.run.moments import Moments, follows_gradients
from tests.harness import Run, TwoReplicas, model, policies

from ..distributed import run_ranks
from .helpers import foreign, told


class Stepping(torch.optim.Optimizer):
    """A step of SGD; subclasses keep something beside it."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self.kept(p, group)
                p.sub_(p.grad, alpha=group["lr"])


class Coded(Stepping):
    """As bitsandbytes' optimizers of 8 bits: codes, and what they are multiplied by."""

    def kept(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        scale = p.grad.abs().max().clamp(min=1e-12)
        codes = (p.grad / scale * 127 + 128).to(torch.uint8)
        step = self.state[p].get("step", 0) + 1
        return {"step": step, "state1": codes, "absmax1": scale.reshape(1)}


class Masked(Stepping):
    """Nested, and of truth values."""

    def kept(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"inner": {"signs": p.grad > 0, "size": p.grad.abs()}}


class Uneven(Stepping):
    """Its codes follow from the parameters."""

    def kept(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"codes": (p * 100).to(torch.int8)}


class Wandering(Stepping):
    """Keeps what follows from its parameters wherever it can: in groups and by parameter."""

    def kept(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        norm = p.norm()
        group["distance"] = max(group.get("distance", 0.0), float(norm))
        group["radii"] = [norm.clone(), torch.stack([norm, norm])]
        group["steps"] = group.get("steps", 0) + 1
        inside = {"list": [p.clone()], "inner": {"past": p.clone()}}
        return {"step": 3, "norm": norm.clone(), "last": float(norm), **inside}


def flat_state(optimizer: torch.optim.Optimizer) -> list[float]:
    """All numbers that it keeps, settings included."""
    numbers: list[float] = []

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            numbers.extend(value.detach().double().flatten().tolist())
        elif isinstance(value, (dict, list, tuple)):
            for inner in value.values() if isinstance(value, dict) else value:
                add(inner)
        elif isinstance(value, (int, float)):
            numbers.append(float(value))

    for group in optimizer.param_groups:
        add({key: value for key, value in group.items() if key != "params"})
        add([optimizer.state[p] for p in group["params"]])
    return numbers


free = foreign("schedulefree", "AdamWScheduleFree")
OPTIMIZERS: dict[str, Any] = {
    "Wandering": Wandering,
    "Prodigy": foreign("prodigyopt", "Prodigy", d0=1e-2),
    "DAdaptAdam": foreign("dadaptation", "DAdaptAdam", d0=1e-2),
    "AdamWScheduleFree": free,
    "DoG": foreign("dog", "DoG"),
    "ASGD": foreign("torch.optim", "ASGD"),
    "SGD": foreign("torch.optim", "SGD", momentum=0.9, weight_decay=0.1),
    "FusedAdam": foreign("hdet", "FusedAdam", weight_decay=0.1),
}


def trained(rank: int, world: int) -> Any:
    """By optimizer and gradients: (weights, state) within a cycle, at its end, within another one
    and after `converge`."""
    found = {}
    for name, make in OPTIMIZERS.items():
        for gradients in ("shared", "local"):
            # Which schedule-free optimizers need, also with shared gradients.
            averages = gradients == "local" or name == "AdamWScheduleFree"
            settings = {"gradients": gradients, "moments": "average"} if averages else {}
            settings |= {"ddp": gradients == "shared", "optimizer": make}
            run = Run(rank, lr=0.1, scheduler=None, every=3, spread=0.5, **settings)
            seen = found[name, gradients] = []
            for steps in (2, 1, 5, 0):
                run.steps(steps)
                if steps == 0:
                    run.ensemble.converge()
                seen.append((run.weights(), flat_state(run.optimizer)))
            assert run.ensemble.in_sync
    return found


def test_in_sync_means_that_nothing_of_the_optimizer_differs() -> None:
    """Else replicas would go on with numbers of their own for good, and nobody would know."""
    one, two = run_ranks(trained, 2)
    for case, seen in one.items():
        pairs = zip((0, 1, 0, 1), seen, two[case], strict=True)
        for equal, (weights, state), (others, theirs) in pairs:
            assert torch.equal(weights, others) == equal, case
            assert (state == theirs) == equal, case


class Parts(Stepping):
    """Made of two others, as many a Muon with an AdamW for what is no matrix."""

    def __init__(self, parameters: Any, lr: float) -> None:
        own = list(parameters)
        super().__init__(own, lr)
        self.parts = [Wandering(own[:2], lr), torch.optim.AdamW(own[2:], lr)]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("kind", [Wandering, Parts])
def test_a_reset_puts_back_numbers_of_groups_and_what_is_inside(kind: Any) -> None:
    """Also where a state has been loaded since, which puts other groups in the place of the old."""
    net = model()
    optimizer = kind(net.parameters(), 0.1)
    moments = Moments("reset", optimizer, hdet.Replicas(0, 2), 1 << 20)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for one in getattr(optimizer, "parts", [optimizer]):
            one.load_state_dict(one.state_dict())
    moments.reset()
    for one in getattr(optimizer, "parts", [optimizer]):
        assert not one.state
        assert not {"distance", "radii", "steps"} & one.param_groups[0].keys()


class Own(torch.optim.AdamW):
    """One that hdet does not know."""


def equal_state(rank: int, world: int) -> Any:
    runs = [Run(rank, optimizer=kind, every=3).steps(8) for kind in (torch.optim.AdamW, Own)]
    parting = Run(rank, optimizer=Uneven, scheduler=None, every=3, lr=0.1, spread=0.9).steps(2)
    ends = [(run.weights().tolist(), flat_state(run.optimizer)) for run in runs]
    return *ends, told(parting.step)


def test_state_that_follows_from_gradients_is_left_and_codes_that_differ_are_refused() -> None:
    """The first stays each replica's own, bitwise, and nothing more than a plain average is sent;
    the others before anything is averaged."""
    for known, own, message in run_ranks(equal_state, 2):
        assert known == own
        assert "Uneven keeps 'codes' of parameter 0 in torch.int8" in message


@pytest.mark.parametrize(
    ("kind", "key", "dtype"), [(Coded, "state1", "uint8"), (Masked, "inner", "bool")]
)
def test_state_that_would_be_averaged_in_part_is_refused(kind: Any, key: str, dtype: str) -> None:
    def run(moments: str) -> Run:
        settings = {"gradients": "local", "moments": moments, "scheduler": None}
        return Run(optimizer=kind, replicas=hdet.Replicas(0, 2, None), **settings)

    said = f"{kind.__name__} keeps '{key}' of parameter 0 in torch.{dtype}.*"
    with pytest.raises(ValueError, match=said + "pass moments='reset'.*'keep'"):
        run("average").step()
    for moments in ("keep", "reset"):
        run(moments).step()


def ensemble(**settings: Any) -> hdet.Ensemble:
    settings = policies(**{"replicas": TwoReplicas(), **settings})
    return hdet.Ensemble(free(model().parameters(), 1e-3), **settings)


@pytest.mark.parametrize(
    ("gradients", "moments"),
    [("local", "keep"), ("local", "reset"), ("shared", "reset"), ("shared", None)],
)
def test_replicas_that_part_average_weights_in_a_state(gradients: str, moments: Any) -> None:
    said = "AdamWScheduleFree keeps weights of its own beside the parameters.*"
    with pytest.raises(ValueError, match=said + "pass moments='average'"):
        ensemble(gradients=gradients, moments=moments)
    ensemble(knobs=[hdet.LearningRate(0)])  # where they cannot part nothing is asked
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


@pytest.mark.parametrize(
    ("make", "follows"),
    [
        (torch.optim.AdamW, True),
        (hdet.FusedLion, True),
        (torch.optim.Adam, False),
        (hdet.FusedSGD, True),  # without momentum it has no moments
        (partial(hdet.FusedSGD, momentum=0.9), False),
    ],
)
def test_decay_that_would_be_in_the_gradient_may_be_scheduled_from_0(
    make: Any, follows: bool
) -> None:
    optimizer = make(model().parameters(), lr=0.1, weight_decay=0.0)
    assert follows_gradients(optimizer) == follows


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
