"""`hdet report`: what it prints and draws, and what it refuses in one line."""

from __future__ import annotations

import base64
import errno
import json
import math
import os
from html import escape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdet.cli.main import main
from hdet.cli.report import make_page, print_report
from hdet.cli.runs import RecordedRun, find_runs

from .common import INTERVAL, RECORDS, cycle, one_line, write_run

HOSTILE = '<script>alert(1)</script> & "q" [red]x[/] $\\frac{1$ \x1b[31m\x07 \u4e2d _'


def test_the_table_and_the_events(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_run(tmp_path / "with")
    write_run(tmp_path / "fixed", {"event": "validation", "step": 5, "loss": 2.0})
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert rows[2] == ["fixed", "2.0000", "-", "-"]
    assert rows[3] == ["with", "4.2500", "0.2", "s", "7.0", "%", "of", "steps"]
    for line in str(INTERVAL).splitlines():
        assert f"with: {line}\n" in out
    assert (
        "with: measuring took 2.00 % of the time\nwith: averages took 1.00 % of the time\n" in out
    )
    assert "with: step 50: a note\n" in out
    assert "with: step 100: lr: from 1 to 2.5 times its schedule\n" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fixed", "with"], "nothing written"


def test_a_picture(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", cycle(50)))
    for suffix, start in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
        picture = tmp_path / f"picture.{suffix}"
        assert main(["report", run, "--out", str(picture)]) == 0
        assert picture.read_bytes().startswith(start)


def test_replicas_values_are_shown_beside_their_losses(tmp_path: Path) -> None:
    """Of cycles in which they differed and which have a loss."""
    alike, lost = cycle(150, tried={"lr": [0.1, 0.1]}), cycle(200, losses=[None, None])
    free = cycle(250, trial=INTERVAL.to_dict(), trial_steps=0.0)
    [run] = find_runs([write_run(tmp_path / "run", cycle(50), alike, lost, free)])
    assert [step for step, _ in run.explored["lr"]] == [50, 250]
    [(value, loss), (other, no_loss)] = run.explored["lr"][0][1]
    assert (value, loss, other) == (0.09, 5.0, 0.11) and math.isnan(no_loss)
    assert not any("cost" in line for lines in run.findings for line in lines), "there was none"


def test_losses_and_rates_of_cycles_stand_in_for_train_records(tmp_path: Path) -> None:
    """`Ensemble(log=History(path))` alone is enough."""
    write_run(tmp_path / "run", cycle(50), cycle(100, 2.0, losses=[3.0, 5.0]), cycle(150, 2.0))
    [run] = find_runs([tmp_path / "run"])
    assert run.losses == [(50, 5.0), (100, 4.0), (150, 5.0)]
    assert run.rates == [(50, 0.1), (100, 0.2), (150, 0.2)]
    assert run.schedule == [(50, 0.1), (100, 0.1), (150, 0.1)]
    assert run.events == ["step 100: lr: from 1 to 2 times its schedule"]


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_names_and_notes_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the terminal, and in a page, which needs nothing else."""
    run, page = tmp_path / HOSTILE.replace("/", "|"), tmp_path / "page.html"
    write_run(
        run,
        {"event": "start", "step": 0, "settings": {HOSTILE: HOSTILE}},
        cycle(50, notes=[HOSTILE], trial={**INTERVAL.to_dict(), "reason": HOSTILE}),
    )
    assert main(["report", str(run), "--html", str(page)]) == 0
    out, text = capsys.readouterr().out, page.read_text(encoding="utf-8")
    shown = HOSTILE.replace("\x1b", " ").replace("\x07", " ")
    name = shown.replace("/", "|")
    assert out.count(shown) == 2 and out.count(name + ":") == 6
    assert text.count(escape(shown)) == 4  # two of the settings, a note, the trial's reason
    assert text.count(escape(name)) == 10  # titles, the table, 4 charts, trial, events, settings
    assert not {"\x1b", "\x07"} & {*out, *text}
    elements = _Elements(text)
    assert not {"script", "link", "red"} & {*elements.names}
    assert len(elements.links) == 4
    for picture in elements.links:
        assert picture.startswith("data:image/svg+xml;base64,")
        drawing = ElementTree.fromstring(base64.b64decode(picture.partition(",")[2]))
        assert not [part for part in drawing.iter() if "script" in part.tag]


def test_a_page_has_all_events_and_the_terminal_some(tmp_path: Path) -> None:
    write_run(tmp_path / "run", *(cycle(s, notes=[f"note {s}"]) for s in range(1, 31)))
    runs, short = find_runs([tmp_path / "run"]), StringIO()
    print_report(runs, short)
    assert "note 10\n" in short.getvalue() and "note 11" not in short.getvalue()
    assert "run: 20 more events: pass --html FILE for all" in short.getvalue()
    assert "note 30<" in make_page(runs)


# -- where it may write ----------------------------------------------------------------------------

TARGETS = {
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3)),
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to(path.with_name("another")),
    "pipe": os.mkfifo,
}


@pytest.fixture(params=["--out", "--html"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """An option, and a file that it may write."""
    return request.param, tmp_path / ("x.png" if request.param == "--out" else "x.html")


@pytest.mark.parametrize("kind", TARGETS)
def test_only_a_regular_file_is_replaced(capsys, tmp_path: Path, target, kind: str) -> None:
    option, path = target
    try:
        TARGETS[kind](path)
    except PermissionError:
        pytest.skip("no device can be made here")
    before = os.lstat(path)
    message = one_line(capsys, "report", write_run(tmp_path / "run"), option, path)
    assert f"{str(path)!r} is not a regular file" in message
    assert os.lstat(path).st_mode == before.st_mode and os.lstat(path).st_ino == before.st_ino


@pytest.mark.parametrize(("name", "says"), [
    ("history.jsonl", "must end in ."), ("checkpoint.pt", "must end in ."),
    ("/dev/null", "must end in ."), ("", "must end in ."),
    ("absent/x{}", "its folder does not exist"),
])  # fmt: skip
def test_no_file_of_a_run_is_replaced(capsys, tmp_path: Path, target, name: str, says: str) -> None:
    option, path = target
    run = write_run(tmp_path)
    (run / "checkpoint.pt").write_bytes(b"weights")
    before = (run / "history.jsonl").read_bytes()
    assert says in one_line(capsys, "report", run, option, run / name.format(path.suffix))
    assert (run / "history.jsonl").read_bytes() == before
    assert (run / "checkpoint.pt").read_bytes() == b"weights"


def test_a_full_disk_leaves_the_file_as_it_was(capsys, tmp_path, target, monkeypatch) -> None:
    option, path = target
    run = write_run(tmp_path / "run")
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hdet.cli.report.os.replace", fail)
    message = one_line(capsys, "report", run, option, path)
    assert f"{str(path)!r} cannot be written (No space left on device)" in message
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 2


# -- damaged histories -----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "change", "reason"), [
    (2, {"loss": ...}, "KeyError: 'loss'"),
    (2, {"step": "x"}, "str in the place of a number"),
    (3, {"trial": {"rate": 1.0}}, "KeyError"),
])  # fmt: skip
def test_a_damaged_record_is_refused_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int, change: dict, reason: str
) -> None:
    records = [dict(record) for record in RECORDS]
    changed = {**records[number - 1], **change}
    records[number - 1] = {key: value for key, value in changed.items() if value is not ...}
    run = write_run(tmp_path / "run", *records)
    message = one_line(capsys, "report", run)
    assert f"line {number} of '{run / 'history.jsonl'}' is damaged" in message and reason in message


@pytest.mark.parametrize(("make", "says"), [
    (lambda path: None, "is not a folder"),
    (lambda path: path.mkdir(), "holds no history.jsonl"),
    (lambda path: (path / "history.jsonl").mkdir(parents=True), "is not a regular file"),
    (lambda path: (path.mkdir(), os.mkfifo(path / "history.jsonl")), "is not a regular file"),
])  # fmt: skip
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
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _report(folder: Path, lines: bytes) -> list[RecordedRun]:
    """All that is done with a history but the picture; nothing where it is refused."""
    (folder / "history.jsonl").write_bytes(lines)
    try:
        runs = find_runs([folder])
    except ValueError as error:
        assert "\n" not in str(error) and str(folder) in str(error) and len(str(error)) < 1000
        return []
    print_report(runs)
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


@settings(fuzz, max_examples=6)
@given(
    place=st.sampled_from([(1, "loss"), (1, "lr"), (1, "step"), (4, "loss")]),
    value=st.sampled_from(HUGE) | st.floats(),
)
@pytest.mark.filterwarnings("error")
def test_what_is_accepted_can_be_drawn(
    tmp_path: Path, place: tuple[int, str], value: float
) -> None:
    number, key = place
    record = {**RECORDS[number], key: value}
    runs = _report(tmp_path, _lines(*RECORDS[:2], record, *RECORDS[2:]))
    if runs:
        make_page(runs)
