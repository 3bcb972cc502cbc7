"""Whatever is in a run's files, they are read or refused in one line that names the file."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdet.cli.html_report import page
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.run_files import CONFIG, HISTORY, RunFolderError, read_history, truncate_history
from hdet.cli.report import plot, print_table, trial_lines
from hdet.cli.runs import RunFiles
from hdet.trial.rule import Arm, Trial

from .harness import one_line

TRIAL = Trial(
    rate=0.1,
    arms=(Arm(0.0125, (5.0, 5.1), 0.01), Arm(0.1, (4.0, 4.1), 0.1), Arm(0.8)),
    first_losses=(5.5, 5.6),
)
CYCLE = {
    "multipliers": {"lr": [0.9, 1.1]}, "losses": [5.0, 5.1], "probe": None, "left_out": [], "rolled_back": False, "notes": ["a note"],
    "trial": TRIAL.interval(2000).to_dict(),
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "train": {"event": "train", "step": 3, "loss": 5.5, "lr": 0.1, "correction": 1.0},
    "validation": {"event": "validation", "step": 4, "loss": 5.4, "batches": 3},
    "cycle": {"event": "cycle", "step": 4, "slopes": {"lr": 0.1}, "errors": {"lr": 0.2}, **CYCLE},
    "end": {"event": "end", "step": 8, "seconds": 1.5, "probe_percent": 1.0, "converge_percent": 2.0},
}
HUGE = [10**400, -(10**400), 10**300, -(10**300), 10**18, 1e308, -1e308, 5e-324, 1e99, -1e99, math.inf, math.nan, "\ud800", -1, 0, True]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(HUGE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("lr"), inner, max_size=3),
    max_leaves=5,
)
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run_of(folder: Path, lines: bytes, config: bytes | None = None) -> Path:
    (folder / HISTORY).write_bytes(lines)
    (folder / CONFIG).write_bytes(json.dumps(TrainConfig().to_dict()).encode() if config is None else config)
    return folder


def lines_of(*records: dict[str, Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def looked_at(folder: Path) -> RunFiles | None:
    """All that is done with a run's files but the picture; None where they are refused. A page needs more of them, and may refuse those."""
    read = None
    for use in (lambda: truncate_history(folder / HISTORY, 4), lambda: RunFiles.read(folder)):
        try:
            read = use()
        except RunFolderError as error:
            assert "\n" not in str(error) and str(folder) in str(error) and len(str(error)) < 400 + 2 * len(str(folder))
            read = None
    if read is not None:
        print_table([read])
        with suppress(RunFolderError):
            page([read]).encode()
            trial_lines([read])
    return read


@fuzz
@given(text=st.binary(max_size=60), before=st.booleans())
def test_any_bytes_in_a_history(tmp_path: Path, text: bytes, before: bool) -> None:
    looked_at(run_of(tmp_path, text + lines_of(GOOD["train"]) if before else lines_of(GOOD["train"]) + text))


@fuzz
@given(event=st.sampled_from(sorted(GOOD)), data=st.data(), value=values)
def test_any_value_in_a_record(tmp_path: Path, event: str, data: st.DataObject, value: Any) -> None:
    record = dict(GOOD[event])
    record[data.draw(st.sampled_from([*record, "another"]))] = value
    looked_at(run_of(tmp_path, lines_of(GOOD["train"], record, *GOOD.values())))


@settings(fuzz, max_examples=15)
@given(event=st.sampled_from(sorted(GOOD)), data=st.data(), value=st.sampled_from(HUGE) | st.floats(allow_nan=False))
@pytest.mark.filterwarnings("ignore")
def test_what_is_accepted_can_be_drawn(tmp_path: Path, event: str, data: st.DataObject, value: Any) -> None:
    key = data.draw(st.sampled_from([key for key in GOOD[event] if key != "event"]))
    record = {**GOOD[event], key: {"lr": value} if key in ("slopes", "errors") else value}
    read = looked_at(run_of(tmp_path, lines_of(GOOD["train"], GOOD["cycle"], record)))
    if read is not None:
        plot([read], tmp_path / "picture.png")


@fuzz
@given(path=st.sampled_from(["", "multipliers", "trial", "trial.trial", "trial.trial.arms.0"]), data=st.data())
def test_any_value_in_what_a_page_reads_of_a_cycle(tmp_path: Path, path: str, data: st.DataObject) -> None:
    record = json.loads(json.dumps(GOOD["cycle"]))
    inner = record
    for key in filter(None, path.split(".")):
        inner = inner[int(key) if key.isdigit() else key]
    keys = [key for key in inner if key not in ("event", "step", "slopes", "errors")]
    drawn = values | st.lists(st.floats(-10, 10) | st.floats(), max_size=4) | st.floats(1e-100, 1e100)
    inner[data.draw(st.sampled_from(sorted(keys)))] = data.draw(drawn)
    read = looked_at(run_of(tmp_path, lines_of(GOOD["train"], record, GOOD["end"])))
    assert read is not None, "no other report reads it"


DAMAGES: dict[str, tuple[str, Any]] = {
    "no dict": ("", []), "a rate of 0": ("rate", 0), "no end": ("high", ...), "a low below 0": ("low", -1.0),
    "no trial": ("trial", None), "no arms": ("trial.arms", []), "a loss of no number": ("trial.first_losses", [None]),
    "an arm without losses": ("trial.arms.0.losses", ...), "a displacement below 0": ("trial.arms.1.displacement", -0.1),
    "no list of losses": ("trial.arms.0.losses", "x"), "a flag of another kind": ("trial.pretrained", 3),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_trial_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    path, value = DAMAGES[how]
    record = json.loads(json.dumps(GOOD["cycle"]))
    *way, last = ["trial", *filter(None, path.split("."))]
    inner = record
    for key in way:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    if value is ...:
        del inner[last]
    run_of(tmp_path, lines_of(GOOD["train"], record, GOOD["end"]))
    with pytest.raises(RunFolderError, match="line 2 of history .* has a wrong trial, .*: remove that line"):
        _ = RunFiles.read(tmp_path).trials
    for page_too in ([], ["--html", str(tmp_path / "page.html")]):
        assert "line 2" in one_line(capsys, "report", str(tmp_path), *page_too)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted((CONFIG, HISTORY))


@fuzz
@given(key=st.sampled_from(["mode", "steps", "max_lr"]), value=values)
def test_any_value_in_the_settings(tmp_path: Path, key: str, value: Any) -> None:
    looked_at(run_of(tmp_path, lines_of(*GOOD.values()), json.dumps({**TrainConfig().to_dict(), key: value}).encode()))


DEEP = [b"[" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b'{"step": ' + b"[" * 900 + b"]" * 900 + b"}", b"\xff\xfe{}"]
DEEP += [b'{"event": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"step": 1' + b"0" * 5000 + b"}", b'{"step": 1' + b"0" * 4000 + b"}"]


@pytest.mark.parametrize("line", DEEP)
def test_a_line_that_no_run_has_written_is_refused_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes) -> None:
    run = run_of(tmp_path, lines_of(GOOD["train"]) + line + b"\n" + lines_of(GOOD["train"]))
    assert looked_at(run) is None
    message = one_line(capsys, "report", str(run))
    assert "line 2" in message and message.endswith(": remove that line\n") and len(message) < 300 + 2 * len(str(run))
    (run / HISTORY).write_bytes(lines_of(GOOD["train"]) + line)  # torn by a kill, perhaps
    assert len(read_history(run / HISTORY)) in (1, 2)


def test_a_deep_record_of_a_later_version_is_kept_as_it_is(tmp_path: Path) -> None:
    deep = b'{"step": 3, "new": ' + b"[" * 800 + b"]" * 800 + b"}\n"
    path = run_of(tmp_path, deep + lines_of(GOOD["end"])) / HISTORY
    truncate_history(path, 4)
    assert path.read_bytes() == deep


@pytest.mark.parametrize("name", [HISTORY, CONFIG])
def test_what_is_no_file_is_not_read_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run_of(tmp_path, lines_of(*GOOD.values()))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    message = one_line(capsys, "report", str(tmp_path))
    assert name in message
    with pytest.raises(RunFolderError):
        RunFiles.read(tmp_path)


@pytest.mark.parametrize("name", ["steps", "max_lr", "seed", "weight_decay", "replicas"])
def test_numbers_beyond_all_bounds_are_refused_as_settings(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        TrainConfig(**{name: 10**400})
    if name in ("steps", "seed", "replicas"):
        assert name in one_line(capsys, "train", f"--{name}", "1" + "0" * 400)
