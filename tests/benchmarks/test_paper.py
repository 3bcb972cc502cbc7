"""benchmarks.evidence.paper: what each configuration of the paper's table switches on, what
counts as a crash, and that a benchmark goes on where it stopped. No figure is judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence import paper
from benchmarks.evidence.problems import recsys

STEPS, RATE = 40, 1e-2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out data, which is a part of the problem's cache, is cut to a few interactions."""
    held_out = recsys.LOG.sample(256, 1.0, seed=0, stream="validation", index=0)
    monkeypatch.setattr(recsys, "held_out", lambda: held_out)


def run(method: str, steps: int = STEPS, rate: float = RATE) -> dict[str, Any]:
    return paper.run("paper", "recommender-clicks", method, 1.0, rate, 0, steps)


def plain(steps: int = STEPS) -> float:
    """The baseline without anything of ours."""
    model = paper.PROBLEM.build(0)
    optimizer = torch.optim.AdamW(paper.PROBLEM.groups(model), lr=RATE, betas=(0.9, 0.95))
    schedule = paper.onecycle(optimizer, RATE, steps)
    for step in range(steps):
        optimizer.zero_grad()
        paper.PROBLEM.losses(
            model, paper.interactions(paper.BATCH, step, steps, 0)
        ).mean().backward()
        optimizer.step()
        schedule.step()
    return float(paper.PROBLEM.validate(model))


def test_the_baseline_is_plain_training() -> None:
    line = run("baseline")
    assert line["validation"] == pytest.approx(plain(), abs=1e-5)
    assert not line["crashed"] or line["train"] > line["constant"]
    passed = (STEPS / 2 - 3) / (
        STEPS - 1 - 3
    )  # the rise takes 3 steps; OneCycle's last rate is the last step's
    half_way = 1 / 25e4 + (1 - 1 / 25e4) * (1 + math.cos(math.pi * passed)) / 2
    assert list(line["bases"][1].values()) == pytest.approx([half_way] * 4)


def test_the_controller_tells_the_groups_apart() -> None:
    assert len(set(run("no-warm")["bases"][1].values())) == 4
    (onecycle,) = set(run("no-auto")["bases"][1].values())  # there is none
    steered = list(run("on-onecycle")["bases"][1].values())
    assert len(set(steered)) == 4 and steered == pytest.approx(
        [onecycle] * 4, rel=0.05
    )  # the schedule keeps its shape


def test_the_noise_is_of_the_papers_size_and_each_replicas_own() -> None:
    first, second, *_ = (
        model.user.weight for model in paper.noisy_starts(paper.METHODS["local"], 0)
    )
    assert (first - second).norm().item() == pytest.approx(
        0.01 * 2**0.5 * first.norm().item(), rel=0.05
    )


def test_what_a_crash_is() -> None:
    engagement = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    constant = 2 / 3 * math.log(2)  # of three tasks two are tossed, one never happens
    for loss, crashed in ((constant + 0.01, True), (constant - 0.01, False)):
        history = paper.History(10)
        for step in range(9):
            history.add(step, [5.0], engagement)  # what was before the last tenth does not count
        history.add(9, [loss - 0.1, loss + 0.1], engagement)
        found = history.summary()
        assert found == {
            "train": pytest.approx(loss),
            "constant": pytest.approx(constant, abs=1e-6),
            "crashed": crashed,
        }
    with pytest.raises(paper.Diverged):
        history.add(9, [0.1, math.nan], engagement)
    assert history.summary() == {"train": None, "constant": None, "crashed": True}


def test_quick_looks_for_the_best_rate_first(tmp_path: Path, in_this_process: None) -> None:
    path = tmp_path / "paper.jsonl"
    paper.main(["--quick", "--methods", "baseline", "--json", str(path)])
    assert [json.loads(line)["benchmark"] for line in path.read_text().splitlines()] == [
        "paper-find"
    ] * 2 + ["paper"] * 2
