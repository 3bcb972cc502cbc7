"""benchmarks.evidence.outer: local gradients with an outer step, through real processes."""

from __future__ import annotations

import pytest

from benchmarks.evidence import outer


def test_quick_prints_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    outer.main(["--quick"])
    printed = capfd.readouterr().out
    assert "| workload | start | seed | probe | probe's correction |" in printed and "| small | 2^0 | 0 | 0." in printed
