"""benchmarks.evidence.hero: every method trains on the same examples, what is counted, how the
best rate is looked for, and that a benchmark goes on where it stopped. No figure is judged here."""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.evidence import hero, methods, problems, runs, training
from benchmarks.evidence.problems import recsys
from benchmarks.evidence.report.page import page, read

STEPS = 6
DIGITS = replace(problems.PROBLEMS["cnn-digits"], steps=STEPS)


class Counted:
    """``problem`` is the one it was given, with examples counted and one small validation."""

    def __init__(self, inner: Any = DIGITS) -> None:
        self.inner, self.trained, self.scored, self.batches = inner, 0, 0, []
        self.problem = replace(inner, losses=self.losses, batch=self.batch, validate=self.validate)

    def losses(self, model: Any, batch: Any) -> torch.Tensor:
        losses = self.inner.losses(model, batch)
        if losses.requires_grad:
            self.trained += len(losses)
        else:
            self.scored += len(losses)
        return losses

    def batch(self, seed: int, step: int) -> Any:
        self.batches.append(step)
        return self.inner.batch(seed, step)

    @torch.no_grad()
    def validate(self, model: Any) -> float:
        self.final = model
        return float(self.inner.losses(model, self.inner.batch(99, 0)).mean())


# -- the runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_trains_on_the_same_examples(name: str) -> None:
    method, counted = methods.METHODS[name], Counted()
    rate = method.start / 2 if name != "dog-movement" else method.start
    outcome = training.train(counted.problem, method, rate, 0)
    assert counted.trained == STEPS * DIGITS.batch_size
    assert [step for step in counted.batches if step < STEPS] == list(
        range(STEPS)
    )  # the probe's are others
    assert outcome.probe_percent == pytest.approx(
        100 * counted.scored / (3 * STEPS * DIGITS.batch_size)
    )
    assert outcome.probe_percent == 0  # no method of the figure probes
    moved = [
        not torch.equal(p, q)
        for p, q in zip(counted.final.parameters(), DIGITS.build(0).parameters(), strict=True)
    ]
    assert all(moved) and math.isfinite(outcome.validation) and not outcome.crashed
    assert len(outcome.rates) == STEPS and all(map(math.isfinite, outcome.rates))
    assert outcome.to_dict() == {**outcome.to_dict(), "copies": method.copies, "crashed": False}
    assert (method.package is None) is (method.version() is None)


@pytest.mark.parametrize("problem", problems.PROBLEMS.values(), ids=problems.PROBLEMS)
def test_every_problem_is_a_function_of_seed_and_step(problem: Any) -> None:
    batch, again, other = problem.batch(3, 5), problem.batch(3, 5), problem.batch(3, 6)
    assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True)) and not all(
        map(torch.equal, batch, other)
    )
    assert {len(tensor) for tensor in batch} == {problem.batch_size} and problem.batch_size % 8 == 0
    spare = problem.spare(3, 5, 0)
    assert (
        all(torch.equal(a, b) for a, b in zip(spare, problem.spare(3, 5, 0), strict=True))
        and len(spare[0]) == problem.batch_size
    )
    assert not all(map(torch.equal, spare, problem.spare(3, 5, 1)))
    trained = {problem.batch(3, step)[0].numpy().tobytes() for step in range(problem.steps)}
    assert not trained & {problem.spare(3, 5, number)[0].numpy().tobytes() for number in range(20)}
    model = problem.build(0)
    losses = problem.losses(model, batch)
    assert (
        losses.shape == (problem.batch_size,) and losses.requires_grad and losses.isfinite().all()
    )
    grouped = [p for group in problem.groups(model) for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == len(
        set(grouped)
    )
    assert all({"name", "weight_decay"} <= set(group) for group in problem.groups(model))


def test_the_recommenders_probe_sees_the_day_and_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Users and items drift over the year: a probe of its last day, on which runs are judged, would
    know what training cannot."""
    asked: list[tuple[float, str]] = []
    log = SimpleNamespace(
        sample=lambda size, at, *, seed, stream, index: asked.append((at, stream))
    )
    monkeypatch.setattr(recsys, "LOG", log)
    for step in (0, 400, 800):
        problems.PROBLEMS["recommender-clicks"].spare(0, step, 7)
    assert asked == [(0.0, "probe"), (0.5, "probe"), (1.0, "probe")]


# -- the best rate ---------------------------------------------------------------------------------


def found(name: str, best: int, untrained: float = 2.0) -> list[dict[str, Any]]:
    """The lines that the search asks for, one call of `next_exponents` after the other, where the
    loss is lowest at 2^best."""
    records: list[dict[str, Any]] = []
    for _ in range(20):  # it ends earlier
        for exponent in hero.next_exponents(
            methods.METHODS[name], hero.means(records, "cnn-digits", name, 600)
        ):
            loss = None if exponent > best + 2 else 0.1 * abs(exponent - best)
            line = {
                "benchmark": "hero-find",
                "problem": "cnn-digits",
                "method": name,
                "exponent": exponent,
                "steps": 600,
            }
            records += [
                {**line, "seed": seed, "validation": loss, "untrained": untrained}
                for seed in hero.find_seeds("cnn-digits")
            ]
    return records


@pytest.mark.parametrize("best", [-11, -4, -1, 0, 3, 6])
def test_the_best_rate_is_found_wherever_it_is(best: int) -> None:
    records = found("onecycle", best)
    assert hero.best_rate(records, "cnn-digits", "onecycle", 600) == 1e-2 * 2.0**best
    assert (
        hero.best_rate(records, "cnn-digits", "hdet-softmax", 600) == 1e-2 * 2.0**best
    )  # borrowed
    exponents = {record["exponent"] for record in records}
    assert {best - 1, best, best + 1} <= exponents and len(exponents) <= 14


# -- the command -----------------------------------------------------------------------------------


def test_quick_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    monkeypatch.setattr(hero, "steps_of", lambda problem, options: STEPS)
    path = tmp_path / "hero.jsonl"
    command = [
        "--quick",
        "--methods",
        "onecycle",
        "hdet-softmax",
        "--jobs",
        "1",
        "--json",
        str(path),
    ]
    hero.main(command)
    whole = path.read_text().splitlines()
    lines = [json.loads(text, parse_constant=pytest.fail) for text in whole]  # no NaN
    runs_made = sorted((line["method"], line["exponent"]) for line in lines)
    assert runs_made == [
        (method, exponent) for method in ("hdet-softmax", "onecycle") for exponent in (-4, 0, 4)
    ]
    for line in lines:
        assert line["rate"] == 1e-2 * 2.0 ** line["exponent"] and (line["steps"], line["seed"]) == (
            STEPS,
            0,
        )
        assert (
            line["untrained"] == pytest.approx(math.log(10), abs=0.05)
            and line["seconds"] > 0
            and line["on"]["torch"]
        )
    text = page(read([path]))
    assert "| onecycle | 0.01 |" in text and "| hdet-softmax | 0.01 |" in text

    with monkeypatch.context() as here:
        here.setattr(
            runs, "ProcessPoolExecutor", lambda *given, **named: pytest.fail("something runs again")
        )
        hero.main(command)
    assert path.read_text().splitlines() == whole

    path.write_text("\n".join(whole[:2] + whole[3:]) + "\n")
    monkeypatch.setattr(runs, "ProcessPoolExecutor", ProcessPoolExecutor)
    hero.main(command)  # in a process of its own, to the same numbers
    again = path.read_text().splitlines()
    assert again[:5] == whole[:2] + whole[3:] and len(again) == 6
    first, repeated = json.loads(whole[2]), json.loads(again[5])
    assert {**repeated, "seconds": 0} == {**first, "seconds": 0}
