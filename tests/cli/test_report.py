"""`hdet report`: what it prints and draws, and what it refuses in one line."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
import re
import socket
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdet.cli.drawing import draw_runs
from hdet.cli.main import main
from hdet.cli.page import make_page
from hdet.cli.report import print_events, print_table
from hdet.cli.runs import RecordedRun, find_runs

from .common import INTERVAL, RECORDS, cycle, one_line, write_run

HOSTILE = '<script>alert(1)</script> & "q" [red]x[/] $\\frac{1$ \x1b[31m\x07 \u4e2d _'


def test_the_table_and_the_events(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "with")
    write_run(tmp_path / "fixed", {"event": "validation", "step": 5, "loss": 2.0})
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert rows[2] == ["fixed", "2.0000", "(not", "ended)", "-", "-", "-"]
    assert rows[3] == ["with", "4.2500", "0.2", "s", "2.00", "%", "1.00", "%"]
    found = str(INTERVAL).replace("\n", "; ")
    assert f"with: trial before step 50: {found}\n" in out
    assert "with: step 50: a note\nwith: step 100: lr: correction 1 -> 2.5\n" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fixed", "with"], "nothing written"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture(tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"picture.{suffix}"
    assert main(["report", str(write_run(tmp_path / "run")), "--out", str(picture)]) == 0
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert picture.read_bytes().startswith(starts[suffix])


def test_losses_and_rates_of_cycles_stand_in_for_train_records(tmp_path: Path) -> None:
    """`Ensemble(log=History(path))` alone is enough."""
    write_run(tmp_path / "run", cycle(50), cycle(100, 2.0, losses=[3.0, 5.0]), cycle(150, 2.0))
    [run] = find_runs([tmp_path / "run"])
    assert run.losses == [(50, 5.0), (100, 4.0), (150, 5.0)]
    assert run.rates == [(50, 0.1), (100, 0.2), (150, 0.2)]
    assert run.schedule == [(50, 0.1), (100, 0.1), (150, 0.1)]
    assert run.events == [(100, "lr: correction 1 -> 2")]


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_page_needs_nothing_else_and_shows_names_and_notes_as_they_are(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "|")
    run = write_run(
        tmp_path / name,
        {"event": "start", "step": 0, "settings": {HOSTILE: HOSTILE}},
        cycle(50, notes=[HOSTILE], trial={**INTERVAL.to_dict(), "reason": HOSTILE}),
    )
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    elements = _Elements(text)
    assert "script" not in elements.names and "link" not in elements.names
    [picture] = elements.links
    assert picture.startswith("data:image/svg+xml;base64,")
    drawing = ElementTree.fromstring(base64.b64decode(picture.partition(",")[2]))
    assert not [part for part in drawing.iter() if "script" in part.tag]
    shown = HOSTILE.replace("\x1b", " ").replace("\x07", " ")
    assert text.count(escape(shown)) == 4  # two of the settings, a note, the trial's reason
    assert text.count(escape(shown.replace("/", "|"))) == 4  # titles, the row, the run's heading
    assert "\x1b" not in text and "\x07" not in text


def test_the_terminal_shows_names_and_notes_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    records = cycle(50, notes=[HOSTILE], trial={**INTERVAL.to_dict(), "reason": HOSTILE})
    assert main(["report", str(write_run(tmp_path / "[red]a[bold]", records))]) == 0
    out = capsys.readouterr().out
    assert "[red]a[bold]" in out and "\x1b" not in out and "\x07" not in out
    assert '<script>alert(1)</script> & "q" [red]x[/] $\\frac{1$' in out


def test_tables_of_a_page_have_the_numbers_of_the_history(tmp_path: Path) -> None:
    write_run(tmp_path / "run", *(cycle(s, notes=[f"note {s}"]) for s in range(1, 1203)))
    text = make_page(find_runs([tmp_path / "run"]))
    notes = [int(number) for number in re.findall(r"note (\d+)<", text)]
    assert notes == list(range(1, 1001)) and "202 more are in history.jsonl" in text


# -- where it may write ----------------------------------------------------------------------------


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except (OSError, AttributeError):
        pytest.skip("no device can be made here")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


TARGETS = {
    "device": _device,
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to(path.with_name("another")),
    "pipe": lambda path: os.mkfifo(path),
    "socket": _socket,
}


@pytest.mark.parametrize("option", ["--out", "--html"])
@pytest.mark.parametrize("kind", TARGETS)
def test_only_a_regular_file_is_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    target = tmp_path / ("x.png" if option == "--out" else "x.html")
    TARGETS[kind](target)
    before = os.lstat(target)
    message = one_line(capsys, "report", write_run(tmp_path / "run"), option, target)
    assert f"{str(target)!r} is not a regular file" in message
    assert os.lstat(target).st_mode == before.st_mode and os.lstat(target).st_ino == before.st_ino


@pytest.mark.parametrize("option", ["--out", "--html"])
@pytest.mark.parametrize("name", ["history.jsonl", "checkpoint.pt", "/dev/null", "x"])
def test_no_file_of_a_run_is_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, name: str
) -> None:
    run = write_run(tmp_path)
    (run / "checkpoint.pt").write_bytes(b"weights")
    before = (run / "history.jsonl").read_bytes()
    assert "must end in ." in one_line(capsys, "report", run, option, run / name)
    assert (run / "history.jsonl").read_bytes() == before
    assert (run / "checkpoint.pt").read_bytes() == b"weights"


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_full_disk_leaves_the_file_as_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, target = (
        write_run(tmp_path / "run"),
        tmp_path / ("x.png" if option == "--out" else "x.html"),
    )
    target.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hdet.cli.report.os.replace", fail)
    message = one_line(capsys, "report", run, option, target)
    assert f"{str(target)!r} cannot be written (No space left on device)" in message
    assert target.read_text() == "before" and len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    message = one_line(capsys, "report", run, "--html", tmp_path / "absent" / "x.html")
    assert "its folder does not exist" in message


# -- damaged histories -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "change", "reason"),
    [
        (2, {"loss": ...}, "KeyError: 'loss'"),
        (2, {"lr": None}, "NoneType in the place of a number"),
        (2, {"step": "x"}, "str in the place of a number"),
        (3, {"corrections": {"lr": -1}}, "-1 is out of range"),
        (3, {"trial": {**INTERVAL.to_dict(), "rate": 0}}, "0 is out of range"),
        (3, {"trial": {"rate": 1.0}}, "KeyError"),
        (5, {"loss": "x"}, "str in the place of a number"),
        (7, {"seconds": ...}, "KeyError: 'seconds'"),
    ],
)
def test_a_damaged_record_is_refused_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int, change: dict, reason: str
) -> None:
    records = [dict(record) for record in RECORDS]
    changed = {**records[number - 1], **change}
    records[number - 1] = {key: value for key, value in changed.items() if value is not ...}
    run = write_run(tmp_path / "run", *records)
    message = one_line(capsys, "report", run)
    assert f"line {number} of '{run / 'history.jsonl'}' is damaged" in message and reason in message


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "is not a folder"),
        (lambda path: path.mkdir(), "holds no history.jsonl"),
        (lambda path: (path / "history.jsonl").mkdir(parents=True), "is not a regular file"),
        (lambda path: (path.mkdir(), os.mkfifo(path / "history.jsonl")), "is not a regular file"),
    ],
)
def test_what_is_no_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Any, says: str
) -> None:
    make(tmp_path / "run")
    assert says in one_line(capsys, "report", tmp_path / "run")


HUGE = [10**400, -(10**400), 10**300, 10**18, 1e308, -1e308, 5e-324, 1e99, math.inf, math.nan]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([*HUGE, "\ud800", -1, 0]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5) | st.just("lr"), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
fuzz = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _report(folder: Path, lines: bytes) -> list[RecordedRun]:
    """All that is done with a history but the picture; nothing where it is refused."""
    (folder / "history.jsonl").write_bytes(lines)
    try:
        runs = find_runs([folder])
    except ValueError as error:
        assert "\n" not in str(error) and str(folder) in str(error) and len(str(error)) < 1000
        return []
    print_table(runs)
    print_events(runs[0])
    return runs


def _lines(*records: dict[str, Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@fuzz
@given(text=st.binary(max_size=60), before=st.booleans())
def test_any_bytes_in_a_history(tmp_path: Path, text: bytes, before: bool) -> None:
    _report(tmp_path, text + _lines(*RECORDS) if before else _lines(*RECORDS) + text)


@fuzz
@given(data=st.data(), number=st.integers(0, len(RECORDS) - 1), value=values)
def test_any_value_in_a_record(
    tmp_path: Path, data: st.DataObject, number: int, value: Any
) -> None:
    record = json.loads(json.dumps(RECORDS[number]))
    inner = record
    while True:  # at any depth
        key = data.draw(
            st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
        )
        if not (isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.booleans())):
            break
        inner = inner[key]
    inner[key] = value
    _report(tmp_path, _lines(*RECORDS[:2], record, *RECORDS[2:]))


@settings(fuzz, max_examples=15)
@given(
    place=st.sampled_from([(1, "loss"), (1, "lr"), (1, "step"), (2, "trial"), (4, "loss")]),
    value=st.sampled_from(HUGE) | st.floats(),
)
@pytest.mark.filterwarnings("error")
def test_what_is_accepted_can_be_drawn(
    tmp_path: Path, place: tuple[int, str], value: float
) -> None:
    number, key = place
    record = json.loads(json.dumps(RECORDS[number]))
    if key == "trial":
        record["trial"]["trial"]["arms"][0]["rate"] = value
    else:
        record[key] = value
    runs = _report(tmp_path, _lines(*RECORDS[:2], record, *RECORDS[2:]))
    if runs:
        draw_runs(runs, "png")
