"""benchmarks.evidence.search and pbt: the rule of population-based training, what is counted, how searches are played through from
recorded trials, and that a benchmark goes on where it stopped. No figure is judged here."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.evidence import methods, pbt, problems, search, training
from benchmarks.evidence.report import search as played
from benchmarks.evidence.report.figures import search_figure

from .problem import tiny


class Scripted(random.Random):
    """Draws what it is told; `choice` takes the first or the last."""

    def __init__(self, *draws: float, last: bool = False) -> None:
        super().__init__()
        self.draws, self.last = list(draws), last

    def random(self) -> float:
        return self.draws.pop(0)

    def choice(self, values: Any) -> Any:
        return values[-1 if self.last else 0]


# -- population-based training -------------------------------------------------------------------------------------------------


def test_the_worst_quarter_copies_the_best_quarter() -> None:
    rates = [1.0, 2.0, 3.0, 4.0]
    # Member 3 is the worst of four, member 1 the best; 0.9 and 0.3: no resampling.
    assert pbt.perturb([3.0, 1.0, 2.0, 4.0], rates, Scripted(0.9), lambda: 7.0) == [(3, 1, 2.0 * 1.2)]
    assert pbt.perturb([3.0, 1.0, 2.0, 4.0], rates, Scripted(0.3, last=True), lambda: 7.0) == [(3, 1, 2.0 * 0.8)]
    assert pbt.perturb([3.0, 1.0, 2.0, 4.0], rates, Scripted(0.2), lambda: 7.0) == [(3, 1, 7.0)]
    # Of eight, two: worst 5 and 0; best 3 and 6, in that order from the second best.
    losses = [7.0, 3.0, 4.0, 1.5, 5.0, 8.0, 1.0, 6.0]
    moves = pbt.perturb(losses, [float(m) for m in range(8)], Scripted(0.9, 0.1), lambda: 70.0)
    assert moves == [(5, 3, 3.0 * 1.2), (0, 3, 70.0)]
    assert [m[:2] for m in pbt.perturb(losses, [1.0] * 8, Scripted(0.9, 0.9, last=True), lambda: 0.0)] == [(5, 6), (0, 6)]


def test_a_population_of_one_is_the_fixed_run() -> None:
    problem = tiny()
    rate, curve = pbt.train(problem, 1, 3, random.Random(0), lambda: 0.1, training.wsd_shape(problem.steps), 5)
    fixed = training.train(problem, methods.METHODS["wsd"], 0.1, 3)
    assert rate == 0.1
    assert curve[-1][1] == pytest.approx(fixed.validation, rel=1e-5)
    assert [samples for samples, _ in curve] == [0, 40, 80, 120, 160]  # 8 examples a step


def test_who_exploits_gets_weights_state_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pbt, "RESAMPLE", 0.0)
    monkeypatch.setattr(pbt, "FACTORS", (1.0,))
    plain, seen = tiny(), []

    def batch(seed: int, step: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[:4].repeat(2, 1) for tensor in plain.batch(seed, step))  # the same for both members

    def validate(model: nn.Module) -> float:
        seen.append(plain.validate(model))
        return seen[-1]

    rates = iter([0.0, 0.1])
    problem = replace(plain, batch=batch, validate=validate)
    rate, curve = pbt.train(problem, 2, 0, random.Random(0), lambda: next(rates), training.wsd_shape(20), 5)
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert pairs[0][0] == pairs[0][1] == pairs[1][0] > pairs[1][1]  # until then the first one has not learned
    assert all(first == second for first, second in pairs[2:])  # then it is a copy, and goes on like one
    assert rate == 0.1 and [loss for _, loss in curve] == [min(pair) for pair in pairs]


# -- what is counted -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["wsd", "hdet-probe"])
def test_watching_counts_every_pass_and_changes_nothing(method: str) -> None:
    problem = replace(problems.PROBLEMS["digits"], steps=12)
    watch = search.Watch(problem)
    watched = training.train(watch.problem, methods.METHODS[method], 0.01, 0)
    assert watched.validation == training.train(problem, methods.METHODS[method], 0.01, 0).validation
    assert watch.samples == pytest.approx(12 * 32 * (1 + watched.probe_percent / 100))
    assert (watched.probe_percent > 0) is (method != "wsd")
    assert len(watch.curve) == 12 and watch.curve[0] == (0, problem.validate(problem.build(0)))
    seen = [samples for samples, _ in watch.curve]
    if method == "wsd":
        assert seen == [32 * i for i in range(12)]
    else:  # in the first cycle the batch is scored at several points of the line, forward alone
        scored = 3 * (seen[1] - 32) / 32
        assert seen[0] == 0 and scored >= 2 and scored == pytest.approx(round(scored)) and sorted(seen) == seen


# -- searches, from recorded trials ------------------------------------------------------------------------------------------------


def test_expected_minimum_is_the_mean_over_all_subsets() -> None:
    losses = [random.Random(0).random() for _ in range(7)]
    for k in range(1, 8):
        assert played.expected_minimum(losses, k) == pytest.approx(statistics.mean(map(min, itertools.combinations(losses, k))))
    assert played.expected_minimum([3.0, 1.0, 2.0], 2) == pytest.approx(4 / 3)  # 1, 1, 2
    with pytest.raises(ValueError, match=r"k=4 is not one of 1 \.\. 3"):
        played.expected_minimum([3.0, 1.0, 2.0], 4)
    assert [played.trials_needed([[3.0, 1.0, 2.0]], target) for target in (2.5, 1.9, 1.0, 0.9)] == [1, 2, 3, None]


def line(*losses: float | None, method: str = "trial", problem: str = "digits", seed: int = 0, draw: int = 0) -> dict[str, Any]:
    """A run of 160 examples a step that was validated at each step; None at its end: it crashed there."""
    curve = [[160 * i, loss] for i, loss in enumerate(losses)]
    return {
        "problem": problem, "method": method, "seed": seed, "draw": draw, "best": 0.01, "steps": 16, "batch": 160,
        "validation": losses[-1], "samples": curve[-1][0], "curve": curve,
    }  # fmt: skip


def falling(end: float) -> list[float]:
    """Seventeen losses from 3 to ``end``."""
    return [3 + (end - 3) * i / 16 for i in range(17)]


def test_random_search_adds_samples_up_and_keeps_the_best() -> None:
    trials = [line(3, 2, 1.5), line(3, None), line(3, 1, 1.2)]
    curve, final = played.played(trials, [3, 2, 3])
    assert curve == [(0, 3), (160, 2), (320, 1.5), (320, 3), (480, math.inf), (480, 3), (640, 1), (800, 1.2)]
    assert final == 1.2  # the best end, not the best on the way
    assert played.best_so_far(curve, [0, 159, 160, 320, 640, 5000]) == [3, 3, 2, 1.5, 1, 1]


def test_successive_halving_prunes_at_its_rungs() -> None:
    early = falling(2.0)
    crashing = [*early[:8], None]
    trials = [line(*early), line(*falling(2.5)), line(*falling(1.0)), line(3, 1, 1, 1, *[2.9] * 13), line(*crashing)]
    # 1: the first of its rungs; 2: worse at the first; 3: better at each; 4: better at the first alone; 5: worse at the first
    assert played.halved(trials) == [17, 2, 17, 5, 2]
    assert played.halved([line(*early), line(3, 0.9, 2.9, 2.9, *[0.9] * 13)], first=2) == [17, 3]  # a rung at 2
    assert played.halved([trials[-1], trials[0]])[0] == 9  # a crash ends it where it happened
    curve, final = played.played(trials, played.halved(trials))
    assert (curve[-1][0], final) == (160 * (16 + 1 + 16 + 4 + 1), 1.0)
    assert played.halved([line(*early[:4], None), line(*early)]) == [5, 17]  # nobody is measured against a crash
    assert played.halved([line(*early), line(3, 0.9, 2.9, 2.9, *[0.9] * 13)]) == [17, 17]  # no rungs at 2 and 3
    late = [line(*early), line(*[3.0] * 16, 0.5)]
    assert played.played(late, played.halved(late))[1] == 2.0  # nobody knows how well the second one would have ended


def test_the_figure_has_every_way_of_searching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "ORDERS", 3)
    lines = [line(*falling(end), draw=i, seed=seed) for seed in (0, 1) for i, end in enumerate((2.9, 2.5, 2.0, 1.5))]
    lines += [line(*falling(1.9), method="hdet-probe"), line(*falling(2.1), method="hdet-probe", seed=1)]
    (axes,) = search_figure(lines).axes
    drawn = {drawn.get_label(): drawn for drawn in axes.get_lines()}
    halvings = {f"successive halving from {part} % on, 4 trials" for part in (5, 20)}
    assert set(drawn) == {"random search, 4 trials", "hdet-probe"} | halvings
    x, y = drawn["random search, 4 trials"].get_data()
    assert x[-1] == 4 and y[-1] == 1.5 and all(a >= b for a, b in itertools.pairwise(y))
    assert drawn["hdet-probe"].get_data()[1][-1] == pytest.approx(2.0)


# -- the command ---------------------------------------------------------------------------------------------------------------


def test_quick_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    monkeypatch.setattr(played, "ORDERS", 2)
    path = tmp_path / "search.jsonl"
    search.main(["--quick", "--methods", "hdet-probe", "--json", str(path)])
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert sorted(line["method"] for line in found) == ["hdet-probe", "pbt-4"] + ["trial"] * 4
    assert "| digits | successive halving from 5 % on, 4 trials |" in capsys.readouterr().out
    assert search.key({**found[0], "best": 0.02}) != search.key(found[0])
