"""`hdet.logging.History`: a record for each line, also after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import hdet
from hdet.cli.runs import read_records


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    history = hdet.logging.History(tmp_path / "new" / "h.jsonl")
    history.write({"event": "train", "losses": [1.5, math.nan], "slopes": {"lr": -math.inf}})
    history({"cycle": 3, "t": (1e-300, None)}, 8)
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


def test_resuming_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    kept = b'{"event": "train", "step": 4, "loss": 0.30000000000000004}\n'
    later = b'{"event": "train", "step": 9}\n{"event": "end", "step": 4}\n{"event": "train", "st'
    path.write_bytes(kept + later)
    hdet.logging.History(path, resume_step=4)
    assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]
    hdet.logging.History(tmp_path / "absent.jsonl", resume_step=4)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_that_a_kill_has_torn_is_left_out(tmp_path: Path, cut: int) -> None:
    history = hdet.logging.History(tmp_path / "h.jsonl")
    history.write({"event": "train", "step": 1})
    history.write({"event": "train", "step": 2, "x": "\u00e4"})
    history.path.write_bytes(history.path.read_bytes()[:-cut])
    assert [record["step"] for _, record in read_records(history.path)] == [1]
