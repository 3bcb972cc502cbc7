"""Ranges for profilers: there when they are asked for, nothing when they are not."""

from __future__ import annotations

import os
import subprocess
import sys

from hdet.profiling import ON, ranged, span

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


def _names(**environment: str) -> str:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("HDET_NVTX", "NVTX_INJECTION64_PATH")
    }
    command = [sys.executable, "-c", STEP]
    return subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True, check=True
    ).stdout


def test_ranges_of_a_step_and_an_average_are_seen_by_a_profiler() -> None:
    names = _names(HDET_NVTX="1")
    for name in ("hdet.optimizer.step", "hdet.step", "hdet.average"):
        assert f"'{name}'" in names


def test_a_profiler_that_injects_itself_turns_them_on() -> None:
    assert "'hdet.step'" in _names(NVTX_INJECTION64_PATH="/nowhere")


def test_off_a_ranged_function_is_the_function_itself() -> None:
    assert "hdet." not in _names()
    if not ON:
        assert ranged("name")(len) is len
        assert span("one") is span("two")
