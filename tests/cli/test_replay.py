"""`hdet replay`: the decisions of a recorded run, made again without training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.cli.main import main

from ..harness import Run
from .common import one_line

NAME = f"{__name__}:controller_of"


def controller_of(settings: dict[str, Any]) -> hdet.Controller:
    return Run(controller=hdet.SoftmaxController(decay=None), **settings).ensemble.engine.controller


@pytest.fixture
def run(tmp_path: Path) -> Path:
    history, made = hdet.logging.History(tmp_path / "run" / "history.jsonl"), {"together": 2}
    history.write({"event": "start", "step": 0, "settings": made})
    Run(controller=hdet.SoftmaxController(decay=None), log=history, **made).steps()
    return tmp_path / "run"


def rewrite(run: Path, old: str, new: str) -> None:
    history = run / "history.jsonl"
    text, count = re.subn(old, new, history.read_text(), count=1)
    assert count == 1
    history.write_text(text)


def test_every_decision_is_made_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--controller", NAME]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"\d+ decisions replayed, all bitwise the same\n", out) and err == ""
    assert int(out.split()[0]) >= 6 and list(run.iterdir()) == [run / "history.jsonl"]


def test_a_difference_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    factors = [
        r["record"]["decisions"][0]["factor"] for r in records[1:] if r["record"]["decisions"]
    ]
    moved = next(factor for factor in factors if factor != 1)
    rewrite(run, f'"factor": {moved!r}', f'"factor": {moved * (1 + 1e-15)!r}')
    assert main(["replay", str(run), "--controller", NAME]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert re.match(r"cycle \d+: decisions differ: ", line)


def test_what_cannot_be_replayed_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for controller, says in (
        ("nowhere:f", "--controller is 'nowhere:f': it must be MODULE:FUNCTION"),
        ("json", "it must be MODULE:FUNCTION"), ("json:nothing", "it must be MODULE:FUNCTION"),
        ("builtins:dict", "builtins:dict returned dict, which is no controller"),
    ):  # fmt: skip
        assert says in one_line(capsys, "replay", run, "--controller", controller)
    rewrite(run, '"evidence": {', '"evidence": {"another": 1, ')
    assert "cannot be replayed by" in one_line(capsys, "replay", run, "--controller", NAME)
    (run / "history.jsonl").write_text("")
    assert "no recorded decisions" in one_line(capsys, "replay", run, "--controller", NAME)
    (run / "history.jsonl").unlink()
    assert "not a regular file" in one_line(capsys, "replay", run, "--controller", NAME)
