"""`hdet train --controller line`: in processes and in one, resumed, reported, and refused where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from hdet.cli.display import banner
from hdet.cli.job.checkpoint import load_checkpoint
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.model import cross_entropy, window_losses
from hdet.cli.job.place import choose_device
from hdet.cli.job.run_files import read_history
from hdet.cli.main import main
from hdet.cli.train import default_interval, default_replicas

from .harness import Finished, one_line, run_cli, tiny, wait_until_gone
from .test_runs import events, same


def lined(data: Path, replicas: int) -> list[str]:
    """Without an interval: that of 4 of 24 steps is too long for it."""
    settings = tiny(data, replicas)
    at = settings.index("--sync-interval")
    return [*settings[:at], *settings[at + 2 :], "--controller", "line"]


@pytest.fixture(scope="module")
def straight(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("line") / "straight"
    return folder, run_cli("train", *lined(text_folder, 2), "--out", str(folder))


def test_a_line_is_read_without_a_spread(straight: tuple[Path, Finished]) -> None:
    folder, finished = straight
    assert finished.code == 0 and finished.err == "", finished.err
    assert "all train alike" in finished.out and "differ by design" not in finished.out
    cycles = events(folder, "cycle")
    assert [record["step"] for record in cycles] == list(range(1, 25))
    assert all(record["multipliers"]["lr"] == [1.0, 1.0] and record["probe"] is None for record in cycles)
    read = [record for record in cycles if record["slopes"]["lr"] is not None]
    assert read
    # Cycles are many: those with nothing to say are not shown.
    lines = finished.out.splitlines()
    shown = [record for record in cycles if any(line.startswith(f"{record['cycle'] + 1:3d}/24 ") for line in lines)]
    assert len(shown) < len(cycles) and all(record in shown for record in cycles if record["notes"] or record in read)
    # What it costs is on the bill.
    assert all(record["probe_ms"] > 0 for record in read) and events(folder, "end")[0]["probe_percent"] > 0


def test_the_correction_is_the_one_in_force(straight: tuple[Path, Finished]) -> None:
    """A rise comes by and by; the report divides by it to draw the schedule as it was."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule, rates = OneCycleLR(optimizer, TrainConfig().max_lr, total_steps=24, pct_start=0.3, cycle_momentum=False), [0.0]
    for _ in range(24):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        if len(rates) <= 24:
            schedule.step()
    for record in events(straight[0], "train"):
        assert record["lr"] / record["correction"] == pytest.approx(rates[record["step"]]), record


def test_report_draws_it(straight: tuple[Path, Finished], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    assert main(["report", str(straight[0]), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "straight" in capsys.readouterr().out


def test_a_killed_run_goes_on_with_what_was_learned(straight: tuple[Path, Finished], text_folder: Path, tmp_path: Path) -> None:
    """kill -9 of the parent at step 12, four steps after the checkpoint of step 8. The interval under way begins anew, so not to the bit."""
    pids, folder = tmp_path / "pids", tmp_path / "killed"
    pids.mkdir()
    killed = run_cli("train", *lined(text_folder, 2), "--out", str(folder), fault="kill-parent@12", pids=pids)
    assert killed.code == -9
    wait_until_gone(pids, expected=2)
    saved = load_checkpoint(folder)
    assert saved["step"] == 8 and saved["ensemble"]["controller"] == "line"
    resumed = run_cli("train", "--resume", str(folder))
    assert resumed.code == 0 and "from step 8" in resumed.out and resumed.err == "", resumed.err
    ours, whole = ([r for r in read_history(run / "history.jsonl") if r["step"] <= 8] for run in (folder, straight[0]))
    assert same(ours, whole)
    assert [record["step"] for record in events(folder, "cycle")] == list(range(1, 25))
    assert events(folder, "end")[0]["step"] == 24


def test_one_process_is_enough(text_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    finished = run_cli("train", "--compare", *lined(text_folder, 1), "--out", str(folder))
    assert finished.code == 0 and finished.err == "", finished.err
    assert "1 replica x 2 windows of 16 bytes, one process on the CPU" in finished.out
    assert any(record["slopes"]["lr"] is not None for record in events(folder / "hdet", "cycle"))
    assert not events(folder / "fixed", "cycle")


@pytest.mark.usefixtures("no_processes")
def test_what_cannot_be_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str], tmp_path: Path, text_folder: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    together = one_line(capsys, "train", *lined(text_folder, 2), "--coresident", *out)
    assert "coresident is True: it must be left out with controller line" in together
    assert together.endswith("pass replicas 1 and batch_size 4\n")
    single = one_line(capsys, "train", *lined(text_folder, 1), "--batch-size", "1", *out)
    assert "batch_size is 1: it must be at least 2" in single
    seldom = one_line(capsys, "train", *tiny(text_folder), "--controller", "line", *out)
    assert "sync_interval" in seldom and "is 4 of 24 steps" in seldom and "pass at most 2" in seldom
    assert not (tmp_path / "run").exists()
    # The fixed schedule reads no line.
    assert TrainConfig(mode="fixed", coresident=True, controller="line").processes == 1


def test_one_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert default_replicas({"controller": "line"}) == 1 and default_replicas({}) == 4
    with pytest.raises(ValueError, match="4 replicas need 4 GPUs and 1 can be used; pass --replicas 1 or --device cpu"):
        choose_device("cuda", 4, least=1)
    shown = list(banner(TrainConfig(controller="line", replicas=1), {"folder": "x", "step": 0, "device": "cuda:0"}))
    assert "1 replica x 8 windows of 64 bytes, one process on the GPU" in shown[1]


def test_cycles_are_short_if_nothing_else_is_said() -> None:
    assert default_interval({"controller": "line"}) == 5 and default_interval({"controller": "line", "steps": 10}) == 1
    assert default_interval({"steps": 10}) == TrainConfig().sync_interval


def test_losses_of_windows_have_the_batch_s_mean() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    losses = window_losses(logits, targets)
    assert losses.shape == (3,) and losses.mean().item() == pytest.approx(cross_entropy(logits, targets).item())
    assert losses[1].item() == pytest.approx(cross_entropy(logits[1:2], targets[1:2]).item())
