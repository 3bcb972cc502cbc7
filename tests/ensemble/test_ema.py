"""Averages over time in a run: averaged with the parameters, put back, begun anew, saved."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hdet
from hdet import checkpoint, converge
from tests.distributed import run_ranks
from tests.harness import Run
from tests.trial.common import ALL, auto_run

from .helpers import same, told

AVERAGES = (0.5, hdet.WeightAverage(decay=None))
OURS = functools.partial(hdet.FusedAdamW, ema=AVERAGES)
MASTERS = functools.partial(OURS, master_weights="split")
LOCAL = {"gradients": "local", "ddp": False}


def run_of(rank: int = 0, **settings: Any) -> Run:
    usual = {"optimizer": OURS, "scheduler": None, "lr": 0.05, "every": 4, "spread": 0.6}
    return Run(rank, **{**usual, **settings})


def averages_of(run: Run) -> list[torch.Tensor]:
    states = [run.optimizer.state[p] for p in run.net.parameters()]
    return [
        torch.cat([state[key].flatten() for state in states]).clone() for key in ("ema", "ema_1")
    ]


def everything(run: Run) -> Any:
    return [run.weights(), run.optimizer.state_dict(), run.net.state_dict()]


def averaged(rank: int, world: int, settings: dict[str, Any]) -> Any:
    """Before and after each `Ensemble.step`, then after `converge` in the middle of a cycle."""
    run, seen = run_of(rank, **settings), []
    for _ in range(11):
        loss = run.backward()
        run.optimizer.step()
        before = averages_of(run)
        run.ensemble.step(loss)
        run.index += 1
        seen.append((before, averages_of(run)))
    before = averages_of(run)
    run.ensemble.converge()
    return [*seen, (before, averages_of(run))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *({**LOCAL, "moments": moments} for moments in ("keep", "average", "reset")),
        {**LOCAL, "moments": "keep", "converge": converge.Outer()},
        {"optimizer": MASTERS, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_replicas_average_them_with_the_parameters(settings: dict[str, Any]) -> None:
    one, two = run_ranks(averaged, 2, settings)
    for step, (ours, theirs) in enumerate(zip(one, two, strict=True), 1):
        for a, b, after, after_there in zip(
            *ours[:1], *theirs[:1], ours[1], theirs[1], strict=True
        ):
            assert not torch.equal(a, b), "replicas differ"
            if step % 4 == 0:
                assert torch.equal(after, after_there)
                mean = (a.double() + b.double()) / 2
                torch.testing.assert_close(after.double(), mean, rtol=0, atol=2e-6)
            elif step < 12:
                assert torch.equal(a, after)


# -- taken back ------------------------------------------------------------------------------------


def test_a_trial_that_changes_nothing_leaves_no_trace() -> None:
    settings = {"optimizer": MASTERS, "dtype": torch.bfloat16}
    other, run = auto_run(0.05, controlled=False, **settings), auto_run(0.05, **settings)
    for steps in (1, ALL):
        assert same(everything(run.steps(steps)), everything(other.steps(steps)))


def test_a_run_whose_rate_was_lowered_begins_them_anew() -> None:
    """At a rate that breaks, as a new run at the rate that was found."""
    run = auto_run(30.0, optimizer=OURS, scheduler=None)
    while not run.search.done:
        run.step()
    assert run.rate < 1 and run.search.note.endswith("again with its first weights")
    assert all(state["ema_step"] == 0 for state in run.optimizer.state.values())
    assert torch.equal(averages_of(run)[0], run.weights())
    new = auto_run(run.rate, optimizer=OURS, scheduler=None, controlled=False)
    new.index = run.index
    assert same(everything(run.steps(5))[0], everything(new.steps(5))[0])
    assert same(averages_of(run), averages_of(new))


@pytest.mark.parametrize("optimizer", [OURS, MASTERS])
@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("before", [0, 4])
def test_a_cycle_that_is_taken_back_takes_them_back(
    together: int, optimizer: Any, before: int
) -> None:
    dtype = torch.float32 if optimizer is OURS else torch.bfloat16
    settings = {"together": together, "optimizer": optimizer, "dtype": dtype, "spread": 0.0}
    run = run_of(divergence=hdet.Divergence(rollback="device"), **settings).steps(before)
    kept = averages_of(run) if before else None
    for _ in range(4):
        run.step(report=math.nan if together == 1 else dict.fromkeys(range(together), math.nan))
    assert run.history["rolled_back"]
    assert kept is None or same(averages_of(run), kept)
    new = run_of(**{**settings, "lr": run.rate})
    new.index = run.index
    if not before:
        assert same(run.steps(3).all_weights(), new.steps(3).all_weights())
        assert same(averages_of(run), averages_of(new))


# -- checkpoints -----------------------------------------------------------------------------------


def resumed(rank: int, world: int, folder: str, settings: dict[str, Any]) -> bool:
    run = run_of(rank, **settings).steps(6)
    run.ensemble.converge()
    checkpoint.save(folder, checkpoint.RunState(run.net, run.ensemble))
    other = run_of(rank, **settings)
    checkpoint.load(folder, checkpoint.RunState(other.net, other.ensemble))
    other.index = 6
    before = same(everything(run), everything(other))
    return before and same(everything(run.steps(7)), everything(other.steps(7)))


def test_a_resume_is_exact_with_as_many_replicas_or_others(tmp_path: Path) -> None:
    for name, settings in {"shared": {}, "local": {**LOCAL, "moments": "keep"}}.items():
        assert all(run_ranks(resumed, 2, str(tmp_path / name), settings))
    for together in (1, 2, 3):
        run = run_of(together=together)
        checkpoint.load(tmp_path / "shared", checkpoint.RunState(run.net, run.ensemble))
        kept = averages_of(run)
        states = [run.optimizer.state[p] for p in run.net.parameters()]
        for k in range(together - 1):
            others = torch.cat([state["replica_ema"][k].flatten() for state in states])
            assert torch.equal(others, kept[0])
        run.steps(2)


# -- what is refused -------------------------------------------------------------------------------


def test_exact_local_keeps_none() -> None:
    make = lambda: run_of(replicas=hdet.Replicas(0, 2, None), converge=converge.ExactLocal())
    assert "would need steps of its own: leave them out" in told(make)


def inside(rank: int, world: int, folder: str) -> list[str]:
    """What is said there, in the last step of a cycle that is to be rolled back. Nothing is
    changed: outside it is. An export at a cycle's end is one of the averages."""
    run = run_of(rank, divergence=hdet.Divergence(rollback="device"), spread=0.6 * (world > 1))
    begun, path = run.steps(4).weights(), Path(folder) / f"{world}.safetensors"
    with run.optimizer.averaged():
        checkpoint.export_safetensors(path, run.net, run.ensemble)
    written = load_file(path)
    exported = torch.cat([written[name].flatten() for name, _ in run.net.named_parameters()])
    assert torch.equal(exported, averages_of(run)[0])
    run.steps(3).backward()
    run.optimizer.step()
    ensemble, kept = run.ensemble, run.weights()
    acts = {
        "step": lambda: ensemble.step(math.nan),
        "converge": ensemble.converge,
        "state_dict": ensemble.state_dict,
        "save": lambda: checkpoint.save(folder, checkpoint.RunState(run.net, ensemble)),
    }
    with run.optimizer.averaged():
        said = [told(act) for act in acts.values()]
    assert torch.equal(run.weights(), kept)
    ensemble.step(math.nan)
    assert run.history["rolled_back"] and torch.equal(run.weights(), begun)
    return said


def test_inside_of_averaged_the_run_stands_still(tmp_path: Path) -> None:
    for said in (inside(0, 1, str(tmp_path)), *run_ranks(inside, 2, str(tmp_path))):
        for message in said:
            assert re.search(r"\(\) (was called )?inside .*optimizer\.averaged\(\)", message)
    assert checkpoint.latest(tmp_path) is None
