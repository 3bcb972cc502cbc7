"""docs/adding-an-adapter.md: its adapter keeps the contract, which notices those that do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-an-adapter.md").read_text(encoding="utf-8")
[BLOCK] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
RIGHT = "test_the_page.py"
FAULTS = {
    "spread_0_is_the_plain_run_bitwise": (
        "self.ensemble.step()", "self.ensemble.step(); trainer.scheduler.step()"
    ),
    "replicas_differ_within_a_cycle_and_are_equal_where_others_look": (
        "self.ensemble.converge()\n", "pass\n"
    ),
    "a_cycles_loss_is_the_mean_of_what_the_run_trains_on": (
        "observe(loss.detach(), ", "observe(2 * loss.detach(), "
    ),
    "it_resumes_bitwise_at_a_cycles_end_and_in_its_middle": ("checkpoint.get(", "{}.get("),
    "checkpoints_of_a_plain_run_go_on_here_and_ours_there": (
        'checkpoint.get("hdet")', 'checkpoint["hdet"]'
    ),
}  # fmt: skip
"""by the test that finds it"""


def test_the_adapter_of_the_page_keeps_the_contract_and_its_faults_are_found(
    tmp_path: Path,
) -> None:
    (tmp_path / RIGHT).write_text(BLOCK, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", RIGHT]
    for number, (name, (right, wrong)) in enumerate(FAULTS.items()):
        assert BLOCK.count(right) == 1
        file = f"test_{number}.py"
        (tmp_path / file).write_text(BLOCK.replace(right, wrong), encoding="utf-8")
        command.append(f"{file}::TestHdetCallback::test_{name}")
    printed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    failed = re.findall(r"^FAILED (test_\w+\.py)", printed, re.MULTILINE)
    assert {*failed} == {f"test_{number}.py" for number in range(len(FAULTS))}, printed
    assert " 8 passed" in printed, printed
