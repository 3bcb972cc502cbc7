"""The command line in this process: exit codes, and one line for whatever the user can put right."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hdet
from hdet.cli.display import banner
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.place import choose_device
from hdet.cli.main import main
from hdet.cli.train import default_replicas, printable

from ..limits import HANG_S
from .harness import Finished, one_line, tiny

pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--spread", "nan"], ["spread is nan: it must"]),
        (["--steps", "ten"], ["--steps", "ten"]),
        (["--controller", "greedy"], ["--controller", "greedy", "probe"]),
        (["--data", "/nowhere"], ["data", "/nowhere", "--data FOLDER"]),
        (["--compare", "--schedule-only"], ["not allowed with"]),
        (["--resume", "/nowhere"], ["out", "--resume"]),
        (["--unknown"], ["--unknown"]),
        (["--coresident", "--controller", "none", "--replicas", "1"], ["replicas is 1: it must be at least 2 to be co-resident"]),
        (
            ["--coresident", "--controller", "auto"],
            ["coresident is True: it must be left out with controller auto", "pass replicas 1 and batch_size 4\n"],
        ),
        (["--controller", "auto", "--budget", "1"], ["budget is 1.0: it must lie in [0, 1)"]),
    ],
)
def test_wrong_argument(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text_folder: Path, arguments: list[str], mentions: list[str]
) -> None:
    message = one_line(capsys, "train", "--out", str(tmp_path / "run"), *tiny(text_folder), *arguments)
    assert all(mention in message for mention in mentions), message
    assert not (tmp_path / "run").exists(), "nothing may be written before everything is checked"


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many that torch can use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("gpus", "settings", "remedy"),
    [
        (0, [], "pass --device cpu"),
        (1, [], "pass --coresident or --device cpu"),
        (3, [], "pass --replicas 3 or --coresident or --device cpu"),
        (1, ["--controller", "auto"], "pass --replicas 1 or --device cpu"),
    ],
    indirect=["gpus"],
)
def test_remedy_for_too_few_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text_folder: Path, gpus: int, settings: list[str], remedy: str
) -> None:
    arguments = [*tiny(text_folder, replicas=4), *settings, "--device", "cuda", "--out", str(tmp_path / "run")]
    message = one_line(capsys, "train", *arguments)
    assert message.endswith(f"device is 'cuda': 4 replicas need 4 GPUs and {gpus} can be used; {remedy}\n")


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_one_gpu_is_enough_for_one_process(gpus: int) -> None:
    together = TrainConfig(coresident=True)
    assert choose_device("auto", together.processes) == "cuda" and choose_device("auto", TrainConfig().processes) == "cpu"
    assert default_replicas({"controller": "auto"}) == 1 and default_replicas({}) == 4
    event = {"folder": "x", "step": 0, "device": "cuda:0"}
    assert "all in one process on the GPU" in list(banner(together, event))[1]
    assert "one process each on the GPUs" in list(banner(TrainConfig(), event))[1]
    alone = list(banner(TrainConfig(controller="auto", replicas=1), event))
    assert "1 replica x 8 windows of 64 bytes, one process on the GPU" in alone[1]


def test_stale_native_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_folder: Path
) -> None:
    monkeypatch.setattr(hdet.kernels.native, "missing", "built from other sources: reinstall hdet")
    assert "reinstall hdet" in one_line(capsys, "train", *tiny(text_folder), "--out", str(tmp_path / "run"))


def test_another_run_is_not_written_over(capsys: pytest.CaptureFixture[str], compared: tuple[Path, Finished], text_folder: Path) -> None:
    folder = compared[0] / "hdet"
    before = (folder / "history.jsonl").read_bytes()
    message = one_line(capsys, "train", *tiny(text_folder), "--out", str(folder))
    assert "--overwrite" in message and "--resume" in message
    assert (folder / "history.jsonl").read_bytes() == before


def test_out_that_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "file").touch()
    assert "--out" in one_line(capsys, "train", *tiny(text_folder), "--out", str(tmp_path / "file" / "run"))


@pytest.mark.parametrize(
    ("size", "settings", "says"),
    [
        ("3", [], "replicas is 2, but 3 processes were started: leave --replicas out under torchrun"),
        ("2", ["--coresident"], "coresident is one process, but 2 were started: start it without torchrun"),
    ],
)
def test_torchrun_with_another_number_of_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_folder: Path, size: str, settings: list[str], says: str
) -> None:  # fmt: skip
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert says in one_line(capsys, "train", *tiny(text_folder), *settings, "--out", str(tmp_path / "run"))


@pytest.mark.parametrize(
    "arguments", [["train", "--out", ""], ["train", "--resume", ""], ["train", "--data", ""], ["report", "x", "--out", ""], ["report", ""]]
)
def test_an_empty_name_is_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    """It would mean the one where the command is typed."""
    monkeypatch.chdir(tmp_path)
    assert "'' is empty: pass the name of a file or folder" in one_line(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["train"], ["report", "somewhere"]])
def test_missing_extra_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    message = one_line(capsys, *command)
    assert "matplotlib" in message and "pip install hdet[job]" in message


def test_no_command_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in one_line(capsys)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hdet {hdet.__version__}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interruption_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hdet.cli.doctor.report", lambda: os.kill(os.getpid(), number))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "hdet doctor: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_help_answers_without_torch() -> None:
    script = "import sys\nfrom hdet.cli.main import main\nmain(['train', '--help'])\nassert 'torch' not in sys.modules and 'rich' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-lr" in done.stdout and "30 times" in done.stdout


def test_generated_text_cannot_steer_the_terminal() -> None:
    assert printable(b"a\x1b[31mb\x07\xff\tc\nd\xc3\xa4\n") == "a·[31mb··" + "·c\ndä"


# -- doctor and simulate -------------------------------------------------------------------------------------------------


def test_doctor_names_versions_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and hdet.__version__ in out
    backends = out[out.index("\nbackends\n") : out.index("\ndevices\n")].splitlines()[2:]
    assert [line.split()[0] for line in backends] == list(hdet.kernels.available())
    for line, state in zip(backends, hdet.kernels.available().values(), strict=True):
        assert line.endswith(state if state == hdet.kernels.USABLE else f"not usable: {state}")
    assert "gloo" in out and "compiler" in out and "matplotlib" in out and "all cores for one process alone" in out


def test_doctor_survives_what_it_finds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdet._C", None)  # importing it now raises ImportError
    monkeypatch.delattr(hdet, "_C", raising=False)
    monkeypatch.setattr(hdet.kernels, "available", lambda: 1 / 0)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "native module" in out and "reinstall" in out and "ZeroDivisionError" in out and "extras" in out


def test_simulation_finds_the_way_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--start", "0.03"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rates = [float(line.split()[1]) for line in lines[2:-1]]
    assert rates[-1] > 10 * rates[0]
    fixed, best, controlled = (float(word.strip(",")) for word in lines[-1].split() if word[0].isdigit())
    assert best <= controlled < fixed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("start", value) for value in ("0", "nan", "inf", "-1", "1e-320", "9e-7", "1.1e6")),
        *((name, value) for name in ("cycles", "replicas") for value in ("0", "1", "-1")),
        ("spread", "1"),
        ("spread", "nan"),
    ],
)
def test_simulation_refuses(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    message = one_line(capsys, "simulate", f"--{name}={value}")
    assert message.startswith(f"hdet simulate: {name} is ") and ": it must " in message


@pytest.mark.parametrize("start", ["1e-6", "1e6"])
def test_simulation_ends_well_at_both_ends(capsys: pytest.CaptureFixture[str], start: str) -> None:
    assert main(["simulate", "--start", start, "--cycles", "2", "--replicas", "2"]) == 0
    assert "loss at the end" in capsys.readouterr().out
