"""More elements than an int can count."""

from __future__ import annotations

import math

import pytest
import torch

from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ELEMENTS = 2**31 + 17
SETTINGS = [StepSettings(0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)]


def test_a_tensor_of_more_than_2_31_elements(backend: str) -> None:
    """bfloat16 throughout: 8 bytes an element. Its ends and its middle are as in a small tensor."""
    if torch.cuda.mem_get_info()[0] < 10 * ELEMENTS:
        pytest.skip(f"needs {10 * ELEMENTS / 1e9:.0f} GB of free memory")
    bf16 = torch.bfloat16
    large = [
        torch.full((ELEMENTS,), value, dtype=bf16, device="cuda") for value in (1.0, 0.0, 0.0, 0.5)
    ]
    small = [torch.full((64,), value, dtype=bf16, device="cuda") for value in (1.0, 0.0, 0.0, 0.5)]
    for param, first, second, gradient in (large, small):
        for place in (0, 31, param.numel() - 1):
            param[place], gradient[place] = 3.0, -2.0
        tensors = StepTensors(
            "adamw", [[param]], [0], [torch.zeros((), device="cuda")], [[first], [second]]
        )
        plan = kernels.step_plan(tensors, backend)
        plan.step([gradient], SETTINGS, StepOptions(max_norm=math.inf))
        assert plan.norm.isfinite()
    assert torch.equal(large[0][:64][:32], small[0][:32])
    assert torch.equal(large[0][-1:], small[0][-1:])
    unchanged = small[0][1]
    for part in (large[0][32:4096], large[0][2**30 - 5 : 2**30 + 5], large[0][2**31 - 4096 : -1]):
        assert bool((part == unchanged).all())
    assert bool((large[1][2**31 :][:-1] == small[1][1]).all()) and bool(
        (large[2][2**31 - 9 : -1] == small[2][1]).all()
    )
    torch.cuda.empty_cache()
