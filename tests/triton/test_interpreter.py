"""The Triton kernels on any machine: Triton decides when it is imported whether it interprets,
so each test here is a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..limits import HANG_S

pytest.importorskip("triton", reason="Triton is not installed; there are wheels for Linux")
HERE = Path(__file__).parent


def run(*command: str, limit: float = HANG_S, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_in_the_interpreter() -> None:
    arguments = ("-q", "-p", "no:cacheprovider", "--no-header", os.fspath(HERE / "interpreted.py"))
    output = run("-m", "pytest", *arguments, limit=2 * HANG_S, TRITON_INTERPRET="1")
    summary = output.rstrip().splitlines()[-1]  # test names have these words, too
    assert "passed" in summary and "failed" not in summary and "skipped" not in summary, output[
        -2000:
    ]


WITHOUT_A_BUILD = """
import sys
sys.modules["hdet._C"] = None  # as if it had never been built
import torch, hdet
from hdet import kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors
assert kernels.available()["cpu"] != "usable" == kernels.available()["triton"]
left = []
for backend in ("triton", "torch"):
    torch.manual_seed(0)
    p, m, v, g = (torch.rand(1001) for _ in range(4))
    tensors = StepTensors("adamw", [[p]], [0], [torch.zeros(())], [[m], [v]])
    plan = kernels.step_plan(tensors, backend)
    for _ in range(3):
        plan.step([g], [StepSettings(1e-2, (1.5,), 0.9, 0.999, 1e-8, 0.1)])
    kernels.average_([[p], [m]], [1, 3], backend)
    kernels.copy_plan([p], [v], backend=backend).copy(0.5)
    left.append(torch.stack([p, m, v]))
assert torch.equal(*left)
"""


def test_needs_no_build_of_hdet() -> None:
    run("-c", WITHOUT_A_BUILD, TRITON_INTERPRET="1")


A_STEP = """
import builtins
original = builtins.__import__

def watched(name, globals=None, *rest):
    importer = (globals or {}).get("__name__", "")
    ours = name.startswith("triton") and importer.startswith("hdet")  # torch may
    assert not ours, f"{importer} imports {name}"
    return original(name, globals, *rest)

builtins.__import__ = watched
import torch, hdet
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
hdet.FusedAdamW([p], lr=0.1).step()
assert p.max() < 0.95
"""


def test_neither_importing_hdet_nor_a_step_on_a_cpu_imports_triton() -> None:
    run("-c", A_STEP)
