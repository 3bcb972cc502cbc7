"""benchmarks.kernels, muon and gpu, as far as they go without a GPU: nobody has a second try at a
lent one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_report, kernels, muon, profiled
from benchmarks.kernels import Machine

from ..alive import alive
from ..limits import HANG_S


def lines(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {(line["operation"], line["shapes"]): line for line in found}


def test_every_operation_has_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are those that docs/optimizers.md predicts times by."""
    monkeypatch.setattr(kernels, "TINY", {kernels.GPT2: lambda: [(1 << 14,), (8,)]})
    path = tmp_path / "figures.jsonl"
    kernels.main(["--quick", "--threads", "1", "--json", str(path)])
    found = lines(capsys)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*found.values()]
    steps = {f"adamw, {name}": of.bytes for name, of in kernels.FORMATS.items()}
    moved = {
        of: x["bytes_per_parameter"] for (of, _), x in found.items() if "bytes_per_parameter" in x
    }
    assert moved == {
        **{name: pytest.approx(size, abs=0.01) for name, size in steps.items()},
        "clip + unscale + step + cast, bf16 with master": 30,
        "8 replicas, shared moments, vs 8 fused steps": 84,
        "average of 8": 64,
        "scaled copy, bf16 to fp32": 6,
    }
    assert all(x["hdet_ms"] > 0 and x["ratio"] > 0 for x in found.values() if "torch_ms" in x)
    hosts = [x["gradients"] for (of, _), x in found.items() if of.startswith("host time")]
    assert hosts == [*kernels.HOST.values()] and ("buckets", "split masters") in found


def test_small_tensors_keep_wide_moments(capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors of fewer than 4096 elements move 28 bytes a parameter, whatever is asked for."""
    kernels.step(Machine(quick=True), "", [(3000,)] * 4, {}, "8 bits")
    assert lines(capsys)["adamw, 8 bits", ""]["bytes_per_parameter"] == 28


def test_muon_is_timed_and_its_ways_have_errors(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--width", "32", "--blocks", "1", "--quick", "--threads", "1"]
    muon.main(["directions", "step", "ways", *size])
    found = lines(capsys)
    step = found["muon and adamw, a step", "1 x 32, 0 tokens"]
    assert all(step[f"{of}_ms"] > 0 for of in ("hdet", "torch", "newton_schulz", "whole_products"))
    off = found["direction", "normal"]["off"]
    assert off["hdet torch.float32"] < 1e-4 < off["hdet torch.bfloat16"]
    errors = {way: found[f"newton-schulz, {way}", "2 of 32 x 128"]["error"] for way in muon.WAYS}
    assert errors["fp16"] < 0.3 * errors["bf16"] < 0.01
    assert "2 of 32 x 128" in gpu_report.newton_schulz([*found.values()])


def test_the_profiled_program_steps_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(profiled, "profile", lambda call, *more: calls.append(call()))
    monkeypatch.setitem(profiled.WIDTH, "small", 16)
    options = ["step", "--shapes", "small", "--device", "cpu", "--formats", "all"]
    monkeypatch.setattr(sys, "argv", ["profiled", *options])
    profiled.main()
    assert len(calls) == 7


# -- the plan --------------------------------------------------------------------------------------


def test_the_plan_names_modules_and_tests_that_exist(tmp_path: Path) -> None:
    steps = list(gpu.plan(tmp_path, dry=False))
    words = {word for step in steps for word in step.command}
    named = {word for word in words if re.match(r"(tests/|benchmarks\.|examples\.)", word)}
    places = [gpu.ROOT / (word if "/" in word else word.replace(".", "/")) for word in named]
    assert len(places) > 8
    assert all(place.exists() or place.with_suffix(".py").exists() for place in places)
    names = [step.name for step in steps]
    assert names[:5] == ["build", "formats-cuda", "formats-triton", "ways", "ema"]


def test_a_step_that_fails_is_named_and_the_next_one_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        gpu.Step("bad", 60, ["-c", "print('told'); exit(3)"]),
        gpu.Step("absent", 60, ["no-such-program"]),
        gpu.Step("good", 60, ["-c", "print('well')"]),
    ]
    assert gpu.run(steps, tmp_path, 9) == ["bad", "absent"]
    out = capsys.readouterr().out
    assert "bad: FAILED" in out and "told" in out and "there is no no-such-program here" in out
    assert "good: done" in out and (tmp_path / "good.log").read_text() == "well\n"
    assert gpu.run(steps[2:], tmp_path, 0) == ["good"]  # no time was left


@pytest.mark.parametrize("killable", [True, False], ids=["killed", "in the driver"])
def test_what_hangs_is_interrupted_killed_with_its_workers_and_not_waited_for(
    killable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, kill, groups = tmp_path / "log", os.killpg, []

    def killpg(group: int, number: int) -> None:
        groups.append(group)
        if killable:
            kill(group, number)

    monkeypatch.setattr(gpu.os, "killpg", killpg)
    monkeypatch.setattr(gpu, "GRACE", 10.0 if killable else 0.1)
    with log.open("ab") as file:
        trap = "trap 'echo interrupted; exit' INT" if killable else "trap '' INT"
        hangs = f"{trap}; sleep 600 & echo $!; wait"
        assert gpu.run_bounded(["sh", "-c", hangs], file, 1.0) == 1
    text = log.read_text()
    assert "stopped: no time was left" in text and ("was left behind" in text) != killable
    assert ("interrupted" in text) == killable
    if not killable:
        kill(groups[0], signal.SIGKILL)
    (worker,) = map(int, re.findall(r"^\d+", text))
    deadline = time.monotonic() + HANG_S
    while alive(worker):  # an orphan is somebody else's to reap
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.01)
