"""Optimizers whose state is no list of float tensors: codes, numbers in groups, what follows from parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run, model

from ..distributed import run_ranks


class Stepping(torch.optim.Optimizer):
    """A step of SGD; subclasses keep something beside it."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.keep(p, group)
                p.sub_(p.grad, alpha=group["lr"])

    def keep(self, p: torch.Tensor, group: dict[str, Any]) -> None: ...


class Coded(Stepping):
    """As bitsandbytes' optimizers of 8 bits: codes, and what they are multiplied by."""

    def keep(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        scale = p.grad.abs().max().clamp(min=1e-12)
        codes = (p.grad / scale * 127 + 128).to(torch.uint8)
        self.state[p] = {
            "step": self.state[p].get("step", 0) + 1,
            "state1": codes,
            "absmax1": scale.reshape(1),
        }


class Masked(Stepping):
    """Nested, and of truth values."""

    def keep(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p] = {"inner": {"signs": p.grad > 0, "size": p.grad.abs()}}


class Wandering(Stepping):
    """Keeps, wherever it can, what follows from its parameters: numbers and tensors, of groups and of parameters."""

    def keep(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        norm = p.norm()
        group["distance"] = max(group.get("distance", 0.0), float(norm))
        group["radii"] = [norm.clone(), torch.stack([norm, norm])]
        group["steps"] = group.get("steps", 0) + 1
        self.state[p] = {
            "step": 3,
            "norm": norm.clone(),
            "last": float(norm),
            "list": [p.clone()],
            "inner": {"past": p.clone()},
        }


def elsewhere(package: str, name: str, **settings: Any) -> Any:
    def make(parameters: Any, lr: float, weight_decay: float = 0.0) -> Any:
        optimizer = getattr(pytest.importorskip(package), name)(parameters, lr=lr, **settings)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return make


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


OPTIMIZERS = {
    "in groups and in parameters": Wandering,
    "Prodigy": partial(elsewhere, "prodigyopt", "Prodigy", d0=1e-2),
    "DAdaptAdam": partial(elsewhere, "dadaptation", "DAdaptAdam", d0=1e-2),
    "AdamWScheduleFree": partial(elsewhere, "schedulefree", "AdamWScheduleFree"),
    "DoG": partial(elsewhere, "dog", "DoG"),
    "ASGD": lambda parameters, lr, weight_decay: torch.optim.ASGD(parameters, lr=lr),
}  # fmt: skip


def trained(rank: int, world: int, name: str, gradients: str, moments: str | None) -> Any:
    make = OPTIMIZERS[name]
    make = make() if isinstance(make, partial) else make
    local = gradients == "local"
    settings = {"gradients": gradients, "moments": moments} if local or moments else {}
    run = Run(
        rank, optimizer=make, lr=0.1, scheduler=None, every=3, ddp=not local, spread=0.5, **settings
    )
    seen = []
    for steps in (
        2,
        1,
        5,
    ):  # within a cycle, at its end, and within another one that `converge` ends
        run.steps(steps)
        seen.append((run.weights(), flat_state(run.optimizer)))
    run.ensemble.converge()
    return seen + [(run.weights(), flat_state(run.optimizer))], run.ensemble.in_sync


CASES = [("shared", None), ("local", "average")]


@pytest.mark.parametrize(("gradients", "moments"), CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_sync_means_that_nothing_of_the_optimizer_differs(
    name: str, gradients: str, moments: str | None
) -> None:
    """Else replicas would go on with numbers of their own for good, and nobody would know."""
    if name == "AdamWScheduleFree":
        moments = "average"  # which it needs, also with shared gradients
    (one, in_sync), (two, _) = run_ranks(trained, 2, name, gradients, moments)
    assert in_sync
    for moment, ((weights, state), (others, theirs)) in enumerate(zip(one, two, strict=True)):
        equal = moment in (1, 3)
        assert torch.equal(weights, others) == equal
        assert (state == theirs) == equal, (
            moment,
            [(a, b) for a, b in zip(state, theirs, strict=True) if a != b][:5],
        )


def test_a_reset_puts_numbers_of_groups_back() -> None:
    (one, _), (two, _) = run_ranks(trained, 2, "in groups and in parameters", "local", "reset")
    assert one[1][1] == two[1][1] and len(one[1][1]) == 1, "the rate alone"


def equal_state(rank: int, world: int) -> Any:
    """Its state follows from gradients alone: it stays each replica's own, bitwise, and nothing more than a plain average is sent."""

    class Own(torch.optim.AdamW):
        pass

    found = []
    for kind in (torch.optim.AdamW, Own):
        run = Run(rank, optimizer=kind, every=3).steps(8)
        found.append((run.weights(), flat_state(run.optimizer)))
    return found


def test_state_that_follows_from_gradients_alone_is_left_as_it_is() -> None:
    for known, own in run_ranks(equal_state, 2):
        assert torch.equal(known[0], own[0]) and known[1] == own[1]


@pytest.mark.parametrize(
    ("kind", "key", "dtype"), [(Coded, "state1", "uint8"), (Masked, "inner", "bool")]
)
def test_state_that_would_be_averaged_in_part_is_refused_at_the_first_step(
    kind: Any, key: str, dtype: str
) -> None:
    net = model()
    run = Run(
        net=net,
        optimizer=kind,
        scheduler=None,
        replicas=hdet.Replicas(0, 2, None),
        gradients="local",
        moments="average",
    )
    with pytest.raises(
        ValueError,
        match=f"{kind.__name__} keeps '{key}' of parameter 0 in torch.{dtype}.*pass moments='reset'.*'keep'",
    ):
        run.step()
    for moments in ("keep", "reset"):
        Run(
            net=net,
            optimizer=kind,
            scheduler=None,
            replicas=hdet.Replicas(0, 2, None),
            gradients="local",
            moments=moments,
        ).step()


class Uneven(Coded):
    """Its codes follow from the parameters."""

    def keep(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p] = {"codes": (p * 100).to(torch.int8)}


def parted_codes(rank: int, world: int) -> Any:
    run = Run(rank, optimizer=Uneven, scheduler=None, every=3, lr=0.1, spread=0.9).steps(2)
    before = run.weights()
    try:
        run.step()
    except ValueError as error:
        run.backward()
        return str(error), before
    return "no error", before


def test_codes_that_differ_under_shared_gradients_are_refused_before_anything_is_averaged() -> None:
    for message, _ in run_ranks(parted_codes, 2):
        assert "Uneven keeps 'codes' of parameter 0 in torch.int8" in message
