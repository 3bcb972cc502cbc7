"""docs/adding-an-optimizer.md: its rule becomes an optimizer, and its peer takes the same steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-an-optimizer.md").read_text(encoding="utf-8")
RULE, PEER = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
PROGRAM = f"""
import doctest, torch, hdet
from typing import Any
from torch import Tensor

[test] = doctest.DocTestFinder().find(hdet.FusedSignum, "FusedSignum", globs=globals())
assert test.examples and doctest.DocTestRunner().run(test).failed == 0

peer = lambda function: function
{PEER}
param = torch.nn.Parameter(torch.linspace(-1, 1, 9))
other, m = param.detach().clone(), torch.zeros(9)
optimizer = hdet.FusedSignum([param], lr=0.1, weight_decay=0.5, backend="torch")
for step in range(3):
    param.grad = torch.sin(step + 3 * torch.arange(9.0))
    optimizer.step()
    signum({{"lr": 0.1, "momentum": 0.9}}, step + 1, other.mul_(1 - 0.1 * 0.5), param.grad, m)
torch.testing.assert_close(param.detach(), other)
assert optimizer.state[param]["momentum_buffer"].allclose(m)
"""


@pytest.mark.skipif(not (ROOT / "csrc/generate.py").exists(), reason="needs hdet's sources")
def test_the_rule_of_the_page_is_an_optimizer(tmp_path: Path) -> None:
    """On a copy of hdet without its module, which would be of other rules."""
    shutil.copytree(ROOT / "hdet", tmp_path / "hdet", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(ROOT / "triton_kernels", tmp_path / "triton_kernels")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "hdet/rules/signum.py").write_text(RULE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    for command in (["csrc/generate.py"], ["-W", "ignore", "-c", PROGRAM]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False,
            timeout=HANG_S, cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
