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

from .common import BACKENDS, BY_NAME, FREE, MUON, OURS, Rule, assert_equal, run, state_of
from .test_replicas import copies


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
    "emptied": (lambda tensor: tensor.untyped_storage().resize_(0), "memory"),
    "shrunk": (lambda tensor: tensor.untyped_storage().resize_(2), "memory"),
    "smaller": (lambda tensor: tensor.resize_(3), "shape"),
    "larger": (lambda tensor: tensor.resize_(99, 99), "shape"),
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


class Trained:
    """Two matrices after two steps."""

    def __init__(self, rule: Rule, count: int, options: dict[str, Any]) -> None:
        dtype = torch.bfloat16 if "master_weights" in options else torch.float32
        self.params = [
            Parameter(torch.linspace(-1, k, 4800).view(80, 60).to(dtype)) for k in (1, 2)
        ]
        self.optimizer = rule.fused(self.params, lr=1e-2, **rule.keeps, **options)
        if count > 1:
            self.optimizer.set_replicas(count, copies(count))
            self.optimizer.multipliers = [[0.5 + k] for k in range(count)]
        self.step(0)
        self.step(1)

    def step(self, number: int) -> None:
        run(self.optimizer, self.params, range(number, number + 1))

    def states(self) -> list[tuple[str, Tensor]]:
        return [
            (key, tensor)
            for state in state_of(self.optimizer)
            for key, value in state.items()
            for tensor in (value if isinstance(value, list) else [value])
        ]

    def tensors(self) -> list[Tensor]:
        return [*self.params, *(tensor for _, tensor in self.states())]


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
    moved, unmoved = (Trained(rule, count, {**options, "backend": backend}) for _ in range(2))
    for place, (key, _) in enumerate(moved.states()[::2]):
        if way == "turned" and (key == "replica_params" or "moment_dtype" in options):
            continue  # replicas lie as their parameter does; blocks of codes follow the memory
        tensor = moved.states()[2 * place][1]
        kept = tensor.clone()
        WAYS[way](tensor)
        tensor.copy_(kept)
        for one in (moved, unmoved):
            one.step(2 + place)
        assert_equal(moved.tensors(), unmoved.tensors())


@pytest.mark.parametrize("way", REFUSED)
@every_kind
def test_memory_that_cannot_be_used_is_refused_by_name(
    rule: Rule, count: int, options: dict[str, Any], way: str
) -> None:
    change, message = REFUSED[way]
    for place in range(len(Trained(rule, count, options).states()) // 2):
        trained = Trained(rule, count, options)
        others = trained.tensors()
        change(others.pop(len(trained.params) + place))
        before = copy.deepcopy(others)
        with pytest.raises(ValueError, match=f"(of|parameter).*{message}"):
            trained.step(2)
        assert_equal(others, before)
