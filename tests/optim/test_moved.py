"""Memory of states that moves between two steps, as savers in other processes, offloading and
whoever prunes or grows a model move it: the next step finds it, or names what it cannot use."""

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

from .common import BACKENDS, BY_NAME, FREE, MUON, OURS, Rule, assert_equal, run
from .test_replicas import copies


def away_and_back(tensor: Tensor) -> None:
    kept, storage = tensor.clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    tensor.copy_(kept)


def turned(tensor: Tensor) -> None:
    """At the same address."""
    kept = tensor.clone()
    tensor.data = tensor.data.view(tensor.shape[::-1]).t()
    tensor.copy_(kept)


def resized(tensor: Tensor) -> None:
    kept = tensor.clone()
    tensor.resize_(4 * tensor.numel() + 999).resize_(kept.shape).copy_(kept)


Change = Callable[[Tensor], Any]
WAYS: dict[str, Change] = {
    "data": lambda tensor: setattr(tensor, "data", tensor.clone()),
    "turned": turned,
    "set": lambda tensor: tensor.set_(tensor.clone()),
    "swapped": lambda tensor: torch.utils.swap_tensors(tensor, tensor.clone()),
    "shared": Tensor.share_memory_,
    "sent": ForkingPickler.dumps,  # what a queue of torch.multiprocessing does
    "storage away and back": away_and_back,
    "resized": resized,
}
REFUSED: dict[str, tuple[Change, str]] = {
    "emptied": (lambda tensor: tensor.untyped_storage().resize_(0), "memory"),
    "shrunk": (lambda tensor: tensor.untyped_storage().resize_(2), "memory"),
    "smaller": (lambda tensor: tensor.resize_(3), "shape"),
    "larger": (lambda tensor: tensor.resize_(99, 99), "shape"),
}
NAMES = {
    **dict.fromkeys(("master_param", "remainder", "replica_masters"), "master of"),
    "replica_params": "parameter",
    "replica_z": "z of",
    **{f"exp_avg{end}_scale": f"scales of exp_avg{end}" for end in ("", "_sq")},
}
"""where a message names a state otherwise than its key"""
BF16 = torch.bfloat16
KINDS: list[tuple[Rule, dict[str, Any], int]] = [
    *((rule, {}, 1) for rule in OURS),
    *((BY_NAME["adamw"], {"moment_dtype": kind}, 1) for kind in (BF16, "8bit")),
    (BY_NAME["adamw"], {"master_weights": "fp32"}, 1),
    (MUON, {"master_weights": "fp32"}, 3),
    (BY_NAME["adamw"], {"master_weights": "split"}, 3),
    (FREE, {"master_weights": "split"}, 3),
    (BY_NAME["adamw"], {"max_grad_norm": 1.0, "zero_gradients": True}, 3),
]
every_kind = pytest.mark.parametrize(
    ("rule", "options", "count"), KINDS, ids=lambda x: getattr(x, "name", str(x))
)


def trained(rule: Rule, options: dict[str, Any], count: int) -> Any:
    """An optimizer of two matrices, after two steps."""
    generator = torch.Generator().manual_seed(0)
    dtype = BF16 if "master_weights" in options else torch.float32
    params = [Parameter(torch.randn(80, 60, generator=generator).to(dtype)) for _ in range(2)]
    optimizer = rule.fused(params, lr=1e-2, **rule.keeps, **options)
    if count > 1:
        optimizer.set_replicas(count, copies(count))
        optimizer.multipliers = [[0.5 + k] for k in range(count)]
    run(optimizer, params, range(2))
    return optimizer


def state_of(optimizer: Any, place: int = 0) -> list[tuple[str, Tensor]]:
    state = optimizer.state[optimizer.param_groups[0]["params"][place]]
    return [
        (key, tensor)
        for key, value in state.items()
        for tensor in (value if isinstance(value, list) else [value])
    ]


def everything(optimizer: Any) -> list[Tensor]:
    states = [*state_of(optimizer), *state_of(optimizer, 1)]
    return [*optimizer.param_groups[0]["params"], *(tensor for _, tensor in states)]


def step(optimizer: Any, number: int) -> None:
    run(optimizer, optimizer.param_groups[0]["params"], range(number, number + 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@every_kind
def test_a_step_finds_what_has_moved(
    rule: Rule,
    options: dict[str, Any],
    count: int,
    way: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "torch":  # and a torch of another interface
        monkeypatch.setattr(native, "torch_interface", None)
    made = [trained(rule, {**options, "backend": backend}, count) for _ in range(2)]
    for place, (key, _) in enumerate(state_of(made[0])):
        if way == "turned" and (key == "replica_params" or "moment_dtype" in options):
            continue  # replicas lie as their parameter does; blocks of codes follow the memory
        WAYS[way](state_of(made[0])[place][1])
        for optimizer in made:
            step(optimizer, 2 + place)
        assert_equal(*map(everything, made))


@pytest.mark.parametrize("way", REFUSED)
@every_kind
def test_memory_that_cannot_be_used_is_refused_by_name(
    rule: Rule, options: dict[str, Any], count: int, way: str
) -> None:
    change, message = REFUSED[way]
    for place, (key, _) in enumerate(state_of(trained(rule, options, count))):
        optimizer = trained(rule, options, count)
        tensor = state_of(optimizer)[place][1]
        others = [other for other in everything(optimizer) if other is not tensor]
        change(tensor)
        before = copy.deepcopy(others)
        with pytest.raises(ValueError, match=f"{NAMES.get(key, key)}.* .*{message}"):
            step(optimizer, 2)
        assert_equal(others, before)
