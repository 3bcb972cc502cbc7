"""Ranges for profilers: there when they are asked for, nothing when they are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hdet.tensors.profiling import ON, ranged

STEP = """
import torch, hdet
param = torch.nn.Parameter(torch.randn(8))
param.grad = torch.randn(8)
optimizer = hdet.FusedAdamW([param])
with torch.profiler.profile() as profile:
    optimizer.step()
    hdet.kernels.average_(torch.randn(2, 8), [1, 1])
print([event.key for event in profile.key_averages()])
"""


@pytest.mark.parametrize(("environment", "seen"), [
    ({"HDET_NVTX": "1"}, True), ({"NVTX_INJECTION64_PATH": "/nowhere"}, True), ({}, False),
])  # fmt: skip
def test_ranges_are_seen_where_they_are_asked_for(environment: dict[str, str], seen: bool) -> None:
    """Also by a profiler that injects itself."""
    switches = ("HDET_NVTX", "NVTX_INJECTION64_PATH")
    inherited = {key: value for key, value in os.environ.items() if key not in switches}
    names = subprocess.run(
        [sys.executable, "-c", STEP], env={**inherited, **environment}, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    for name in ("hdet.optimizer.step", "hdet.step", "hdet.average"):
        assert (f"'{name}'" in names) is seen


@pytest.mark.skipif(ON, reason="ranges are on")
def test_off_a_ranged_function_is_the_function_itself() -> None:
    assert ranged("name")(len) is len
