"""Memory of states that moves between two steps, as queues of processes, offloading and whoever
prunes or grows a model move it: the next step finds it, or names what it cannot use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hdet.kernels import native
from hdet.optim import moment_storage

from .common import BACKENDS, BY_NAME, FREE, MUON, OURS, Rule, assert_equal, run, state_of
from .test_replicas import replicated


def away_and_back(tensor: Tensor) -> None:
    storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)


Change = Callable[[Tensor], Any]
WAYS: dict[str, Change] = {
    "data": lambda tensor: setattr(tensor, "data", torch.empty_like(tensor)),
    "turned": lambda tensor: tensor.as_strided_(tensor.shape, tensor.t().contiguous().t().stride()),
    "set": lambda tensor: tensor.set_(torch.empty_like(tensor)),
    "swapped": lambda tensor: torch.utils.swap_tensors(tensor, torch.empty_like(tensor)),
    "shared": Tensor.share_memory_,
    "sent": ForkingPickler.dumps,  # what a queue of torch.multiprocessing does
    "storage away and back": away_and_back,
    "resized": lambda tensor: [tensor.resize_(9999).resize_(kept) for kept in (tensor.shape,)],
}
REFUSED: dict[str, tuple[Change, str]] = {
    "emptied": (lambda tensor: tensor.untyped_storage().resize_(0), "has no memory"),
    "shrunk": (lambda tensor: tensor.untyped_storage().resize_(2), "storage was resized"),
    "smaller": (lambda tensor: tensor.resize_(2), "shape"),
}
KINDS: list[tuple[Rule, int, dict[str, Any]]] = [
    *((rule, 1, {}) for rule in OURS),
    (BY_NAME["adamw"], 1, {"moment_dtype": torch.bfloat16}),
    (BY_NAME["adamw"], 1, {"moment_dtype": "8bit"}),
    (BY_NAME["adamw"], 1, {"master_weights": "fp32"}),
    (MUON, 3, {"master_weights": "fp32"}),
    (BY_NAME["adamw"], 3, {"master_weights": "split"}),
    (FREE, 3, {"master_weights": "split"}),
    (BY_NAME["adamw"], 3, {"max_grad_norm": 1.0, "zero_gradients": True}),
]
every_kind = pytest.mark.parametrize(
    ("rule", "count", "options"), KINDS, ids=lambda x: getattr(x, "name", str(x))
)


def trained(rule: Rule, count: int, options: dict[str, Any]) -> tuple[list[Parameter], Any]:
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    params, optimizer, _ = replicated(count, rule, dtype, **options)
    run(optimizer, params, range(2))
    return params, optimizer


def tensors_of(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    entries = ((key, x if isinstance(x, list) else [x]) for key, x in state.items())
    return [(key, tensor) for key, tensors in entries for tensor in tensors]


def everything(params: list[Parameter], optimizer: Any) -> list[Tensor]:
    """Of the states the first one first."""
    return [*(t for s in state_of(optimizer) for _, t in tensors_of(s)), *params]


@pytest.fixture(autouse=True)
def small_tensors_have_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment_storage, "SMALLEST", 500)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@every_kind
def test_a_step_finds_what_has_moved(
    rule: Rule,
    count: int,
    options: dict[str, Any],
    way: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "torch":  # and a torch of another interface
        monkeypatch.setattr(native, "torch_interface", None)
    moved, unmoved = (trained(rule, count, {**options, "backend": backend}) for _ in range(2))
    for place, (key, _) in enumerate(tensors_of(state_of(moved[1])[0])):
        if way == "turned" and (key == "replica_params" or "moment_dtype" in options):
            continue  # replicas lie as their parameter does; blocks of codes follow the memory
        tensor = everything(*moved)[place]
        kept = tensor.clone()
        WAYS[way](tensor)
        tensor.copy_(kept)
        for params, optimizer in (moved, unmoved):
            run(optimizer, params, range(2 + place, 3 + place))
        assert_equal(everything(*moved), everything(*unmoved))


@pytest.mark.parametrize("way", REFUSED)
@every_kind
def test_memory_that_cannot_be_used_is_refused_by_name(
    rule: Rule, count: int, options: dict[str, Any], way: str
) -> None:
    change, message = REFUSED[way]
    for place in range(len(tensors_of(state_of(trained(rule, count, options)[1])[0]))):
        params, optimizer = trained(rule, count, options)
        others = everything(params, optimizer)
        change(others.pop(place))
        before = copy.deepcopy(others)
        with pytest.raises(ValueError, match=f"(of|parameter).*{message}"):
            run(optimizer, params, range(2, 3))
        assert_equal(others, before)
