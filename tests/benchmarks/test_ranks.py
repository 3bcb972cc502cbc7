"""benchmarks.evidence.ranks: AutoLR on more than one rank, through real processes."""

from __future__ import annotations

import pytest

from benchmarks.evidence import ranks


def test_quick_prints_the_table(capsys: pytest.CaptureFixture[str], in_this_process: None) -> None:
    ranks.main(["--quick"])
    assert "| regression | 2^0 | 0 | 0." in capsys.readouterr().out
