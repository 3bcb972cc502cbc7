"""benchmarks.evidence: each command runs and prints the table that the documents show; lines with
known answers give known cells. No figure is judged here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence import (
    auto,
    auto_report,
    averages,
    first_tries,
    fixed_rates,
    hero,
    horizon,
    paper,
    ranks,
    rules,
    scoreboard,
    seconds,
    training,
    votes,
)
from benchmarks.evidence import small as small_workloads
from benchmarks.evidence.problems import PROBLEMS, recsys
from benchmarks.tables import grouped, standard_error

from ..distributed import run_ranks

DIGITS, SMALL = PROBLEMS["cnn-digits"], "mlp-breast-cancer"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps and examples; and the suite's processes, for others take seconds to start."""
    held_out = recsys.LOG.sample(256, 1.0, seed=0, stream="validation", index=0)
    monkeypatch.setattr(recsys, "held_out", lambda: [held_out])
    first = lambda function, count, *more: run_ranks(function, count, *more)[0]
    monkeypatch.setattr(ranks, "spawn", first)
    monkeypatch.setattr(ranks, "STARTS", (-4,))
    monkeypatch.setattr(hero, "QUICK", 6)
    short = replace(small_workloads.WORKLOADS["cancer"], steps=8)
    monkeypatch.setitem(small_workloads.WORKLOADS, "cancer", short)
    monkeypatch.setattr(votes, "STEPS", 32)


Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """What a main function prints of --quick, in this process."""

    def call(main: Callable[[list[str]], None], *arguments: str) -> str:
        main(["--quick", "--jobs", "0", *arguments])
        return capsys.readouterr().out

    return call


# -- commands --------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[Any, list[str], list[str]]] = {
    "fixed_rates": (fixed_rates.EXPERIMENT.main, [], [SMALL]),
    "auto": (auto.EXPERIMENT.main, ["--workloads", SMALL, "--starts", "-4"],
        ["| workload | steps | start |", '"factor"']),
    "first_tries": (first_tries.EXPERIMENT.main, ["--workloads", "table-mlp"], ["| table-mlp | ",
        "of 1 starts that end more than 20 % from the best, 1 end within 10 %"]),
    "seconds": (seconds.EXPERIMENT.main, [], [f"| {SMALL} | 200 |"]),
    "averages": (averages.EXPERIMENT.main, [], ["| local 16 | ", "| cancer (2) | "]),
    "votes": (votes.EXPERIMENT.main, [], ["| lr+weight_decay+dropout | 16 | "]),
    "rules": (rules.EXPERIMENT.main, [], ["| 100 steps | best rates: mean |", "| mars | "]),
    "scoreboard": (scoreboard.EXPERIMENT.main, [],
        ["| workload | adamw | autolr |", "| mlp-clusters | "]),
    "horizon": (horizon.EXPERIMENT.main, ["--exponents", "0", "--intervals", "0.2", "0.5"],
        ["| cycle | cnn-digits: averaged | cnn-digits: last |", "| 50 % of the run |"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_table(printed: Printed, name: str) -> None:
    main, arguments, parts = COMMANDS[name]
    out = printed(main, *arguments)
    assert all(part in out for part in parts), out


def test_ranks(printed: Printed) -> None:
    row = printed(ranks.EXPERIMENT.main).splitlines()[-1].split(" | ")
    assert row[:3] == ["| 2", "spread", "1"]
    fixed, reached = (float(cell.removesuffix(" %")) for cell in row[3:5])
    assert reached < fixed  # a trial has raised the rate that is 16 times too low


def test_paper_looks_for_the_best_rate_first(printed: Printed, tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    assert "| baseline |" in printed(paper.EXPERIMENT.main, "--json", str(path))
    kinds = [json.loads(line)["benchmark"] for line in path.read_text().splitlines()]
    assert kinds == ["paper-find"] * 2 + ["paper"] * 2


def test_hero_goes_on_where_it_stopped(printed: Printed, tmp_path: Path) -> None:
    path = tmp_path / "hero.jsonl"
    out = printed(hero.EXPERIMENT.main, "--json", str(path))
    assert "| onecycle | 0.01 |" in out and "| hdet-softmax | 0.01 |" in out
    whole = path.read_text().splitlines()
    lines = [json.loads(text, parse_constant=pytest.fail) for text in whole]  # no NaN
    of = [(method, e) for method in ("hdet-softmax", "onecycle") for e in (-4, 0, 4)]
    assert sorted((line["method"], line["exponent"]) for line in lines) == of
    path.write_text("\n".join(whole[:2] + whole[3:]) + "\n")
    printed(hero.EXPERIMENT.main, "--json", str(path))
    again = path.read_text().splitlines()
    assert again[:5] == whole[:2] + whole[3:] and len(again) == 6
    assert {**json.loads(again[5]), "seconds": 0} == {**lines[2], "seconds": 0}


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hero.METHODS)
def test_every_method_trains_on_the_same_examples(name: str) -> None:
    seen: list[int] = []
    models: list[torch.nn.Module] = []

    def batch(seed: int, step: int) -> Any:
        seen.append(step)
        return DIGITS.batch(seed, step)

    def losses(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        models.append(model)
        return DIGITS.losses(model, batch)

    method, held_out = hero.METHODS[name], lambda: [DIGITS.batch(99, 0)]
    problem = replace(DIGITS, steps=4, batch=batch, losses=losses, held_out=held_out)
    rate = method.start / 2 if name != "dog-movement" else method.start
    outcome = training.train(problem, method.build, rate, 0)
    assert seen == [0, 1, 2, 3] and outcome["probe_percent"] == 0  # no method of the figure probes
    assert outcome["validation"] is not None and len(outcome["rates"]) == 4
    pairs = zip(models[-1].parameters(), DIGITS.build(0).parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in pairs)


def test_a_run_that_diverges_has_no_loss() -> None:
    broken = fixed_rates.run("mlp-friedman", 130, seed=0, steps=12)
    assert broken["validation"] is None and math.isfinite(broken["untrained"])


def test_what_a_crash_is_in_the_papers_table() -> None:
    engagement = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    constant = 2 / 3 * math.log(2)  # of three tasks two are tossed, one never happens
    for loss, crashed in ((constant + 0.01, True), (constant - 0.01, False)):
        history = paper.History(10)
        for step in range(9):
            history.add(step, [5.0], engagement)  # what was before the last tenth does not count
        history.add(9, [loss - 0.1, loss + 0.1], engagement)
        assert history.summary()["crashed"] == crashed
    with pytest.raises(paper.Diverged):
        history.add(9, [0.1, math.nan], engagement)
    assert history.summary() == {"train": None, "constant": None, "crashed": True}


def test_the_recommenders_probe_sees_the_day_and_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Users and items drift over the year: a probe of its last day, on which runs are judged, would
    know what training cannot."""
    asked = []
    note = lambda size, at, *, seed, stream, index: asked.append((at, stream))
    monkeypatch.setattr(recsys.LOG, "sample", note)
    for step in (0, 400, 800):
        PROBLEMS["recommender-clicks"].spare(0, step, 7)
    assert asked == [(0.0, "probe"), (0.5, "probe"), (1.0, "probe")]


# -- tables of lines with known answers ------------------------------------------------------------


def line(**values: Any) -> dict[str, Any]:
    usual = {"workload": "mlp-friedman", "exponent": 0, "seed": 0, "steps": 100, "rate": 1e-3,
             "untrained": 3.0, "level": "trial"}  # fmt: skip
    found = {"whole": False, "validation": None, "best": None, "factor": 1.0, "low": None,
             "high": None, "reason": "", "cost": 0.0}  # fmt: skip
    return {**usual, **found, **values}


FIXED = [
    line(exponent=e, rate=1e-3 * 2.0**e, validation=loss)
    for e, loss in ((-2, 2.0), (0, 1.2), (2, 1.0), (4, None))
]


def test_a_run_is_read_off_the_curve_of_fixed_rates() -> None:
    [run] = auto.compared([line(exponent=-2, rate=2.5e-4, factor=8.0, low=1e-3, high=8e-3)], FIXED)
    assert run.fixed == pytest.approx(50) and run.read_off == pytest.approx(5)
    assert run.real is None and run.holds
    [outside] = auto.compared([line(factor=0.5, high=3e-3)], FIXED)
    assert outside.read_off == pytest.approx(30) and not outside.holds
    whole = line(exponent=-2, factor=8.0, whole=True, validation=1.1)
    [real] = auto.compared([line(exponent=-2, factor=8.0), whole], FIXED)
    assert real.auto == real.real == pytest.approx(5)


def test_a_run_that_ends_worse_than_its_start_is_counted() -> None:
    start = {"exponent": 2, "rate": 4e-3}
    runs = auto.compared([line(**start, factor=0.25), line(**start, level="free")], FIXED)
    text = auto_report.counted({"these": runs})
    # runs, gaps, within 2 %, worse, worst, intervals that hold
    assert "| these | 1 | 0.0 | 0.0 | 10.0 | 1 | 1 | 0 | 0 | 1 | 10.0 | 1 |" in text
    row = "| mlp-friedman | 100 | 4 times the usual rate | trial | 0.0 % | 10.0 % |"
    assert row in auto_report.harmed(runs, 2)


def test_repeated_data_is_compared_by_the_best_checkpoint() -> None:
    lines = [
        line(workload="mlp-rows-256", whole=True, level=level, validation=last, best=best)
        for level, last, best in (("fixed", 2.0, 1.0), ("free", 2.0, 1.0), ("trial", 2.5, 1.2))
    ]
    row = "| 0.0 % | 0.0 % | 10.0 % | 10.0 % | 0.0 % | 0.0 % | 50.0 % |"
    assert row in auto_report.repeated(lines)


def test_the_scoreboard_has_what_is_missing_of_the_best() -> None:
    def of(method: str, validation: float | None) -> dict[str, Any]:
        return {**line(workload="vit-digits", validation=validation), "method": method}

    text = scoreboard.table([of("greedy", None), of("nadamw", 1.0), of("adamw", 1.03)])
    assert "| vit-digits | 0.0 | 1.5 | 100.0 |" in text
    none = [of("adamw", 3.0), of("greedy", 3.5)]
    assert "| vit-digits | 100.0 | 100.0 |" in scoreboard.table(none)  # nobody has learned anything
    starts = [{**of("adamw", loss), "exponent": e} for e, loss in ((-3, 2.0), (0, 1.5))]
    starts += [{**one, "seed": 1} for one in starts] + [of("prodigy", 1.0)]
    text = scoreboard.table(starts)  # seed 1 has another best end
    assert "| adamw | 41.7 | 12.5 | 27.1 | 41.7 |" in text
    assert "| prodigy |  | 0.0 | 0.0 | 0.0 |" in text


def test_rules_are_compared_each_at_its_best_rate() -> None:
    losses = {method: (1.2, 1.1, 2.0) for method in rules.RULES}
    losses |= {"adamw": (2.0, 1.5, 1.1), "mars": (1.03, 1.0, 2.0)}
    lines = [
        {
            **line(workload="vit-digits", validation=loss),
            "method": method,
            "exponent": exponent,
            "steps": 1500,
        }
        for method, of in losses.items()
        for exponent, loss in enumerate(of)
    ]
    text = rules.table(lines)
    assert "| adamw | 5.0 | 5.0 | 50.0 |" in text and "| mars | 0.0 | 0.0 | 1.5 |" in text


def curve(losses: dict[int, list[float | None]]) -> hero.Curve:
    """An untrained model has 2.0."""
    lines = [(e, seed, loss) for e, values in losses.items() for seed, loss in enumerate(values)]
    keys = ("exponent", "seed", "validation")
    return hero.Curve([{**dict(zip(keys, one, strict=True)), "untrained": 2.0} for one in lines])


def test_sensitivity_is_over_starts_even_in_the_logarithm_and_a_crash_has_learned_nothing() -> None:
    mean = (2 * (1.0 + 0.5) / 2 + 4 * (0.5 + 2.0) / 2) / 6
    # 3.0 counts as 2.0; and a denser grid of the same function is the same
    for losses in ({-2: [1.0], 0: [0.5], 4: [3.0]}, {-2: [1.0], -1: [0.75], 0: [0.5], 4: [3.0]}):
        assert curve(losses).sensitivity(0.5) == pytest.approx(mean - 0.5)
    assert (curve(losses).best, curve(losses).worst) == (0, 4)
    assert curve({0: [0.7]}).sensitivity(0.5) == pytest.approx(0.2)
    found = curve({0: [0.5, None, 9.0]})
    assert found.scores[0] == [0.5, 2.0, 2.0] and found.means[0] == pytest.approx(1.5)
    assert standard_error(found.scores[0]) == pytest.approx(0.5)  # sqrt(0.75 / 3)


@pytest.mark.parametrize("best", [-11, 0, 6])
def test_the_best_rate_is_found_wherever_it_is(best: int) -> None:
    records: list[dict[str, Any]] = []
    for _ in range(20):  # it ends earlier
        known = hero.means(records, "cnn-digits", "onecycle", 600)
        for e in hero.next_exponents(hero.METHODS["onecycle"], known):
            loss = None if e > best + 2 else 0.1 * abs(e - best)
            found = {"benchmark": "hero-find", "problem": "cnn-digits", "method": "onecycle",
                     "exponent": e, "steps": 600, "validation": loss, "untrained": 2.0}  # fmt: skip
            records += [{**found, "seed": seed} for seed in hero.find_seeds("cnn-digits")]
    for name in ("onecycle", "hdet-softmax"):  # which borrows it
        assert hero.best_rate(records, "cnn-digits", name, 600) == 1e-2 * 2.0**best
    tried = set(grouped(records, "exponent"))
    assert {best - 1, best, best + 1} <= tried and len(tried) <= 14
