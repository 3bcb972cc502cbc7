"""The CUDA sources themselves, on the host and under the address and undefined-behaviour
sanitizers, in a process of their own.

csrc/cuda is compiled by a C++ compiler behind shim/cuda_runtime.h: a grid is a loop over its
blocks, a phase of a kernel a loop over the threads of a block. The tables of all backends run on it
as backend="cuda", and shim/checks.py asks for the bits of the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pybind11", reason="building needs pybind11")
from ..limits import HANG_S
from .shim import build

HERE = Path(__file__).resolve().parent
TABLES = [
    f"test_{name}.py" for name in ("step", "average", "copy", "norm", "numbers", "far_offsets")
]
pytestmark = [
    pytest.mark.skipif(
        build.COMPILER is None or not build.SOURCES.exists(),
        reason="needs a C++ compiler and hdet's sources",
    ),
    pytest.mark.timeout(6 * HANG_S),  # the build, and a thousand tests under sanitizers
]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """That of a process with the shim for hdet._C."""
    libraries = [build.sanitizer_library(name) for name in ("libasan.so", "libstdc++.so")]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip(f"{build.COMPILER} has no libasan.so to preload")
    return {
        **os.environ,
        "HDET_SHIM": str(build.build()),
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=build.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_cuda_sources_on_the_host(environment: dict[str, str]) -> None:
    files = [str(HERE / name) for name in ("shim/checks.py", *TABLES)]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.shim.plugin")
    result = run(environment, "-m", "pytest", *options, *files)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) > 300 and "skipped" not in result.stdout, (
        result.stdout[-500:]
    )


# That the sanitizers would notice: the sources run on tables that are wrong.
BROKEN = """
import tests.kernels.shim.plugin
import torch
from hdet import kernels
from hdet.kernels import StepSettings, StepTensors
p, m, v = (torch.ones(1000) for _ in range(3))
plan = kernels.step_plan(StepTensors("adamw", [[p]], [0], [torch.zeros(())], [[m], [v]]), "cuda")
plan.placed_chunks.view(torch.int32)[0, 5] += {longer}
plan.addresses[0] += {bytes}
plan.step([torch.ones(1000)], [StepSettings(0.1, beta1=0.9, beta2=0.9)])
print("nothing noticed")
"""


@pytest.mark.parametrize(
    ("longer", "bytes_further", "report"),
    [
        (64, 0, "AddressSanitizer: heap-buffer-overflow"),
        (0, -2, "runtime error: .* misaligned address"),
    ],
    ids=["a chunk that is too long", "an odd address"],
)
def test_the_sanitizers_notice(
    environment: dict[str, str], longer: int, bytes_further: int, report: str
) -> None:
    result = run(environment, "-c", BROKEN.format(longer=longer, bytes=bytes_further))
    assert result.returncode != 0 and "nothing noticed" not in result.stdout
    assert re.search(report, result.stderr), result.stderr[-3000:]
