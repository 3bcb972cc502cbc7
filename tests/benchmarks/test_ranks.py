"""benchmarks.evidence.ranks: AutoLR on more than one rank, through real processes."""

from __future__ import annotations

import pytest

from benchmarks.evidence import ranks


def test_quick_prints_the_table(capsys: pytest.CaptureFixture[str], in_this_process: None) -> None:
    ranks.main(["--quick"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert (
        row.startswith("| mlp-friedman | 2^-4 | 0 | 0.")
        and float(row.split("(x ")[1].split(")")[0]) > 1
    )  # a trial has raised the rate
