"""The split form in a step: what users write into a parameter counts, and a NaN does not hide."""

from __future__ import annotations

import pytest
import torch

from hdet import FusedAdamW
from hdet.kernels import StepSettings, StepTensors, step_plan


def _optimizer(backend: str, count: int = 512) -> tuple[torch.nn.Parameter, FusedAdamW]:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(count).bfloat16())
    return param, FusedAdamW([param], lr=1e-2, weight_decay=0.0, master_weights="split", backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_parameter_set_to_zero_moves_again(backend: str) -> None:
    param, optimizer = _optimizer(backend)
    for turn in range(6):
        if turn == 3:
            with torch.no_grad():
                param.zero_()
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert bool((param < -1e-2).all())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_nan_is_seen_in_the_parameter(backend: str) -> None:
    param, lower = torch.ones(64).bfloat16(), torch.zeros(64, dtype=torch.int16)
    moments = torch.zeros(2, 64)
    tensors = StepTensors("adamw", [[param]], [0], [torch.tensor(0.0)], [moments[0]], [moments[1]], [[lower]])
    gradient = torch.ones(64)
    gradient.view(torch.int32)[5] = 0x7FFFFFFF  # the NaN of a GPU's arithmetic, which rounding would carry over to minus zero
    step_plan(tensors, backend).step([gradient], [StepSettings(lr=0.1, beta1=0.9, beta2=0.99)])
    assert param.isnan().nonzero().flatten().tolist() == [5]
