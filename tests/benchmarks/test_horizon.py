"""benchmarks.evidence.horizon: whatever a table reads is in its lines. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.evidence import hero, horizon
from benchmarks.evidence.problems import Problem
from benchmarks.evidence.report import page as report


def tiny(steps: int) -> Problem:
    """Linear regression on four inputs, with noise: of a fifth, which the model does not see.

    It trains in milliseconds.
    """

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
        name="tiny",
        steps=steps,
        batch_size=8,
        build=build,
        batch=batch,
        spare=lambda seed, step, number: batch(seed, steps + number),
        losses=losses,
        validate=validate,
        groups=lambda model: [
            {"name": "all", "params": list(model.parameters()), "weight_decay": 0.0}
        ],
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny problem in the place of digits."""
    problem = tiny(80)
    for module in (horizon, hero):
        monkeypatch.setitem(module.PROBLEMS, "cnn-digits", problem)
    hero.untrained.cache_clear()
    yield problem
    hero.untrained.cache_clear()


# -- pages and commands ----------------------------------------------------------------------------


def test_pages_and_figures_are_made_of_lines(
    tmp_path: Path, small: Any, in_this_process: None
) -> None:
    """Of lines that the benchmarks wrote: whatever a table reads is in them."""
    file = tmp_path / "horizon.jsonl"
    horizon.main(["--quick", "--json", str(file)])
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert {line["benchmark"] for line in lines} == {"horizon"} and len(
        {horizon.key(line) for line in lines}
    ) == len(lines)
    assert "# The horizon" in report.page(lines)
    written = report.write(lines, tmp_path / "page")
    assert {path.name for path in written} == {"evidence.md", "horizon.png"}
    assert all(path.stat().st_size > 1000 for path in written)
