"""Files that are whole or absent, and a history that survives a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hdet.cli.job.checkpoint import load_checkpoint, save_checkpoint
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.run_files import CHECKPOINT, Recorder, RunFolderError, read_history, truncate_history
from hdet.owned_folder import atomic_file

from ..checkpoint.test_hostile import Hostile


def history(path: Path, *records: dict) -> Path:
    recorder = Recorder(path)
    for record in records:
        recorder.write(record)
    recorder.close()
    return path


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    record = {"event": "cycle", "losses": [1.5, math.nan], "slopes": {"lr": -math.inf}, "values": {"lr": 1e-300}, "t": None}
    path = history(tmp_path / "h.jsonl", record)
    assert json.loads(path.read_text()) == {
        "event": "cycle",
        "losses": [1.5, None],
        "slopes": {"lr": None},
        "values": {"lr": 1e-300},
        "t": None,
    }


def test_records_can_be_read_while_the_writer_is_open(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "h.jsonl")
    recorder.write({"step": 1})
    assert read_history(tmp_path / "h.jsonl") == [{"step": 1}]
    recorder.close()


@pytest.mark.parametrize("cut", range(1, 16))
def test_torn_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    path = history(tmp_path / "h.jsonl", {"step": 1}, {"step": 2, "x": "ä"})
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    expected = [{"step": 1}] if cut > 1 else [{"step": 1}, {"step": 2, "x": "ä"}]  # without its last newline a line is still whole
    assert read_history(path) == expected


def test_truncation_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = history(tmp_path / "h.jsonl", {"step": 4, "loss": 0.1 + 0.2}, {"step": 8}, {"step": 9}, {"event": "end", "step": 8})
    path.write_bytes(path.read_bytes() + b'{"step": 1')
    truncate_history(path, 8)
    assert path.read_text() == '{"step": 4, "loss": 0.30000000000000004}\n{"step": 8}\n'
    truncate_history(tmp_path / "absent.jsonl", 8)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def state() -> dict:
    """Right in kind; no run would restore it."""
    dicts: dict = {"model": {"weight": torch.randn(3)}, "optimizer": {}, "scheduler": {}, "ensemble": {}}
    costs = {"seconds": 1.5, "probe_ms": 0.0, "converge_ms": 0.0, "validation": None}
    return {"config": TrainConfig().to_dict(), "text": "digest", "step": 8, "rng": torch.get_rng_state(), **dicts, **costs}


def flipped(path: Path, saved: dict) -> None:
    """In a weight: torch.load alone would not notice."""
    whole = bytearray(path.read_bytes())
    whole[whole.index(saved["model"]["weight"].numpy().tobytes()) + 2] ^= 1
    path.write_bytes(whole)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["weight"], saved["model"]["weight"])


def one_below(path: Path, saved: dict) -> None:
    (path.parent / "hdet").mkdir()
    path.rename(path.parent / "hdet" / CHECKPOINT)


DAMAGES: dict[str, tuple[Callable[[Path, dict], object], str]] = {
    "truncated": (lambda path, saved: path.write_bytes(path.read_bytes()[:-200]), "damaged"),
    "a flipped bit": (flipped, "damaged"),
    "empty": (lambda path, saved: path.write_bytes(b""), "damaged"),
    "garbage": (lambda path, saved: path.write_bytes(b"\x80\x02garbage" * 50), "damaged"),
    "a tensor": (lambda path, saved: torch.save(torch.zeros(3), path), "no checkpoint of"),
    "version": (lambda path, saved: torch.save({**saved, "version": 99}, path), "version 99"),
    "keys": (
        lambda path, saved: torch.save({k: v for k, v in saved.items() if k not in ("optimizer", "rng")}, path),
        "lacks optimizer, rng",
    ),
    "settings": (lambda path, saved: torch.save({**saved, "config": {**saved["config"], "spread": 7.0}}, path), "spread is 7.0"),
    "code": (lambda path, saved: torch.save({**saved, "text": Hostile(path.with_name("it ran"))}, path), "damaged"),
    "parent folder": (one_below, "it holds several runs, pass one of {folder}/hdet"),
}
"""what is done to a checkpoint, and what the refusal mentions"""


@pytest.mark.parametrize("how", DAMAGES)
def test_bad_checkpoint_is_refused_in_one_line(tmp_path: Path, how: str) -> None:
    path, (damage, mention) = tmp_path / CHECKPOINT, DAMAGES[how]
    save_checkpoint(path, state())
    damage(path, torch.load(path, weights_only=True))
    with pytest.raises(RunFolderError) as caught:
        load_checkpoint(tmp_path)
    assert mention.format(folder=tmp_path) in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value) and not path.with_name("it ran").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "x"),
        ("step", True),
        ("step", -1),
        ("step", TrainConfig().steps + 1),
        ("model", []),
        ("optimizer", None),
        ("ensemble", None),  # the saved run is an HDET run
        ("rng", "x"),
        ("text", 3),
        ("seconds", float("nan")),
        ("probe_ms", -1.0),
        ("validation", "2.5"),
    ],
)
def test_wrong_value_in_a_checkpoint_is_named(tmp_path: Path, key: str, value: object) -> None:
    save_checkpoint(tmp_path / CHECKPOINT, {**state(), key: value})
    with pytest.raises(RunFolderError, match=f"has a wrong {key}, .*damaged, start the run again$"):
        load_checkpoint(tmp_path)
