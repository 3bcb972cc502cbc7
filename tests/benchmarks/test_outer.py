"""benchmarks.evidence.outer: local gradients with an outer step, between real processes."""

from __future__ import annotations

import pytest

from benchmarks.evidence import outer


def test_quick_prints_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    monkeypatch.setattr(outer, "WORKERS", 2)
    outer.main(["--quick"])
    printed = capsys.readouterr().out
    assert (
        "| workload | start | seed | probe | probe's correction |" in printed
        and "| mlp-breast-cancer | 2^0 | 0 | 0." in printed
    )
