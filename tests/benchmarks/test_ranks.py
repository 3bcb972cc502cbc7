"""benchmarks.evidence.ranks: AutoLR on more than one rank, through real processes."""

from __future__ import annotations

import pytest

from benchmarks.evidence import ranks


def test_quick_prints_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    ranks.main(["--quick"])
    assert "| regression | 2^0 | 0 | 0." in capfd.readouterr().out
