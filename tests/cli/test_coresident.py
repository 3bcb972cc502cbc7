"""`hdet train --coresident`: the same run as in processes, in one; resumed bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hdet.cli.display import banner
from hdet.cli.job.checkpoint import load_checkpoint
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.place import Place, choose_device, join
from hdet.cli.job.processes import Workers
from hdet.cli.job.run_files import read_history

from .harness import Finished, one_line, run_cli, tiny, wait_until_gone
from .test_runs import same


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    """As in the processes: a matrix product may depend on the number of threads. Users' runs take all cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def together(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The comparison of the fixture `compared`, in one process."""
    out = tmp_path_factory.mktemp("runs") / "together"
    return out, run_cli("train", "--compare", "--coresident", *tiny(text_folder), "--out", str(out))


@pytest.mark.parametrize("mode", ["fixed", "hdet"])
def test_two_replicas_have_the_history_of_two_processes_to_the_bit(
    together: tuple[Path, Finished], compared: tuple[Path, Finished], mode: str
) -> None:
    out, finished = together
    assert finished.code == 0 and finished.err == "", finished.err
    records = read_history(out / mode / "history.jsonl")
    assert len(records) > 10 and same(records, read_history(compared[0] / mode / "history.jsonl"))
    ours, theirs = (torch.load(folder / mode / "checkpoint.pt", weights_only=True) for folder in (out, compared[0]))
    for key in ("model", "scheduler", "ensemble", "step", "validation"):
        assert same(ours[key], theirs[key]), key
    assert (out / mode / "sample.txt").read_bytes() == (compared[0] / mode / "sample.txt").read_bytes()


def test_the_run_says_where_it_is(together: tuple[Path, Finished]) -> None:
    out, finished = together
    assert "2 replicas x 2 windows of 16 bytes, all in one process on the CPU" in finished.out
    assert json.loads((out / "hdet/config.json").read_text())["coresident"] is True
    config = TrainConfig(coresident=True)
    assert "on the GPU" in list(banner(config, {"folder": "x", "step": 0, "device": "cuda:0"}))[1]
    assert "one process each on the GPUs" in list(banner(TrainConfig(), {"folder": "x", "step": 0, "device": "cuda:0"}))[1]


def test_killed_run_resumes_bit_for_bit(text_folder: Path, tmp_path: Path, together: tuple[Path, Finished]) -> None:
    """kill -9 of the parent at step 12, four steps after the checkpoint of step 8."""
    pids, folder, straight = tmp_path / "pids", tmp_path / "killed", together[0] / "hdet"
    pids.mkdir()
    killed = run_cli("train", *tiny(text_folder), "--coresident", "--out", str(folder), fault="kill-parent@12", pids=pids)
    assert killed.code == -9
    wait_until_gone(pids, expected=1)
    assert load_checkpoint(folder)["step"] == 8
    resumed = run_cli("train", "--resume", str(folder))
    assert resumed.code == 0 and "from step 8" in resumed.out, resumed.err
    assert same(read_history(folder / "history.jsonl"), read_history(straight / "history.jsonl"))
    assert same(*(torch.load(run / "checkpoint.pt", weights_only=True) for run in (straight, folder)))


@pytest.mark.usefixtures("no_processes")
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_folder: Path
) -> None:
    out = ["--out", str(tmp_path / "run")]
    alone = one_line(capsys, "train", *tiny(text_folder, replicas=1), "--coresident", "--controller", "none", *out)
    assert "replicas is 1: it must be at least 2 to be co-resident" in alone
    with pytest.raises(ValueError, match="coresident is 1: it must be true or false"):
        TrainConfig(coresident=1)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "coresident is one process, but 2 were started" in one_line(capsys, "train", *tiny(text_folder), "--coresident", *out)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_processes")
def test_a_run_in_processes_is_not_resumed_as_co_resident(capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished]) -> None:
    assert "coresident is True, but the run" in one_line(capsys, "train", "--resume", str(compared[0] / "hdet"), "--coresident")


def test_one_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto", TrainConfig(coresident=True).processes) == "cuda"
    assert choose_device("auto", TrainConfig().processes) == "cpu"
    with pytest.raises(ValueError, match="4 replicas need 4 GPUs and 1 can be used; pass --coresident or --device cpu"):
        choose_device("cuda", TrainConfig().processes)


def test_one_process_uses_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def popen(command: object, *, env: dict[str, str], **others: object) -> None:
        started.append((env.get("OMP_NUM_THREADS"), env.get("OMP_WAIT_POLICY")))
        raise OSError("enough")

    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hdet.cli.job.processes.subprocess.Popen", popen)
    from hdet.cli.job.training import RunSpec

    for coresident in (True, False):
        with pytest.raises(OSError, match="enough"), Workers([RunSpec(TrainConfig(coresident=coresident), Path())], "cpu"):
            pass
    assert started == [(None, "passive"), ("1", None)]
    torch.set_num_threads(2)
    with join(Place()):
        assert torch.get_num_threads() == 2
