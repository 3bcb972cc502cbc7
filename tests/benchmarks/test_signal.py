"""benchmarks.evidence.signals and horizon: that listening changes nothing, and forks part where they should. No
figure is judged here; what the tables say is in docs/evidence, which has a test of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.evidence import hero, horizon, signals
from benchmarks.evidence.problems import Problem
from benchmarks.evidence.report import page as report
from benchmarks.evidence.report import signal as heard


def tiny(steps: int) -> Problem:
    """Linear regression on four inputs, with noise: of a fifth, which the model does not see. It trains in milliseconds."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(4, 1)

    def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1000 * seed + step))
        return x[:, :4], x.sum(1, keepdim=True)

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean(1)

    @torch.no_grad()
    def validate(model: nn.Module) -> float:
        return float(losses(model, batch(99, 0)).mean())

    return Problem(
        name="tiny", steps=steps, batch_size=8, build=build, batch=batch, spare=lambda seed, step, number: batch(seed, steps + number), losses=losses, validate=validate,
        groups=lambda model: [{"name": "all", "params": list(model.parameters()), "weight_decay": 0.0}],
    )  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny problem in the place of digits."""
    problem = tiny(80)
    for module in (signals, horizon, hero):
        monkeypatch.setitem(module.PROBLEMS, "cnn-digits", problem)
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
    problem = tiny(20)
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
        ("hear-hypergradient", {"hypergradient"}),
        ("hear-replicas", {"probe", "slope", "rank", "softmax"}),
        ("hear-last", {"probe (last weights)"}),
    ],
)
def test_what_is_heard_far_below_the_best_rate(name: str, expected: set[str]) -> None:
    """A rate that is a hundred times too low: everything says "higher", each at every moment at which it says anything."""
    said: list[dict[str, Any]] = []
    assert signals.listen(tiny(80), name, 1e-3, 0, said) is not None
    assert {one["signal"] for one in said} == expected
    for signal in expected:
        own = [one for one in said if one["signal"] == signal]
        assert [one["moment"] for one in own] == list(heard.MOMENTS)
        if signal in ("probe", "probe (last weights)", "hypergradient"):
            assert all(one["slope"] < 0 and one["error"] > 0 and one["t"] == pytest.approx(one["slope"] / one["error"]) for one in own)
        if signal == "softmax":
            assert all(one["error"] is None for one in own)
    assert [one["slope"] is None for one in said if one["signal"] == "slope"] in ([], [True, True, True, False], [True, True, False, False])


def test_listening_corrects_nothing() -> None:
    """The hypergradient hears the run of the fixed schedule itself."""
    problem = tiny(80)
    end = signals.listen(problem, "hear-hypergradient", 1e-3, 0, [])
    model = problem.build(0)
    trained(problem, signals.fork(problem, model, 1e-3, 0, factor=1.0, start=0), 32)
    assert end == pytest.approx(problem.validate(model), rel=1e-5)


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
