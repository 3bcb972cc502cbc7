"""examples.bytes: what its runs leave behind, and that a resumed one is bitwise the same."""

from __future__ import annotations

import json
import random
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from examples.bytes import training
from examples.bytes.__main__ import main as train
from examples.bytes.model import GPTConfig
from examples.bytes.training import Run
from hdet.cli.main import main
from tests.distributed import torchrun

SIZES = {
    "GPTConfig": partial(GPTConfig, context=16, width=16, layers=1, heads=2),
    "VALIDATION_WINDOWS": 2, "VALIDATION_BATCHES": 3, "SHORT_VALIDATION": 2, "LOG_EVERY": 3,
}  # fmt: skip
"""A model that takes no time."""
TIMES = {"probe_ms", "converge_ms", "trial_ms", "seconds"}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small real-looking text, the same everywhere."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["def ", "return ", "self.", "value", "(", ")", ":\n    ", " = ", "0", "import ", "\n"]
    for number in range(6):
        (folder / f"module_{number}.py").write_text("".join(draw.choices(words, k=4000)))
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(training, name, value)


def records(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Without times, in which no two runs are the same."""
    lines = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in lines
        if event in (None, record["event"])
    ]


def are_bitwise_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            are_bitwise_same(ours[key], theirs[key]) for key in ours if key not in TIMES
        )
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(are_bitwise_same, ours, theirs))
    return bool(ours == theirs)


def are_same_runs(ours: Path, theirs: Path) -> bool:
    ends = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (ours, theirs)]
    return records(ours) == records(theirs) and are_bitwise_same(*ends)


STEPS = ["--method", "softmax", "--steps", "100", "--sync-interval", "4", "--batch-size", "2"]


def trained(arguments: list[str]) -> None:
    """In a worker of torchrun."""
    with mock.patch.multiple(training, **SIZES):
        train(arguments)


@pytest.fixture(scope="module")
def compared(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "compared"
    words = [*STEPS, "--data", str(text_folder), "--compare", "--out", str(out)]
    torchrun(trained, 3, words)
    return out


def test_a_comparison(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = {name: records(compared / name, "validation") for name in ("fixed", "hdet")}
    assert [r["step"] for r in ends["fixed"]] == [r["step"] for r in ends["hdet"]]
    assert [r["step"] for r in records(compared / "hdet", "cycle")] == list(range(4, 101, 4))
    assert not records(compared / "fixed", "cycle")
    assert main(["report", str(compared)]) == 0
    assert f"{ends['hdet'][-1]['loss']:.4f}" in capsys.readouterr().out


# A trial in steps 1 to 56, from a rate that is far too low.
AUTO = ["--method", "auto", "--steps", 200, "--budget", 0.99, "--max-lr", 1e-5]
KINDS: dict[str, list[object]] = {
    "probe": ["--coresident", 2, "--steps", 40, "--method", "probe"],
    "softmax": ["--coresident", 2, "--steps", 40, "--method", "softmax"],
    "fixed": ["--steps", 40, "--method", "fixed"],
    "auto": AUTO,
}


between_cycles = Run._between_cycles


def stop(run: Run) -> None:
    """In the place of `_between_cycles`: after a checkpoint."""
    between_cycles(run)
    is_saved = run.step // run.settings.sync_interval % run.interval == 0
    if is_saved and run.step >= 0.6 * run.settings.steps:
        run.step += 1
        run._record("train", loss=1.0)  # which the checkpoint does not know
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bitwise_the_same(
    kind: str, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--sync-interval", 4, "--batch-size", 2, "--data", text_folder]
    settings = [str(word) for word in (*KINDS[kind], *common)]
    train([*settings, "--out", str(tmp_path / "whole")])
    broken = [*settings, "--out", str(tmp_path / "broken")]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Run, "_between_cycles", stop)
        train(broken)
    assert not records(tmp_path / "broken", "end")
    train([*broken, "--resume"])
    assert are_same_runs(tmp_path / "broken", tmp_path / "whole")


def test_a_trial_raises_a_rate_that_is_far_too_low(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--sync-interval", 4, "--batch-size", 2, "--data", text_folder, *AUTO]
    train([*map(str, settings), "--compare", "--out", str(tmp_path)])
    [tried] = [record for record in records(tmp_path / "hdet", "cycle") if record["trial"]]
    assert tried["step"] == 56 and tried["corrections"]["lr"] > 10
    said = capsys.readouterr().out
    assert f"step    56   {tried['notes'][0]}" in said
    losses = [records(tmp_path / name, "validation")[-1]["loss"] for name in ("fixed", "hdet")]
    for name, loss in zip(("fixed", "hdet"), losses, strict=True):
        assert f"{tmp_path / name}: validation loss {loss:.4f} nats per byte" in said
    assert losses[1] < losses[0] - 0.05


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "holds a run: pass --overwrite, --resume"),
    (["--resume", "--max-lr", "0.1"], "is of other settings"),
    (["--resume", "--out", "nowhere"], "'nowhere' has no checkpoint.pt"),
    (["--resume", "--data", "nowhere"], "'nowhere' is not a folder"),
])  # fmt: skip
def test_what_does_not_fit_changes_nothing(
    compared: Path, text_folder: Path, arguments: list[str], says: str
) -> None:
    folder = compared / "fixed"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises((SystemExit, ValueError), match=says):
        train(["--out", str(folder), *STEPS, "--data", str(text_folder), *arguments])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_drop_in_runs(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process: no replicas, but every line of the loop."""
    settings = ["drop_in", "--steps", "4", "--sync-interval", "2", "--data", str(text_folder)]
    monkeypatch.setattr(sys, "argv", settings)
    runpy.run_module("examples.drop_in", run_name="__main__")
    said = capsys.readouterr().out
    assert 5 < float(said.split("validation loss")[1].split()[0]) < 6  # ln 256 is 5.55
