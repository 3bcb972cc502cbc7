"""benchmarks.one_gpu: what it prints on a GPU, tried on a CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_report, one_gpu


def test_every_format_has_a_line_and_every_way_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    one_gpu.main(["--device", "cpu", "--only", "formats", "newton-schulz"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    timed = {line["name"]: line["ms"] for line in lines if line["section"] == "formats"}
    assert timed.keys() == {*one_gpu.FORMATS, "torch.optim.AdamW(fused=True)"}
    assert min(timed.values()) > 0
    errors = {line["way"]: line["error"] for line in lines if line["section"] == "newton-schulz"}
    assert errors["fp16"] < 0.3 * errors["bf16"] < 0.01
    assert "2 of 32 x 128" in gpu_report.newton_schulz(lines)
