"""`del model, optimizer` frees parameters and state at once, as with torch's optimizers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.testing.rules import copies

from ..freed import left_alive, tensors_of
from .common import BACKENDS, FREE, RULES

pytestmark = pytest.mark.filterwarnings("ignore:no parameter's name says")

FUSED = {
    **{rule.name: partial(rule.fused, **rule.keeps) for rule in [*RULES, FREE] if rule.moments},
    "muon": hdet.FusedMuon,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"max_grad_norm": 1.0},
    "zeroed": {"zero_gradients": True},
    "float32 masters": {"master_weights": "fp32"},
    "split masters": {"master_weights": "split"},
    "bfloat16 moments": {"moment_dtype": torch.bfloat16},
    "8 bits": {"moment_dtype": "8bit"},
    "stochastic": {"stochastic_rounding": True},
}


def train(
    fused: Any, backend: str, options: dict[str, Any], replicas: int = 1, steps: int = 2
) -> tuple[nn.Module, Any]:
    """Of a model with matrices above and below the size of blocks, and one that is transposed."""
    dtype = torch.bfloat16 if options.keys() & {"master_weights", "stochastic_rounding"} else None
    model = nn.Sequential(nn.Linear(40, 130), nn.Linear(130, 40)).to(dtype=dtype)
    model[1].weight.data = torch.empty(130, 40, dtype=dtype).normal_().t()
    optimizer = fused(model.named_parameters(), lr=0.01, backend=backend, **options)
    if replicas > 1:
        optimizer.set_replicas(replicas, copies(replicas))
    for _ in range(steps):
        model(torch.ones(3, 40, dtype=dtype)).sum().backward()
        optimizer.step()
    if replicas > 1:
        optimizer.average_replicas([1.0] * replicas)
    return model, optimizer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
def test_tensors_are_freed_with_the_optimizer(fused: Any, backend: str) -> None:
    def trained() -> dict[str, Any]:
        found = {}
        for name, own in OPTIONS.items():
            for replicas in (1, 3):
                model, optimizer = train(fused, backend, own, replicas)
                made = {**tensors_of(model, optimizer), "optimizer": optimizer}
                found |= {f"{name}, {replicas} replicas: {key}": one for key, one in made.items()}
        return found

    assert left_alive(trained) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_also_after_all_that_an_optimizer_can_do(backend: str) -> None:
    def trained() -> dict[str, Any]:
        model, optimizer = train(hdet.FusedAdamW, backend, {"master_weights": "fp32"})
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        optimizer.write_hyperparameters()
        with torch.no_grad():
            model[0].weight.add_(1.0)
        optimizer.masters(list(model.parameters()))
        optimizer.refresh_masters()
        other = copy.deepcopy((model, optimizer))
        other[1].step()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(3, 40, dtype=torch.bfloat16)).float().sum()).backward()
        scaler.step(optimizer)
        with pytest.raises(ValueError, match="lr"):
            optimizer.param_groups[0]["lr"] = -1.0
            optimizer.step()
        return {**tensors_of(model, optimizer), "optimizer": optimizer, "copy": other[1]}

    assert left_alive(trained) == []
