"""benchmarks.evidence.ranks: AutoLR on more than one rank, through real processes."""

from __future__ import annotations

import pytest

from benchmarks.evidence import ranks


def test_quick_prints_both_ways(capsys: pytest.CaptureFixture[str], in_this_process: None) -> None:
    ranks.main(["--quick"])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[:3] for row in rows] == [["| 2", "beside", "1"], ["| 2", "spread", "1"]]
    for row in rows:
        fixed, reached = (float(cell.removesuffix(" %")) for cell in row[3:5])
        assert reached < fixed  # a trial has raised the rate that is 16 times too low
