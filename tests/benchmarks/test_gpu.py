"""The command behind `make gpu`, as far as it goes without a GPU: nobody has a second try at a lent
one."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare, gpu, muon, step
from benchmarks.compare import Options


def bounded(script: str, tmp_path: Path) -> tuple[int, str]:
    """Exit status and output of a script that prints "begun" when it is where it should be
    interrupted. A busy machine takes longer than 3 seconds to come so far."""
    for seconds in (3.0, 15.0, 45.0):
        with (tmp_path / "log").open("wb") as log:
            status = gpu.run_bounded([sys.executable, "-u", "-c", script], log, seconds)
        output = (tmp_path / "log").read_text()
        if "begun" in output:
            break
    return status, output


def test_what_takes_too_long_may_say_what_it_has(tmp_path: Path) -> None:
    # A shell that runs the suite in the background has it ignore interrupts.
    handled = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = (
        f"{handled}try: print('begun'); time.sleep(60)\nexcept KeyboardInterrupt: print('two tests "
        "have failed')"
    )
    status, output = bounded(script, tmp_path)
    assert (
        status == 1 and "two tests have failed" in output and "stopped: no time was left" in output
    )


def test_what_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    script = (
        "import signal, time\nsignal.signal(signal.SIGINT, "
        "signal.SIG_IGN)\nprint('begun')\ntime.sleep(60)\nprint('ended')"
    )
    status, output = bounded(script, tmp_path)
    assert (
        status == 1 and "begun" in output and "ended" not in output and "left behind" not in output
    )


def test_every_prediction_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of docs/optimizers.md: formats of AdamW, moments in 8 bits, Muon."""
    monkeypatch.setattr(compare, "SHAPES", {"GPT-2 124M": lambda: [(1 << 19,), (8,)]})
    monkeypatch.setattr(muon, "SIZE", gpu.TINY_MUON)
    monkeypatch.setattr(step, "host", lambda options: [])
    options = Options("cpu", "auto", quick=True)
    assert {step, muon} <= set(gpu.BENCHMARKS.values())
    made = {record["operation"]: record for record in (*step.run(options), *muon.run(options))}
    moved = {name: record.get("bytes_per_parameter") for name, record in made.items()}
    assert moved == {
        "adamw": 28,
        "adamw, bf16 with master": 28,
        "adamw, bf16 split": 26,
        "adamw, 8 bits": pytest.approx(16, abs=1e-3),
        "adamw, 8 bits, bf16 split": pytest.approx(14, abs=1e-3),
        "adamw, bf16 throughout, stochastic": 14,
        "clip + unscale + step + cast, bf16 with master": 30,
        "muon and adamw, a step": None,
    }
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()]  # as they come
    assert all(
        made["muon and adamw, a step"][f"{part}_ms"] > 0
        for part in ("hdet", "torch", "newton_schulz", "whole_products")
    )


def test_figures_are_in_the_file_as_they_come(tmp_path: Path) -> None:
    records = gpu.Records(tmp_path / "records.jsonl")
    records.write('{"operation": "adamw"}\n{"operation":')
    assert [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()] == [
        {"operation": "adamw"}
    ]
    assert isinstance(records, io.TextIOBase) and records.records == [{"operation": "adamw"}]


def test_small_tensors_keep_wide_moments() -> None:
    """Tensors of fewer than 4096 elements move 28 bytes a parameter, whatever is asked for."""
    made = step.coded(Options("cpu", "auto", quick=True), "", [(3000,)] * 100, {})
    assert made["bytes_per_parameter"] == 28
