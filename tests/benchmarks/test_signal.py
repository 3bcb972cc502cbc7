"""benchmarks.evidence.signals, horizon and scalars: that listening changes nothing, forks part where they should, how tuning goes on, and what
the tables say of lines with known answers. No figure is judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence import hero, horizon, runs, scalars, signals
from benchmarks.evidence.report import horizon as horizons
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


def line(method: str, moment: float, exponent: int, seed: int, validation: float | None, said: Any = ()) -> dict[str, Any]:
    return {
        "benchmark": "signal", "problem": "digits", "method": method, "moment": moment, "exponent": exponent, "rate": 0.01 * 2.0**exponent,
        "seed": seed, "steps": 600, "validation": validation, "untrained": 2.0, "said": list(said), "seconds": 1.0,
    }  # fmt: skip


def says(signal: str, slope: float | None, error: float | None, moment: float = 0.1) -> dict[str, Any]:
    return {
        "signal": signal,
        "moment": moment,
        "slope": slope,
        "error": error,
        "t": None if error is None or slope is None else slope / error,
    }


def answered() -> list[dict[str, Any]]:
    """From 2^-2 higher is better, by 1 nat per ln 2 in the mean; from 2^4 forks differ by chance; there is one crash."""
    lines = []
    for seed, (low, high) in enumerate([(1.6, 0.7), (1.7, 0.6), (None, 1.0)]):
        lines += [line("fork-0.7", 0.1, -2, seed, low), line("fork-1.4", 0.1, -2, seed, high)]
    for seed, (low, high) in enumerate([(1.0, 1.1), (1.1, 1.0)]):
        lines += [line("fork-0.7", 0.1, 4, seed, low), line("fork-1.4", 0.1, 4, seed, high)]
    for seed, slope in enumerate((-0.4, -0.6, 0.1)):
        said = [says("probe", slope, 0.1), says("softmax", -slope, None), says("slope", None, None)]
        lines += [line("hear-replicas", 0.4, -2, seed, 1.0, said), line("hear-replicas", 0.4, 4, seed, 1.0, [says("probe", 5.0, 0.1)])]
    return lines


def test_signs_are_compared_with_what_forks_say() -> None:
    truth = heard.truths(answered())
    slope, error = truth[-2, 0.1]
    assert slope == pytest.approx(-1 / math.log(2))  # 0.9, 1.1, 1.0
    assert error == pytest.approx(0.1 / math.log(2) / math.sqrt(3))
    assert truth[4, 0.1][0] == pytest.approx(0)
    found = heard.heard(answered())
    assert list(found) == ["probe", "softmax"]  # a controller that says nothing is not counted
    counted = [one for one in found["probe"] if one.counts]
    assert [one.right for one in counted] == [True, True, False] and [one.sure for one in counted] == [True, True, False]
    text = heard.signal_tables(answered())
    assert "| probe | 67 % of 3 | 100 % of 2 | 67 % of 3 | 67 % of 3 | - | " in text
    assert "| softmax | 33 % of 3 | - | 33 % of 3 | 33 % of 3 | - | - |" in text
    assert "| 2^4 | +0.000 ± 0.144 ? |" in text


# -- horizon -----------------------------------------------------------------------------------------------------------------


def test_where_the_rate_went() -> None:
    lines = [
        {
            "benchmark": "horizon", "problem": "digits", "method": "averaged", "interval": 0.05, "exponent": -4, "rate": 0.01 / 16, "seed": seed,
            "steps": 600, "validation": loss, "untrained": 2.0, "correction": correction, "votes": [-5.0, 1.0, 3.0],
        }
        for seed, (loss, correction) in enumerate([(0.5, 8.0), (None, 2.0)])
    ]  # fmt: skip
    assert "| cycle-averaged weights | 5 % | 1.250 ± 0.750 | 2^-2.0 | 2 : 2 of 6 |" in horizons.horizon_tables(lines)


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


def scalar_line(method: str, corner: str, seed: int, loss: float | None, **more: Any) -> dict[str, Any]:
    values = {"lr/conv": 1e-3, "dropout": 0.1 * 4**seed}
    return {
        "benchmark": "scalars", "problem": "digits", "method": method, "corner": corner, "seed": seed, "steps": 400, "validation": loss,
        "start": {"lr/conv": 1e-4, "dropout": 0.6}, "values": values, "samples": 56_320.0, "curve": None, **more,
    }  # fmt: skip


def test_scalars_beside_tuning_one_at_a_time() -> None:
    lines = [scalar_line("hdet-probe", "careful", seed, loss) for seed, loss in enumerate((0.5, 0.7))]
    lines += [scalar_line("one-at-a-time", "careful", seed, 0.8, samples=18_000.0, curve=[2.0, None, 0.6 - seed / 10]) for seed in range(2)]
    lines += [
        scalar_line("good", "", 0, 0.4, samples=51_200.0),
        scalar_line("good", "", 0, 0.1, steps=20),
        scalar_line("tuned", "careful", 0, 0.3),
    ]
    text = scalar_tables.scalars_tables(lines)
    assert "| the corner |  |  | 0.0001 | 0.6 |" in text
    assert "| HDET, 8 replicas | 0.600 ± 0.100 | 56,320 | 0.001 | 0.2 |" in text
    assert "| usual values, 8 replicas | 0.400 ± 0.000 | 51,200 |" in text and "| its values, 8 replicas | 0.300 ± 0.000 | 74,320 |" in text
    assert "To be as good as HDET, one at a time needs 3 trials, 18,000 examples." in text
    assert scalar_tables.tuned_curve(lines[2:4])[1] == pytest.approx(math.log(10))  # a crash


# -- pages and commands ----------------------------------------------------------------------------------------------------------


def test_pages_and_figures_are_made_of_lines(tmp_path: Path, small: Any, monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> None:
    """Of lines that the benchmarks wrote: whatever a table reads is in them."""
    monkeypatch.setattr(scalars, "replica", lambda rank, count, values, *more: {"validation": 0.5, "values": values, "samples": 8800.0})
    monkeypatch.setattr(scalars, "trial", lambda values, seed, steps: (values["dropout"], values["dropout"]))
    monkeypatch.setattr(scalars, "started", lambda function, count, *arguments: function(0, count, *arguments))

    monkeypatch.setattr(runs, "ThreadPoolExecutor", lambda jobs: runs.ProcessPoolExecutor(jobs, None, None))
    files = []
    for module, benchmark in ((signals, "signal"), (horizon, "horizon"), (scalars, "scalars")):
        files.append(tmp_path / f"{benchmark}.jsonl")
        module.main(["--quick", "--json", str(files[-1])])
        lines = [json.loads(text) for text in files[-1].read_text().splitlines()]
        assert {line["benchmark"] for line in lines} == {benchmark} and len({module.key(line) for line in lines}) == len(lines)
    page = report.page(report.read(files))
    for heading in ("# Signal quality", "# The horizon", "# Several scalars at once"):
        assert heading in page
    written = report.write(report.read(files), tmp_path / "page")
    assert {path.name for path in written} == {"evidence.md", "signal.png", "horizon.png", "scalars.png"}
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
