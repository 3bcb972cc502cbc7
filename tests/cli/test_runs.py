"""Real runs through the command line: what they leave behind, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from hdet.cli.job.checkpoint import load_checkpoint
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.data import load_corpus
from hdet.cli.job.place import Place, join
from hdet.cli.job.processes import Workers
from hdet.cli.job.run_files import read_history
from hdet.cli.job.training import Run, RunSpec, train_all
from hdet.cli.main import main

from ..limits import HANG_S
from .harness import KINDS, ROOT, TOO_LOW, Finished, auto, run_cli, tiny, wait_until_gone

Straight = Callable[[str], tuple[Path, Finished]]
TIMES = {"converge_ms", "probe_ms", "seconds", "probe_percent", "converge_percent"}


def same(a: object, b: object) -> bool:
    """Bitwise, through dicts and lists."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a if key not in TIMES)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def events(folder: Path, kind: str) -> list[dict]:
    return [record for record in read_history(folder / "history.jsonl") if record["event"] == kind]


# -- a comparison --------------------------------------------------------------------------------------------------------


def test_comparison_ends_well_and_says_where_the_files_are(compared: tuple[Path, Finished]) -> None:
    out, finished = compared
    assert finished.code == 0, finished.err
    assert finished.err == ""
    for path in (out / "report.png", out / "hdet/history.jsonl", out / "hdet/checkpoint.pt", out / "hdet/sample.txt"):
        assert path.is_file() and str(path) in finished.out
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "hdet/sample.txt").read_bytes().startswith(b"import ")
    assert "\x1b" not in finished.out, "control codes in a pipe"
    table = finished.out[finished.out.index("validation loss") :]
    for run in ("fixed", "hdet"):
        end = events(out / run, "end")[0]
        assert f"{end['validation']:.4f}" in table


def test_both_runs_see_the_same_batches_and_validate_at_the_same_steps(compared: tuple[Path, Finished]) -> None:
    out, _ = compared
    first = [events(out / run, "train")[0] for run in ("fixed", "hdet")]
    # Replicas differ from step 2 on by their rates, of which OneCycle's first are tiny.
    assert first[0]["step"] == first[1]["step"] == 3
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], abs=1e-3)
    assert (
        [r["step"] for r in events(out / "fixed", "validation")] == [r["step"] for r in events(out / "hdet", "validation")] == [8, 16, 24]
    )


def test_history_holds_every_cycle_and_the_rates_in_force(compared: tuple[Path, Finished]) -> None:
    out, finished = compared
    cycles = events(out / "hdet", "cycle")
    assert [record["step"] for record in cycles] == [4, 8, 12, 16, 20, 24]
    assert not events(out / "fixed", "cycle")
    explored = [record["probe"] is not None for record in cycles]
    assert explored[:2] == [True, True] and explored == sorted(explored, reverse=True), "the spread rests once, when it is past use"
    for record, differ in zip(cycles, explored, strict=True):
        assert sorted(record["multipliers"]["lr"]) == pytest.approx([0.7, 1.3] if differ else [1.0, 1.0])
        assert (record["slopes"]["lr"] is not None and record["errors"]["lr"] > 0) == differ
        assert f"{record['values']['lr']:9.2e}" in finished.out
    train = events(out / "hdet", "train")
    assert {3, 4, 6, 8, 9, 24} <= {record["step"] for record in train}  # every third step, and where cycles end
    assert all(record["correction"] == 1.0 for record in events(out / "fixed", "train"))
    moved = [record["corrections"]["lr"] for record in cycles]
    # Steps 9 to 12 of the run train with the correction that the second cycle decided on.
    assert moved[0] == 1.0 < moved[1]
    assert [r["correction"] for r in train if r["step"] in (8, 9, 12)] == [moved[0], moved[1], moved[1]]


def test_costs_are_parts_of_the_training_time(compared: tuple[Path, Finished]) -> None:
    out, _ = compared
    end, cycles = events(out / "hdet", "end")[0], events(out / "hdet", "cycle")
    for cost in ("probe", "converge"):
        spent = sum(record[f"{cost}_ms"] for record in cycles)
        assert end[f"{cost}_percent"] == pytest.approx(100 * spent / (1000 * end["seconds"]))
        assert 0 < end[f"{cost}_percent"] < 100
    assert events(out / "fixed", "end")[0]["probe_percent"] == 0


def test_a_loss_that_is_not_finite_is_nothing_in_records_and_events(text_folder: Path, tmp_path: Path) -> None:
    shown: list[dict] = []
    settings = {"steps": 8, "sync_interval": 4, "max_lr": 1e30, "validation_batches": 1, "replicas": 1, "data": str(text_folder)}
    train_all([RunSpec(TrainConfig(mode="fixed", log_interval=1, **settings), tmp_path)], Place(), shown.append)
    for losses in ([event["loss"] for event in shown if event["event"] == "train"], [r["loss"] for r in events(tmp_path, "train")]):
        assert losses[0] is not None and losses[-1] is None


# -- all replicas in one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fixed", "hdet"])
def test_two_replicas_have_the_history_of_two_processes_to_the_bit(straight: Straight, compared: tuple[Path, Finished], mode: str) -> None:
    out, finished = straight("coresident")
    assert "2 replicas x 2 windows of 16 bytes, all in one process on the CPU" in finished.out
    ours, theirs = out.parent / mode, compared[0] / mode
    records = read_history(ours / "history.jsonl")
    assert len(records) > 10 and same(records, read_history(theirs / "history.jsonl"))
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (ours, theirs))
    for key in ("model", "scheduler", "ensemble", "step", "validation"):
        assert same(one[key], two[key]), key
    assert (ours / "sample.txt").read_bytes() == (theirs / "sample.txt").read_bytes()


def test_one_process_uses_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def popen(command: object, *, env: dict[str, str], **others: object) -> None:
        started.append((env.get("OMP_NUM_THREADS"), env.get("OMP_WAIT_POLICY")))
        raise OSError("enough")

    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hdet.cli.job.processes.subprocess.Popen", popen)
    for coresident in (True, False):
        with pytest.raises(OSError, match="enough"), Workers([RunSpec(TrainConfig(coresident=coresident), Path())], "cpu"):
            pass
    assert started == [(None, "passive"), ("1", None)]
    torch.set_num_threads(2)
    with join(Place()):
        assert torch.get_num_threads() == 2


# -- controller auto -------------------------------------------------------------------------------------------------------


def test_trials_raise_a_rate_that_is_far_too_low(straight: Straight) -> None:
    folder, finished = straight("auto")
    assert "all replicas train alike; a trial in the first 56 steps" in finished.out
    assert "differ by design" not in finished.out
    cycles = events(folder, "cycle")
    assert all(record["multipliers"]["lr"] == [1.0, 1.0] for record in cycles)
    (tried,) = [record for record in cycles if record["notes"]]
    found = tried["trial"]
    assert tried["step"] == 56 and tried["notes"][0].endswith("learned less than higher rates")
    assert tried["corrections"]["lr"] == pytest.approx(found["suggestion"] / TOO_LOW) and found["low"] > 10 * TOO_LOW
    assert [record["trial"] for record in cycles if record is not tried] == [None] * (len(cycles) - 1)
    # Cycles are many: those with nothing to say are not shown.
    lines = [line for line in finished.out.splitlines() if " x " in line and "/50" in line]
    assert any("learned less" in line for line in lines) and len(lines) < len(cycles)


def test_the_correction_is_the_one_in_force(straight: Straight) -> None:
    """The report divides by it to draw the schedule as it was."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule, rates = OneCycleLR(optimizer, TOO_LOW, total_steps=200, pct_start=0.1, cycle_momentum=False), [0.0]
    for step in range(200):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        if step < 199:
            schedule.step()
    records = events(straight("auto")[0], "train")
    assert [record["correction"] > 1 for record in records] == [record["step"] > 56 for record in records]
    for record in records:
        assert record["lr"] / record["correction"] == pytest.approx(rates[record["step"]]), record


def test_one_process_is_enough(text_folder: Path, tmp_path: Path) -> None:
    finished = run_cli("train", *auto(text_folder, 1), "--out", str(tmp_path))
    assert finished.code == 0 and finished.err == "", finished.err
    assert "1 replica x 2 windows of 16 bytes, one process on the CPU" in finished.out
    assert any("learned less" in note for record in events(tmp_path, "cycle") for note in record["notes"])


def test_a_short_run_looks_at_its_own_first_steps(text_folder: Path, tmp_path: Path) -> None:
    finished = run_cli("train", *auto(text_folder, 1), "--budget", "0", "--out", str(tmp_path))
    assert finished.code == 0 and "only how far the first 28 steps move the weights" in finished.out
    (tried,) = [record for record in events(tmp_path, "cycle") if record["trial"]]
    assert tried["step"] == 28 and tried["corrections"]["lr"] > 1
    assert "The first 28 steps, without a trial, moved the weights by" in finished.out
    assert "the trial cost" not in finished.out


def test_a_search_that_was_under_way_begins_again(text_folder: Path, tmp_path: Path) -> None:
    settings = {"max_lr": TOO_LOW, "steps": 200, "sync_interval": 4, "checkpoint_interval": 8}
    model = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2, "validation_batches": 3}
    config = TrainConfig(controller="auto", budget=0.99, replicas=1, data=str(text_folder), **settings, **model)
    shown: list[dict] = []

    def stop(event: dict) -> None:
        shown.append(event)
        if event["event"] == "checkpoint" and event["step"] == 16:
            raise KeyboardInterrupt

    killed = Run(RunSpec(config, tmp_path), load_corpus(config.data), Place(), stop)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert killed.history is not None
    killed.history.close()
    with pytest.warns(UserWarning, match="saved during the search, which begins again"):
        train_all([RunSpec(config, tmp_path, resume=True)], Place(), shown.append)
    starts = [event["search"] for event in shown if event["event"] == "start"]
    assert starts[0].startswith("a trial in the first 56") and starts[1].startswith("the search begins again: a trial")
    assert [record["step"] for record in events(tmp_path, "cycle") if record["trial"]] == [16 + 56]


# -- interruptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers", "saved"), [("processes", 3, 8), ("coresident", 1, 8), ("auto", 2, 64)])
def test_killed_run_resumes_bit_for_bit(
    text_folder: Path, tmp_path: Path, straight: Straight, kind: str, workers: int, saved: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 of the parent four steps after a checkpoint; with controller auto when its search is over."""
    whole, _ = straight(kind)
    folder, pids, scratch = tmp_path / "killed", tmp_path / "pids", tmp_path / "scratch"
    pids.mkdir()
    scratch.mkdir()
    killed = run_cli("train", *KINDS[kind](text_folder), "--out", str(folder), fault=f"kill-parent@{saved + 4}", pids=pids, scratch=scratch)
    assert killed.code == -9
    wait_until_gone(pids, expected=workers)
    assert not list(scratch.glob("hdet-*")), "the workers clear up what the parent could not"
    assert load_checkpoint(folder)["step"] == saved
    assert max(record["step"] for record in read_history(folder / "history.jsonl")) == saved + 4
    resumed = run_cli("train", "--resume", str(folder))
    assert resumed.code == 0 and f"from step {saved}" in resumed.out and resumed.err == "", resumed.err
    ours, theirs = (read_history(run / "history.jsonl") for run in (folder, whole))
    assert same(ours, theirs)
    assert same(*(torch.load(run / "checkpoint.pt", weights_only=True) for run in (folder, whole)))
    assert (folder / "sample.txt").read_bytes() == (whole / "sample.txt").read_bytes()
    assert main(["replay", str(folder)]) == 0 and "all the same to the bit" in capsys.readouterr().out


def test_interrupted_run_says_where_the_checkpoint_is(text_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the whole process group."""
    pids = tmp_path / "pids"
    pids.mkdir()
    folder = tmp_path / "run"
    stopped = run_cli("train", *tiny(text_folder), "--out", str(folder), fault="interrupt@12", pids=pids)
    assert stopped.code == 130
    wait_until_gone(pids, expected=2, seconds=0.5)
    assert stopped.err.count("\n") == 1 and f"--resume {folder}" in stopped.err
    assert load_checkpoint(folder)["step"] == 8
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("fault", ["raise@8", "die@8"])
def test_one_failing_replica_ends_the_run(text_folder: Path, tmp_path: Path, fault: str) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    failed = run_cli("train", *tiny(text_folder), "--out", str(tmp_path / "run"), fault=fault, pids=pids)
    assert failed.code == 1
    wait_until_gone(pids, expected=2, seconds=0.5)
    if fault == "raise@8":
        assert failed.err.startswith("hdet train: the process of replica 1 failed")
        assert failed.err.count("Traceback") == 1 and failed.err.count("ArithmeticError: the fault of replica 1") == 1
    else:
        assert "replica 1 was ended by SIGKILL" in failed.err and "Traceback" not in failed.err


# -- another launcher ------------------------------------------------------------------------------------------------------


def test_joins_processes_that_torchrun_started(text_folder: Path, tmp_path: Path, compared: tuple[Path, Finished]) -> None:
    """Same run, same numbers as from our own launcher, and the number of replicas is the number of processes."""
    settings = tiny(text_folder)
    del settings[settings.index("--replicas") : settings.index("--replicas") + 2]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "hdet",
        "train",
        "--schedule-only",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *settings, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=HANG_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 24/24") == 1
    assert same(read_history(tmp_path / "run/history.jsonl"), read_history(compared[0] / "fixed/history.jsonl"))


def test_example_runs(text_folder: Path) -> None:
    """One process: no replicas, but every line of the loop."""
    command = [sys.executable, "-W", "ignore", "examples/bytes.py", "--steps", "4", "--sync-interval", "2", "--data", str(text_folder)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 5 < float(done.stdout.split("validation loss")[1].split()[0]) < 6  # ln 256 is 5.55
