"""docs/adding-an-optimizer.md: its rule becomes an optimizer, which keeps its contract."""

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
RULE, CONTRACT = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
PROGRAM = f"""
import doctest, hdet, torch

{CONTRACT}

def test_the_example_of_the_docstring():
    [test] = doctest.DocTestFinder().find(hdet.FusedSignum, "FusedSignum", globs=globals())
    assert test.examples and doctest.DocTestRunner().run(test).failed == 0
"""


@pytest.mark.skipif(not (ROOT / "csrc/generate.py").exists(), reason="needs hdet's sources")
def test_the_rule_of_the_page_is_an_optimizer(tmp_path: Path) -> None:
    """On a copy of hdet without its module, which would be of other rules."""
    shutil.copytree(ROOT / "hdet", tmp_path / "hdet", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(ROOT / "triton_kernels", tmp_path / "triton_kernels")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "hdet/rules/signum.py").write_text(RULE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "test_signum.py").write_text(PROGRAM, encoding="utf-8")
    tests = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "test_signum.py"]
    for command in (["csrc/generate.py"], tests):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False,
            timeout=HANG_S, cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
