"""Ranges for profilers: there when they are asked for, nothing when they are not."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

from hdet.tensors import profiling

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


def test_ranges_are_seen_where_they_are_asked_for() -> None:
    names = subprocess.run(
        [sys.executable, "-c", STEP], env={**os.environ, "HDET_NVTX": "1"}, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    for name in ("hdet.optimizer.step", "hdet.step", "hdet.average"):
        assert f"'{name}'" in names


@pytest.mark.parametrize(("environment", "seen"), [
    ({"HDET_NVTX": "1"}, True), ({"NVTX_INJECTION64_PATH": "/nowhere"}, True), ({}, False),
])  # fmt: skip
def test_off_a_ranged_function_is_the_function_itself(
    environment: dict[str, str], seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on also under a profiler that injects itself."""
    for switch in ("HDET_NVTX", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(switch, raising=False)
    for switch, value in environment.items():
        monkeypatch.setenv(switch, value)
    switched = runpy.run_path(profiling.__file__)
    assert (switched["ranged"]("name")(len) is not len) is switched["ON"] is seen
