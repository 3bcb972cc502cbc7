"""The command itself: exit codes, one line for what the user can put right, and doctor."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.cli.main import main
from hdet.logging import read_records

from ..limits import HANG_S
from .common import one_line, write_run


def test_no_command_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in one_line(capsys)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hdet {hdet.__version__}\n"


def test_missing_extra_names_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("hdet.cli.report", "hdet.cli.drawing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "matplotlib" in (message := one_line(capsys, "report", "somewhere"))
    assert "pip install hdet[report]" in message


def test_interruption_is_one_line(capsys, monkeypatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hdet.cli.doctor.run", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "hdet doctor: interrupted\n"


def run(*words: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip


def test_help_answers_without_torch() -> None:
    script = "import sys\nfrom hdet.cli.main import main\nmain(['report', '--help'])\n"
    script += "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    done = run("-c", script)
    assert done.returncode == 0 and "--html FILE" in done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run("-m", "hdet", "report", str(write_run(tmp_path / "run")), stdout=full)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr


def test_doctor_names_versions_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and hdet.__version__ in out
    backends = out[out.index("\nbackends\n") : out.index("\ndevices\n")].splitlines()[2:]
    assert [line.split()[0] for line in backends] == list(hdet.kernels.available())
    for line, state in zip(backends, hdet.kernels.available().values(), strict=True):
        assert line.endswith(state if state == hdet.kernels.USABLE else f"not usable: {state}")
    assert "gloo" in out and "compiler" in out and "matplotlib" in out
    assert out.splitlines()[-1].startswith("steps run on ")


@pytest.mark.parametrize(("kind", "missing", "said"), [
    ("cpu", None, "steps run on cpu by hdet's C++ kernels"),
    ("cpu", "no module", "steps run on cpu by the torch backend: no module"),
    ("mps", None, "steps run on mps by the torch backend: hdet has no kernels of its own"),
])  # fmt: skip
def test_doctor_ends_with_what_steps_run_on(kind, missing, said, capsys, monkeypatch) -> None:
    device = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind != "cpu")
    monkeypatch.setattr(hdet.kernels.native, "missing", missing)
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)


def test_doctor_survives_what_it_finds(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hdet._C", None)  # importing it now raises ImportError
    monkeypatch.delattr(hdet, "_C", raising=False)
    monkeypatch.setattr(hdet.kernels, "available", lambda: 1 / 0)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "native module" in out and "reinstall" in out
    assert "ZeroDivisionError" in out and "process groups" in out


# -- History -----------------------------------------------------------------------------------


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    history = hdet.logging.History(tmp_path / "new" / "h.jsonl")
    history.write({"event": "train", "losses": [1.5, math.nan], "slopes": {"lr": -math.inf}})
    history({"event": "cycle", "cycle": 3, "step": 8, "t": (1e-300, None)}, 8)
    lines = [json.loads(line) for line in history.path.read_text().splitlines()]
    assert lines == [
        {"event": "train", "losses": [1.5, None], "slopes": {"lr": None}},
        {"event": "cycle", "step": 8, "cycle": 3, "t": [1e-300, None]},
    ]


def test_another_history_is_not_written_over(tmp_path: Path) -> None:
    hdet.logging.History(tmp_path / "h.jsonl").write({"event": "train", "step": 1})
    with pytest.raises(FileExistsError):
        hdet.logging.History(tmp_path / "h.jsonl")
    assert len(list(read_records(tmp_path / "h.jsonl"))) == 1
    with pytest.raises(ValueError, match="must be a file: pass '.*run/history.jsonl'"):
        hdet.logging.History(tmp_path / "run")
    (tmp_path / "log").touch()
    hdet.logging.History(tmp_path / "log", resume_step=0)


def test_resuming_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    kept = b'{"event": "start"}\n{"event": "train", "step": 4, "loss": 0.30000000000000004}\n'
    later = b'{"event": "train", "step": 9}\n{"event": "end"}\n{"event": "train", "st'
    path.write_bytes(kept + later)
    hdet.logging.History(path, resume_step=4)
    assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]
    hdet.logging.History(tmp_path / "absent.jsonl", resume_step=4)


@pytest.mark.parametrize(
    "line", ["{", "3", "null", "", '{"event": "cycle"}', '{"step": "4"}', '{"step": true}']
)
def test_a_damaged_line_is_named_when_a_history_is_continued(tmp_path: Path, line: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(text := f'{{"event": "start"}}\n{line}\n{{"event": "end"}}\n')
    with pytest.raises(ValueError, match="line 2 of .*h.jsonl.*: remove that line"):
        hdet.logging.History(path, resume_step=4)
    assert path.read_text() == text


def test_a_line_that_a_kill_has_torn_is_left_out(tmp_path: Path) -> None:
    history = hdet.logging.History(tmp_path / "h.jsonl")
    history.write({"event": "train", "step": 1})
    history.write({"event": "train", "step": 2, "x": "\u00e4"})
    whole = history.path.read_bytes()
    for cut in range(1, 30):
        history.path.write_bytes(whole[:-cut])
        assert [record["step"] for _, record in read_records(history.path)] == [1]
