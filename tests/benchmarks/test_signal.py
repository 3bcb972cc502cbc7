"""benchmarks.evidence.signals, horizon and scalars: that listening changes nothing, forks part where they should, and how tuning goes on. No
figure is judged here; what the tables say is on docs/evidence.md, which has a test of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence import hero, horizon, scalars, signals
from benchmarks.evidence.report import page as report
from benchmarks.evidence.report import scalars as scalar_tables
from benchmarks.evidence.report import signal as heard

from .problem import tiny


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny problem in the place of digits."""
    problem = tiny(80, noise=True)
    for module in (signals, horizon, hero):
        monkeypatch.setitem(module.PROBLEMS, "digits", problem)
    signals.untrained.cache_clear()
    yield problem
    signals.untrained.cache_clear()


# -- signals -----------------------------------------------------------------------------------------------------------------


def trained(problem: Any, parts: Any, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        batch = problem.batch(0, step)
        parts.backward(batch)
        parts.optimizer.step()
        rates.append(parts.rate())
        parts.optimizer.zero_grad()
        parts.after(batch)
    return rates


def test_a_fork_is_the_run_until_the_moment_and_another_rate_after() -> None:
    problem = tiny(20, noise=True)
    models = [problem.build(0) for _ in range(2)]
    below, above = (signals.fork(problem, model, 0.01, 0, factor=f, start=8) for model, f in zip(models, (0.7, 1.4), strict=True))
    assert trained(problem, below, 8) == trained(problem, above, 8)
    assert torch.equal(models[0].weight, models[1].weight)
    shape = signals.wsd_shape(20)
    again = [signals.fork(problem, problem.build(0), 0.01, 0, factor=f, start=8) for f in (0.7, 1.4)]
    for parts, factor in zip(again, (0.7, 1.4), strict=True):
        expected = [0.01 * value * (factor if step >= 8 else 1) for step, value in enumerate(shape)]
        assert trained(problem, parts, 20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hear-line", {"line"}),
        ("hear-hypergradient", {"hypergradient"}),
        ("hear-replicas", {"probe", "slope", "rank", "softmax"}),
        ("hear-last", {"probe (last weights)"}),
    ],
)
def test_what_is_heard_far_below_the_best_rate(name: str, expected: set[str]) -> None:
    """A rate that is a hundred times too low: everything says "higher", each at every moment at which it says anything."""
    said: list[dict[str, Any]] = []
    assert signals.listen(tiny(80, noise=True), name, 1e-3, 0, said) is not None
    assert {one["signal"] for one in said} == expected
    for signal in expected:
        own = [one for one in said if one["signal"] == signal]
        assert [one["moment"] for one in own] == list(heard.MOMENTS)
        if signal in ("line", "probe", "probe (last weights)", "hypergradient"):
            assert all(one["slope"] < 0 and one["error"] > 0 and one["t"] == pytest.approx(one["slope"] / one["error"]) for one in own)
        if signal == "softmax":
            assert all(one["error"] is None for one in own)
    assert [one["slope"] is None for one in said if one["signal"] == "slope"] in ([], [True, True, True, False], [True, True, False, False])


def test_listening_corrects_nothing() -> None:
    """The line and the hypergradient hear the run of the fixed schedule itself."""
    problem, ends = tiny(80, noise=True), []
    for name in ("hear-line", "hear-hypergradient"):
        ends.append(signals.listen(problem, name, 1e-3, 0, []))
    model = problem.build(0)
    trained(problem, signals.fork(problem, model, 1e-3, 0, factor=1.0, start=0), 32)
    assert ends == [pytest.approx(problem.validate(model), rel=1e-5)] * 2


# -- scalars -----------------------------------------------------------------------------------------------------------------


def test_tuning_turns_round_and_keeps_what_is_better() -> None:
    """Best at a = 4, b = 1/4, from a = b = 1."""

    def score(values: dict[str, float]) -> tuple[float, float]:
        loss = abs(math.log(values["a"] / 4)) + abs(math.log(values["b"] * 4))
        return loss, loss + 10

    history = scalars.tune({"a": 1.0, "b": 1.0}, 8, score)
    assert [values for _, values in history] == [
        {"a": 1.0, "b": 1.0}, {"a": 4.0, "b": 1.0}, {"a": 4.0, "b": 1.0}, {"a": 4.0, "b": 0.25}, *[{"a": 4.0, "b": 0.25}] * 4,
    ]  # fmt: skip
    assert history[-1][0] == pytest.approx(10.0)
    assert scalars.tune({"dropout": 0.6}, 2, lambda values: (1 - values["dropout"], 0.0))[1][1] == {"dropout": 0.9}  # not 2.4
    # From a corner that crashes everything else is better.
    crashed = scalars.tune({"a": 1.0}, 2, lambda values: (math.inf, math.inf) if values["a"] == 1 else (2.0, 2.0))
    assert crashed[1] == (2.0, {"a": 4.0})


def test_images_of_the_probe_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without disturbance every image can be told: its place stands in it."""
    count = len(scalars.data()[0])
    numbered = torch.arange(count, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    monkeypatch.setattr(scalars, "data", lambda: (numbered, torch.arange(count)))
    monkeypatch.setattr(scalars, "disturbed", lambda images, generator: images)
    trained_on = {int(label) for number in range(300) for label in scalars.batch(0, number)[1]}
    probed = {int(label) for cycle in range(20) for _, labels in scalars.probe_batches(cycle) for label in labels}
    assert max(trained_on) < scalars.TRAINED <= min(probed)
    assert len(scalars.batch(0, 0)[1]) == scalars.IMAGES and not torch.equal(scalars.batch(0, 0)[1], scalars.batch(1, 0)[1])


# -- pages and commands ----------------------------------------------------------------------------------------------------------


def test_pages_and_figures_are_made_of_lines(tmp_path: Path, small: Any, in_this_process: None) -> None:
    """Of lines that the benchmarks wrote: whatever a table reads is in them."""
    files = []
    for module, benchmark in ((signals, "signal"), (horizon, "horizon")):
        files.append(tmp_path / f"{benchmark}.jsonl")
        module.main(["--quick", "--json", str(files[-1])])
        lines = [json.loads(text) for text in files[-1].read_text().splitlines()]
        assert {line["benchmark"] for line in lines} == {benchmark} and len({module.key(line) for line in lines}) == len(lines)
    page = report.page(report.read(files))
    assert "# Signal quality" in page and "# The horizon" in page
    written = report.write(report.read(files), tmp_path / "page")
    assert {path.name for path in written} == {"evidence.md", "signal.png", "horizon.png"}
    assert all(path.stat().st_size > 1000 for path in written)


def test_scalars_in_processes_and_what_is_done_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--quick`` as it is, eight processes for HDET; two stand for eight where replicas are alike."""
    start = scalars.started
    monkeypatch.setattr(scalars, "started", lambda f, count, *given: start(f, count if given[-1] else 2, *given))
    command = ["--quick", "--jobs", "1", "--json", str(tmp_path / "scalars.jsonl")]
    scalars.main(command)
    lines = {line["method"]: line for line in map(json.loads, (tmp_path / "scalars.jsonl").read_text().splitlines())}
    assert lines.keys() == scalar_tables.METHODS.keys()
    trained = scalars.QUICK * scalars.IMAGES
    for method, line in lines.items():
        assert line["validation"] > 0 and line["values"].keys() == scalar_tables.GOOD.keys()
        if method != "one-at-a-time":
            assert (line["samples"] > scalar_tables.REPLICAS * trained) if method == "hdet-probe" else (line["samples"] == 2 * trained)
    assert lines["tuned"]["start"] == lines["one-at-a-time"]["values"]
    printed = capsys.readouterr().out
    monkeypatch.setattr(scalars, "started", lambda *_: pytest.fail("it is done already"))
    scalars.main(command)
    again = capsys.readouterr().out
    assert again.startswith("# Several scalars at once") and printed.endswith(again)
    assert report.page(report.read([tmp_path / "scalars.jsonl"])) == again
