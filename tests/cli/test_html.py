"""`hdet report --html`: the page says what the history says, needs nothing else, and can be read on a phone, in the dark, and by who sees no chart."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hdet.cli.charts import (
    COLUMNS,
    HEIGHT,
    ROWS,
    WIDTH,
    Point,
    Series,
    chart,
    linear,
    log,
    number,
    symlog,
    thin,
    until,
)
from hdet.cli.html_report import OPEN, page
from hdet.cli.job.checkpoint import load_checkpoint
from hdet.cli.job.run_files import CONFIG, HISTORY
from hdet.cli.main import main
from hdet.cli.runs import RunFiles, find_runs
from hdet.trial.rule import Arm, Trial

from .harness import ROOT, one_line
from .test_runs import Straight

HOSTILE = "lr: <script>alert(1)</script> & \"quoted\" \x07 <img src='http://example.org/x.png'>"
FIRST = (4.0,) * 28
TRIAL = Trial(  # higher is better, until it breaks
    rate=2e-4,
    arms=(
        Arm(2.5e-5, (3.9, 4.1) * 14, 0.01), Arm(2e-4, (2.9, 3.1) * 14, 0.08),
        Arm(1.6e-3, (1.9, 2.1) * 14, 0.5), Arm(1.28e-2),
    ),
    first_losses=FIRST,
)  # fmt: skip
OWN = Trial(rate=2e-4, arms=(Arm(2e-4, displacement=0.001),))


def write(
    folder: Path,
    controller: str = "probe",
    replicas: int = 4,
    cycles: int = 40,
    loss: Callable[[int], float | None] | None = None,
    trial: Trial | None = None,
) -> Path:
    """A run as `hdet train` would have recorded it, of made-up numbers; ``controller`` "fixed": of the fixed schedule."""
    draw, correction, records = random.Random(0), 1.0, list[dict[str, Any]]()
    fixed, probed = controller == "fixed", controller == "probe"
    peak, floor = {"fixed": (3e-4, 3.0), "probe": (3e-4, 2.0), "auto": (2e-4, 2.4)}.get(controller, (4e-4, 2.2))  # none covers another one
    for cycle in range(cycles):
        step = 10 * (cycle + 1)
        rate = peak * math.sin(math.pi * (cycle + 0.5) / cycles)
        value = (floor + 3 * math.exp(-cycle / cycles * 5) + draw.gauss(0, 0.05)) if loss is None else loss(cycle)
        records.append({"event": "train", "step": step, "loss": value, "lr": rate * correction, "correction": correction})
        if not fixed:
            rho = (
                [1.0] * replicas
                if controller in ("auto", "none")
                else [0.7 + 0.6 * ((r + cycle) % replicas) / max(1, replicas - 1) for r in range(replicas)]
            )
            moved = probed and 5 <= cycle < 9 or trial is not None and cycle == 5
            correction *= 1.5 if moved else 1.0
            slope = {"lr": -0.3 / (cycle + 1) if probed and cycle < 20 else None}
            losses = [None if value is None else value + 0.02 * (1 - m) for m in rho]
            records.append({
                "event": "cycle", "cycle": cycle, "step": step, "slopes": slope, "errors": {"lr": 0.02 if slope["lr"] else None},
                "multipliers": {"lr": rho}, "losses": losses, "probe": losses if probed and cycle < 20 else None,
                "left_out": [2] if probed and cycle == 7 else [], "rolled_back": probed and cycle == 11,
                "notes": [HOSTILE] * (probed and cycle == 12),
                "trial": trial.interval(10 * cycles).to_dict() if trial and cycle == 5 else None,
            })  # fmt: skip
        if cycle % (cycles // 10) == 0 or cycle == cycles - 1:
            records.append({"event": "validation", "step": step, "loss": value, "batches": 3})
    records.append({"event": "end", "step": 10 * cycles, "seconds": 61.25, "probe_percent": 1.5, "converge_percent": 0.75})
    config = {
        "mode": "fixed" if fixed else "hdet",
        "steps": 10 * cycles,
        "max_lr": peak,
        "pct_start": 0.1,
        "replicas": replicas,
        "controller": controller,
    }
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / HISTORY).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def broken(cycle: int) -> float | None:
    return None if cycle in (10, 11) or cycle > 30 else 5 - cycle / 10


KINDS: dict[str, Callable[[Path], Path]] = {
    "fixed": lambda folder: write(folder, "fixed"),
    "probe": lambda folder: write(folder),
    "auto": lambda folder: write(folder, "auto", replicas=1, trial=TRIAL),
    "first steps": lambda folder: write(folder, "auto", replicas=1, trial=OWN),
    "softmax": lambda folder: write(folder, "softmax"),
    "alike": lambda folder: write(folder, "none"),
    "one replica": lambda folder: write(folder, "none", replicas=1),
    "broken": lambda folder: write(folder, "softmax", loss=broken),
    "<b>&amp;": lambda folder: write(folder, "softmax", replicas=40),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    for name, make in KINDS.items():
        make(home / name)
    return home


class Page(HTMLParser):
    """Checks that what is opened is closed, and keeps texts, attributes and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.tables: list[tuple[str, list[list[str]]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append(("", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag == "td":
            self.tables[-1][1][-1].append("")
        elif tag == "br":
            self.tables[-1][1][-1][-1] += "\n"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
        if "caption" in self.open:
            self.tables[-1] = (self.tables[-1][0] + data, self.tables[-1][1])
        elif "td" in self.open:
            self.tables[-1][1][-1][-1] += data

    def words(self, *tags: str) -> str:
        return " ".join(" ".join(text for tag, text in self.texts if not tags or tag in tags).split())

    def table(self, caption: str) -> list[list[str]]:
        [found] = [rows for title, rows in self.tables if title.startswith(caption)]
        return [row for row in found if row]


def page_of(*folders: Path) -> tuple[Page, str]:
    text = page(find_runs(folders))
    return Page(text), text


# -- what is said ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_whole_and_needs_nothing_else(runs: Path, kind: str) -> None:
    read, text = page_of(runs / kind)
    tags = {tag for tag, _ in read.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "use", "image"}
    assert not {name for _, attributes in read.tags for name in attributes} & {"src", "href", "srcset", "xlink:href", "action", "data"}
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert kind in read.words("h1") and kind in read.words("title") and kind in read.words("h3")
    charts = [attributes for tag, attributes in read.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(charts) == text.count("<figure>") == text.count("<desc>") >= 2 and all(attributes["aria-label"] for attributes in charts)
    assert "nan" not in re.findall(r"[\w.]+", " ".join(str(attributes.get("d")) for _, attributes in read.tags).lower())


def test_the_outcome_comes_first(runs: Path) -> None:
    read, _ = page_of(runs / "fixed", runs / "probe")
    last = {name: RunFiles.read(runs / name).validation for name in ("fixed", "probe")}
    assert last["fixed"] is not None and last["probe"] is not None
    below = last["fixed"] - last["probe"]
    assert (
        read.words("h1") == f"probe ends at a validation loss of {last['probe']:.4f} nats per byte, {below:.4f} below the fixed schedule."
    )
    said = read.words("p")
    assert "a peak of 0.0003. In the end it was multiplied by 5.062, to a peak of 0.001519. Probes took 1.5 % of the training time." in said
    assert f"{last['probe']:.4f}" in read.words("b") and "0.0003 → 0.001519" in read.words("dd") and "61.2 s" in read.words("dd")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("fixed", "stayed on its schedule, whose peak is 0.0003. No compute went into trials"),
        # Three arms of 28 steps, one of 7, and 28 scores of four.
        ("auto", "The trial cost as much as 128 steps, 32.1 % of the run"),
        ("first steps", "No compute went into trials"),
        ("first steps", "The first 28 steps, without a trial, moved the weights by 0.001 of their size"),
        ("softmax", "The controller tells no slope and no interval"),
        ("one replica", "Nothing moves the rate in this run"),
        ("one replica", "One replica, or no losses of several"),
        ("alike", "All trained at the same rate"),
        ("broken", "14 losses are not finite: gaps"),
        ("probe", "Replicas with higher rates were the better ones in 20 of 20 cycles"),
        ("probe", "Replicas left out of an average: 1. Cycles taken back: 1."),
        ("probe", "None was measured after step 200"),
        ("probe", "In 7 of 20 cycles the slope was more than two errors"),  # 0.3 / n > 2 * 0.02
    ],
)
def test_what_is_said_of_each_kind_of_run(runs: Path, kind: str, says: str) -> None:
    assert says in page_of(runs / kind)[0].words("p")


def test_numbers_are_those_of_the_history(runs: Path) -> None:
    read, _ = page_of(runs / "fixed", runs / "probe", runs / "broken")
    for name in ("fixed", "probe", "broken"):
        run = RunFiles.read(runs / name)
        for event, what in (("train", "training"), ("validation", "validation")):
            shown = [["not finite" if v is None else f"{v:.6g}" for v in (r["step"], r["loss"])] for r in run.of(event)]
            assert read.table(f"{name}: {what} loss") == shown
        rates = [[f"{v:.6g}" for v in (r["step"], r["lr"], r["lr"] / r["correction"], r["correction"])] for r in run.of("train")]
        assert read.table(f"{name}: rate") == rates
    slopes = [[f"{v:.6g}" for v in (r["step"], r["slopes"]["lr"], 0.02)] for r in RunFiles.read(runs / "probe").cycles if r["slopes"]["lr"]]
    assert len(slopes) == 20
    assert read.table("Slopes") == slopes
    first = RunFiles.read(runs / "probe").cycles[0]
    pairs = zip(first["multipliers"]["lr"], first["probe"], strict=True)
    assert page_of(runs / "probe")[0].table("Multiplier and loss")[0] == ["10", ", ".join(f"{number(m)}: {number(x)}" for m, x in pairs)]


def changed(trial: Trial, arms: tuple[Arm, ...]) -> Trial:
    return Trial(trial.rate, arms, trial.first_losses)


SCORES = {2e-4: (2.9, 3.1) * 14, 1.6e-3: (2.91, 3.11) * 14}
TRIALS: dict[str, tuple[Trial, list[str]]] = {
    "raised": (TRIAL, ["Your rate, 0.0002, learned less than higher rates: it went to 0.000", "from 0.000",
                       "Broke, or stopped for being far behind: 0.013."]),
    "tied": (changed(TRIAL, tuple(Arm(rate, losses, 0.1) for rate, losses in SCORES.items())),
             ["Your rate, 0.0002: inside the interval.", "All rates tied.", "from 2e-05 up to 0.032"]),
    "open": (changed(TRIAL, tuple(Arm(rate, losses) for rate, losses in SCORES.items())),
             ["No lower rate was ruled out; no higher rate was ruled out."]),
    "nothing learned": (changed(TRIAL, tuple(Arm(rate, FIRST, 0.1) for rate in SCORES)),
                        ["No rate has learned anything: only how far the weights moved counts."]),
    "broken": (changed(TRIAL, tuple(Arm(rate) for rate in SCORES)),
               ["every rate that was tried broke", "0.0002, 0.0016."]),
    "too far": (changed(TRIAL, (*TRIAL.arms[:3], Arm(1.28e-2, (70.0, 70.2) * 14, 9.0))),
                ["Above the frame: the loss at 0.013."]),
    "own": (OWN, ["hardly moves the weights: it went to", "from 0.002 up to 0.4", "0.001 of their size"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRIALS)
def test_a_trial_is_told_in_words(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the page, and by the report of a terminal."""
    trial, says = TRIALS[kind]
    run = write(tmp_path / "run", "auto", replicas=1, trial=trial)
    read, _ = page_of(run)
    said = read.words("p")
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(words in said for words in says), said
    assert all(words in out for words in says if "frame" not in words), out
    assert ("the trial cost" in out) == (kind != "own")


def test_losses_are_drawn_over_rates(runs: Path) -> None:
    read, text = page_of(runs / "auto")
    [drawn] = re.findall(r'<svg[^>]*aria-label="Loss over rate.*?</svg>.*?</div></div>', text, re.DOTALL)
    interval = TRIAL.interval(400)
    paths = dict(re.findall(r'<path class="([^"]*)" d="([^"]*)"/>', drawn))
    labels = [float(label) for label in re.findall(r'left:[\d.]+%">([^<]*)<', drawn)]
    assert labels == sorted(labels) and {1e-4, 1e-3, 1e-2} <= set(labels)
    places = [float(at) for at in re.findall(r'left:([\d.]+)%"', drawn)]

    def rate(x: str) -> float:
        """By two labels."""
        (a, b), (p, q) = (math.log(labels[0]), math.log(labels[-1])), (places[0], places[-1])
        return math.exp(a + (100 * int(x) / WIDTH - p) / (q - p) * (b - a))

    near = pytest.approx
    dots, bars = re.findall(r"M(\d+) (\d+)h0", paths["dots s1"]), re.findall(r"M(\d+) (\d+)V(\d+)", paths["bars s1"])
    assert [rate(x) for x, _ in dots] == [near(arm.rate, rel=0.02) for arm in TRIAL.arms[:3]]
    assert all(int(top) < int(middle) < int(low) for (_, middle), (_, top, low) in zip(dots, bars, strict=True))
    assert [rate(x) for x in re.findall(r"M(\d+) 0V", paths["marks ink"])] == [near(2e-4, rel=0.02)]
    assert [rate(x) for x in re.findall(r"M(\d+) 0V", paths["marks s1"])] == [near(interval.suggestion, rel=0.02)]
    span = re.findall(r"M(\d+) 0H(\d+)V", paths["span s1"])[0]
    assert [rate(x) for x in span] == [near(end, rel=0.02) for end in (interval.low, interval.high)]
    assert "dotted ink" in paths and "<title>rate 0.0002\nloss after the trial: 3\nbefore training: 4</title>" in drawn
    said = read.words("li")
    assert f"now: {number(interval.suggestion)}" in said and "yours: 0.0002" in said and "auto, rate moved" in said
    assert read.table("Losses after the trial")[-1] == ["0.0128", "-", "-", "-"]
    [loss] = re.findall(r'<svg[^>]*aria-label="Loss: .*?</svg>', text, re.DOTALL)
    assert f'<path class="marks s1" d="M{round(WIDTH * 0.985 * 70 / 400)} 0V' in loss


def test_an_open_end_is_the_edge_of_the_chart(tmp_path: Path) -> None:
    arms = tuple(Arm(rate, losses) for rate, losses in SCORES.items())
    _, text = page_of(write(tmp_path / "run", "auto", replicas=1, trial=changed(TRIAL, arms)))
    [(left, right)] = re.findall(r'class="span s1" d="M(\d+) 0H(\d+)V', text)
    assert int(left) == 0 and int(right) > WIDTH


def test_each_of_several_trials_has_a_figure(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "auto", tmp_path / "run")
    records = [json.loads(line) for line in (run / HISTORY).read_text().splitlines()]
    cycles = [record for record in records if record["event"] == "cycle"]
    cycles[8]["trial"] = cycles[5]["trial"]
    (run / HISTORY).write_text("".join(json.dumps(record) + "\n" for record in records))
    read, _ = page_of(run)
    assert "Loss over rate, step 60" in read.words("h3") and "Loss over rate, step 90" in read.words("h3")
    assert "as much as 257 steps" in read.words("p")


def test_a_real_run_is_told_as_its_controller_tells_it(straight: Straight) -> None:
    folder, finished = straight("auto")
    state = load_checkpoint(folder)["ensemble"]["controller_state"]
    [(step, interval)] = RunFiles.read(folder).trials
    assert step == 56 and interval.trial.interval(200) == interval and state["done"]
    # Arms that stop do so at the looks after 7, 14 or 21 steps.
    assert RunFiles.read(folder).trial_cost == pytest.approx(state["cost"], abs=5 * 14)
    read, _ = page_of(folder)
    assert f"it went to {interval.suggestion:.2g}" in read.words("p") and "Loss over rate" in read.words("h3")
    assert f"it went to {interval.suggestion:.2g}" in finished.out


def test_events_are_in_order_of_time_and_escaped(runs: Path, tmp_path: Path) -> None:
    read, text = page_of(runs / "probe")
    events = [table for _, table in read.tables if any("left out" in cell for row in table for cell in row)]
    assert [row for row in events[-1] if row] == [
        ["80", "replica 2 left out"],
        ["120", "cycle taken back"],
        ["130", HOSTILE.replace("\x07", " ")],
    ]
    assert "<script" not in text and "http://example" in text
    read, _ = page_of(runs / "broken")
    rows = [row for _, table in read.tables for row in table]
    assert ["110 to 120", "training loss not finite (2 times)"] in rows and ["320 to 400", "training loss not finite (9 times)"] in rows
    # Many: a few at once, the others on demand.
    many = write(tmp_path / "many", "softmax", loss=lambda cycle: None if cycle % 2 else 2.0)
    _, text = page_of(many)
    assert "validation loss" in text and f"<summary>{20 + 1 - OPEN} more</summary>" in text


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    read, _ = page_of(write(tmp_path / "a" / "hdet"), write(tmp_path / "b" / "hdet", "softmax"))
    assert "a/hdet" in read.words("h2") and "b/hdet" in read.words("h2") and "the lowest of 2 runs" in read.words("h1")


def test_runs_of_other_lengths_are_not_compared_in_silence(runs: Path, tmp_path: Path) -> None:
    """And each has its own schedule in the legend, and charts of its own length."""
    long = write(tmp_path / "long", cycles=80, replicas=2, loss=lambda cycle: 1.5)
    read, text = page_of(runs / "fixed", long, runs / "probe")
    said = "the lowest of 2 runs with a controller, [0-9.]+ below the fixed schedule, which had 400 steps and 4 replicas[.]"
    assert re.search(said, read.words("h1")), read.words("h1")
    assert all(f"schedule of {steps} steps, peak 0.0003" in read.words("li") for steps in (400, 800))
    ends = [re.findall(r"<span[^>]*>(\d+)</span>", plot)[-1] for plot in re.findall(r'<div class="across".*?</div>', text)]
    assert ends == ["800", "800", *["800"] * 2, *["400"] * 2], "all runs twice, then each run's own"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "has no finite validation loss yet"),
        ([("validation", 40, 2.5)], "has not ended: at step 40 of 400 it is at a validation loss of 2.5000"),
        ([("validation", 40, 2.5), ("validation", 80, None)], "has no finite validation loss any more"),
    ],
)
def test_a_run_that_has_not_ended(tmp_path: Path, lines: list[tuple[str, int, float | None]], says: str) -> None:
    run = write(tmp_path / "run")
    (run / HISTORY).write_text("".join(json.dumps({"event": event, "step": step, "loss": loss}) + "\n" for event, step, loss in lines))
    read, _ = page_of(run)
    assert says in read.words("h1") and "not ended" in read.words("dd")


# -- files -----------------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_a_picture_on_demand(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(runs / "probe", tmp_path / "run")
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert f"page: {tmp_path / 'page.html'}" in capsys.readouterr().out and not (run / "report.png").exists()
    Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert main(["report", str(run), "--html", str(tmp_path / "page.html"), "--out", str(tmp_path / "report.png")]) == 0
    assert (tmp_path / "report.png").is_file() and "picture: " in capsys.readouterr().out
    assert "html is" in (line := one_line(capsys, "report", str(run), "--html", str(tmp_path))) and "which is a folder" in line
    assert "its folder does not exist" in one_line(capsys, "report", str(run), "--html", str(tmp_path / "absent" / "page.html"))


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"notes": "x"}, "wrong notes"),
        ({"multipliers": {"lr": ["x"]}}, "wrong multipliers"),
        ({"trial": 3}, "wrong trial"),
        ({"losses": 1}, "wrong losses"),
    ],
)
def test_a_damaged_cycle_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], mentions: str
) -> None:
    run = shutil.copytree(runs / "probe", tmp_path / "run")
    lines = (run / HISTORY).read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    (run / HISTORY).write_text("\n".join(lines) + "\n")
    line = one_line(capsys, "report", str(run), "--html", str(tmp_path / "page.html"))
    assert f"line 2 of history '{run / HISTORY}' has a {mentions}" in line and not (tmp_path / "page.html").exists()


def test_the_template_is_in_the_wheel() -> None:
    assert '"cli/page.html"' in (ROOT / "pyproject.toml").read_text() and "page.html" in (ROOT / "MANIFEST.in").read_text()


# -- charts ----------------------------------------------------------------------------------------------------------------


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    text = page(find_runs([write(tmp_path / "long", "softmax", replicas=8, cycles=10_000)]))
    assert len(text) < 600_000, len(text)
    read = Page(text)
    assert f"lowest and highest value in each of {COLUMNS} columns" in read.words("p")
    [(caption, rows)] = [(c, t) for c, t in read.tables if c.startswith("long: training loss")]
    assert "One of 50 rows, and the last: all 10000 are in history.jsonl" in caption
    assert ROWS <= len(rows) <= ROWS + 2 and rows[-1][0] == "100000"


def test_thinning_loses_no_extreme_and_no_gap() -> None:
    draw = random.Random(1)
    points: list[Point] = [(x, v, v) for x in range(50_000) for v in [draw.random()]]
    points[123], points[4567], points[30_000] = (123, 9.0, 9.0), (4567, -9.0, -9.0), (30_000, None, None)
    kept = thin(points, 0, 50_000)
    assert {points[123], points[4567]} <= set(kept) <= {*points, *((x, None, None) for x, _, _ in points)}
    assert len(kept) <= 3 * COLUMNS and kept == sorted(kept, key=lambda p: p[0]) and sum(p[1] is None for p in kept) == 1
    column = [p for p in points if 62.5 * 40 <= p[0] < 62.5 * 41]
    assert {min(column, key=lambda p: p[1] or 0), max(column, key=lambda p: p[1] or 0)} <= set(kept)
    assert thin(points[:1000], 0, 50_000) == points[:1000]
    bands: list[Point] = [(x, -draw.random(), draw.random()) for x in range(50_000)]
    covered = thin(bands, 0, 50_000)
    assert len(covered) <= COLUMNS + 1 and min(low for _, low, _ in covered if low is not None) == min(
        low for _, low, _ in bands if low is not None
    )


def test_a_gap_is_a_gap_and_a_lone_point_is_seen() -> None:
    def path(*values: float | None) -> str:
        points: list[Point] = [(step, value, value) for step, value in enumerate(values)]
        drawn = chart("t", "d", [Series("s", "s1", points)], linear([0.0, 1.0]), until(4))
        found = re.search(r'class="line s1" d="([^"]*)"', drawn)
        assert found
        return found[1]

    assert path(0, 1, 0, 1).count("M") == 1
    assert path(0, 1, None, 1, 0).count("M") == 2
    assert path(0, 1, None, 1).endswith("h0"), "a line of one point is a dot"
    assert path(None, None) == ""


def test_points_lie_where_the_labels_say() -> None:
    drawn = chart("t", "d", [Series("s", "s1", [(0, 0.0, 0.0), (1, 1.0, 1.0), (4, 0.5, 0.5)])], linear([0.0, 1.0]), until(4))
    points = re.search(r'class="line s1" d="M(\d+) (\d+) (\d+) (\d+) (\d+) (\d+)"', drawn)
    assert points
    across = {label: float(at) for at, label in re.findall(r'left:([\d.]+)%">([^<]*)<', drawn)}
    up = {label: float(at) for at, label in re.findall(r'bottom:([\d.]+)%">([^<]*)<', drawn)}
    for (x, y), step, value in zip([points.group(i, i + 1) for i in (1, 3, 5)], ("0", "1", "4"), ("0", "1", None), strict=True):
        assert int(x) / WIDTH == pytest.approx(across[step] / 100, abs=1e-3)
        assert value is None or 1 - int(y) / HEIGHT == pytest.approx(up[value] / 100, abs=1e-3)
    assert across["4"] > 95 and up["1"] > 90 and "<title>step 1\ns: 1</title>" in drawn


def test_scales() -> None:
    even, decades, both = linear([0.0, 10.0]), log([1e-4, 1e-2]), symlog([-1.0, 1.0], near=0.01)
    assert even.at(5.0) == pytest.approx(0.5) and decades.at(1e-3) == pytest.approx(0.5) and both.at(0.0) == pytest.approx(0.5)
    assert decades.at(0.0) is None and decades.at(-1.0) is None and even.at(None) is None
    assert [label for _, label in even.labels()] == ["0", "2", "4", "6", "8", "10"]
    assert {"0.0001", "0.001", "0.01"} <= {label for _, label in decades.labels()}
    assert {"0", "1", "-1"} <= {label for _, label in both.labels()}


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def luminance(colour: str) -> float:
    """As WCAG 2 has it."""
    parts = [part / 255 for part in rgb(colour)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def themes() -> list[dict[str, str]]:
    style = (ROOT / "hdet/cli/page.html").read_text()
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_contrast(theme: dict[str, str]) -> None:
    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(theme[one]), luminance(theme[other])))
        return (high + 0.05) / (low + 0.05)

    assert len(theme) == 13
    for paper in ("paper", "card"):
        assert all(contrast(text, paper) >= 4.5 for text in ("ink", "soft", "warn"))
    assert all(contrast(f"s{i}", "paper") >= 3 for i in range(7))


# -- in a browser ----------------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install -y chromium")

MEASURE = """<script>addEventListener("load", () => {
  const told = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, charts = [...page.querySelectorAll(".plot > svg")].map(svg => {
      const {x, y, width, height} = svg.getBoundingClientRect();
      const drawn = [...svg.querySelectorAll("path:not(.grid, .pale, .band, .span)")].filter(path => path.getAttribute("d"));
      return {box: [x, y, width, height], colours: drawn.map(path => path.classList[1])};
    });
    const height = page.documentElement.scrollHeight;
    page.querySelectorAll("details").forEach(one => one.open = true);
    const wide = [...page.querySelectorAll("body *:not(svg *)")].filter(one => {
      const box = one.getBoundingClientRect();
      return box.right > frame.clientWidth + 0.5 || box.left < -0.5;
    }).map(one => one.outerHTML.slice(0, 80));
    const tall = [...page.querySelectorAll("td")].filter(one => {
      const text = page.createRange();
      text.selectNodeContents(one);
      const {width, height} = text.getBoundingClientRect();
      return width < 60 && height > 70;
    }).map(one => one.outerHTML.slice(0, 80));
    return {tall, width: frame.contentWindow.innerWidth, scroll: page.documentElement.scrollWidth, height, wide, charts};
  });
  document.body.textContent = JSON.stringify(told);
})</script>"""


def browse(folder: Path, file: Path, *options: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'browser'}"]
    done = subprocess.run([*command, *options, file.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def measured(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A page of four runs, and how it is laid out on a phone and on a desktop (a window of Chromium's is never narrower than 500)."""
    folder = tmp_path_factory.mktemp("browser")
    text = page(find_runs([runs / name for name in ("fixed", "probe", "auto", "broken")]))
    (folder / "page.html").write_text(text, encoding="utf-8")
    frames = "".join(
        f'<iframe style="border: 0; width: {width}px; height: 800px" srcdoc="{escape(text)}"></iframe>' for width in (360, 1280)
    )
    (folder / "frames.html").write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{frames}{MEASURE}", encoding="utf-8")
    told = re.search(r"<body>(\[.*\])</body>", browse(folder, folder / "frames.html", "--dump-dom"), re.DOTALL)
    assert told
    return folder, json.loads(re.sub(r"&(lt|gt|amp);", "", told[1]))


@in_a_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(measured: tuple[Path, list[dict[str, Any]]], width: int) -> None:
    [told] = [one for one in measured[1] if one["width"] == width]
    assert told["scroll"] <= width and not told["wide"] and not told["tall"], "with all tables open"
    assert len(told["charts"]) >= 7 and all(chart["box"][2] > 0.7 * min(width, 900) for chart in told["charts"])


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, False), (1280, True)])
def test_every_series_is_seen(measured: tuple[Path, list[dict[str, Any]]], width: int, dark: bool) -> None:
    image = pytest.importorskip("matplotlib.image")
    folder, told = measured
    [layout] = [one for one in told if one["width"] == width]
    picture = folder / f"{width}-{dark}.png"
    mode = ["--blink-settings=preferredColorScheme=0"] * dark
    browse(folder, folder / "page.html", f"--screenshot={picture}", f"--window-size={width},{layout['height']}", *mode)
    pixels = (255 * image.imread(str(picture))[..., :3]).round().astype(int)
    light, night = themes()
    theme = night if dark else light
    assert pixels.shape[:2] == (layout["height"], width)
    assert list(pixels[2, 2]) == rgb(theme["paper"])
    for drawn in layout["charts"]:
        x, y, w, h = map(round, drawn["box"])
        region = pixels[y : y + h, x : x + w]
        for colour in drawn["colours"]:
            away = abs(region - rgb(theme[colour])).max(axis=-1)
            assert (away < 70).sum() >= 15, (colour, drawn)
