"""What an adapter to a trainer promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ..converge.sync import Sync
from ..core.controller import Controller
from ..core.evidence import Evidence
from ..core.plan import Decision, Plan
from ..knobs import LearningRate
from .runs import run_on_ranks

__all__ = ["AdapterContract", "Trained"]

STEPS, EVERY = 12, 5
"""Of a run, and of a cycle."""
ENDS = [5, 10, 12]
"""of cycles: the run's last step ends one"""
STILL = {"knobs": [LearningRate(0)], "sync": Sync(EVERY)}
SPREAD = {"knobs": [LearningRate(0.3)], "sync": Sync(EVERY)}


@dataclass
class Trained:
    """What is to be seen of a run on one rank.

    Attributes:
        last: all weights at the end.
        weights: [step] all weights after it, before an evaluation or a save.
        rates: of each step, as the trainer logs them.
        losses: of each step, or of each micro-batch.
        metrics: of each step hdet's numbers in the trainer's log, by the names of `hdet.logging`,
            if there are any.
        evaluated: weights of each evaluation.
        saved: weights in the first checkpoint.
        state: what the Ensemble says at the end, such as its ``state_dict()``.
    """

    last: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    evaluated: list[torch.Tensor] = field(default_factory=list)
    saved: torch.Tensor | None = None
    state: Any = None


class AdapterContract:
    """The promises of an adapter, in runs of 12 steps with cycles of 5, on one rank and on two.

    Attributes:
        train: ``train(folder, ensemble, *, save=0, resume=0, evaluate=0)`` trains and returns a
            `Trained`. ``ensemble``: settings for the adapter; None: the trainer without it. It
            saves in ``folder`` after each ``save`` steps, goes on from the checkpoint of step
            ``resume``, and evaluates after step ``evaluate``; 0: not at all.
        plain: (ranks, more settings of ``train``) in which spread 0 is the trainer's own run.
        layouts: (ranks, more settings of ``train``, pairs of ranks that hold the same part of two
            replicas).
        ranks: ``ranks(function, world, *args)`` starts processes, which have a process group and
            the environment of torchrun; results by rank.

    Example::

        import hdet.testing

        def train(folder, ensemble, *, save=0, resume=0, evaluate=0):
            ...  # your trainer, with your adapter where ensemble is not None
            return hdet.testing.Trained(last=..., weights={1: ...})

        class TestMyAdapter(hdet.testing.AdapterContract):
            train = staticmethod(train)
    """

    train: Callable[..., Any]
    plain: Sequence[tuple[int, dict[str, Any]]] = ((1, {}), (2, {}))
    layouts: Sequence[tuple[int, dict[str, Any], Any]] = ((1, {}, ()), (2, {}, ((0, 1),)))
    ranks: Callable[..., list[Any]] = staticmethod(run_on_ranks)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "peers" in metafunc.fixturenames:
            metafunc.parametrize(("world", "settings", "peers"), self.layouts)
        elif "settings" in metafunc.fixturenames:
            metafunc.parametrize(("world", "settings"), self.plain)

    def run(self, folder: Path, ensemble: Any, world: int = 2, **settings: Any) -> list[Any]:
        return self.ranks(partial(type(self).train, **settings), world, str(folder), ensemble)

    def check_same(self, one: Any, other: Any) -> None:
        """``other`` is the end of ``one``, or all of it."""
        assert torch.equal(one.last, other.last)
        for name in ("rates", "losses"):
            whole, end = getattr(one, name), getattr(other, name)
            assert repr(whole[len(whole) - len(end) :]) == repr(end), name
        assert len(other.evaluated) <= len(one.evaluated)
        assert all(map(torch.equal, one.evaluated, other.evaluated))

    def test_spread_0_is_the_plain_run_bitwise(
        self, tmp_path: Path, world: int, settings: dict[str, Any]
    ) -> None:
        runs = [self.run(tmp_path, of, world, evaluate=7, **settings) for of in (None, STILL)]
        for plain, ours in zip(*runs, strict=True):
            self.check_same(plain, ours)
            assert len(ours.weights) == STEPS and len(ours.rates) == len(plain.rates)
            assert len(ours.losses) == len(plain.losses) and ours.evaluated

    def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(
        self, tmp_path: Path
    ) -> None:
        one, two = self.run(tmp_path, {**SPREAD, "controller": Halved()}, save=8, evaluate=7)
        plain, _ = self.run(tmp_path, None)
        assert find_equal_steps(one, two) == ENDS
        for name in ("last", "evaluated", "saved"):
            first, second = (list(getattr(of, name)) for of in (one, two))
            assert len(first) and torch.equal(torch.stack(first), torch.stack(second)), name
        mean = (one.weights[8] + two.weights[8]) / 2
        torch.testing.assert_close(one.saved.sort().values, mean.sort().values, rtol=0, atol=1e-7)
        for of in (one, two):
            rates = [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(plain.rates)]
            assert of.rates == pytest.approx(rates, rel=1e-6) and len(rates) == STEPS
        for a, b in zip(one.metrics, two.metrics, strict=True):
            assert {"hdet/values/lr", "hdet/cycle"} < a.keys()
            both = sorted(of["hdet/multipliers/lr"] for of in (a, b))
            assert both == pytest.approx([0.7, 1.3])
        for of in filter(None, (one.metrics, two.metrics)):
            corrections = [line["hdet/corrections/lr"] for line in of]
            assert corrections[0] == 1 and set(corrections[EVERY:]) == {0.5}

    def test_a_cycles_loss_is_the_mean_of_what_the_run_trains_on(
        self, tmp_path: Path, world: int, settings: dict[str, Any], peers: Any
    ) -> None:
        """In each layout, where a part of a model is averaged with its own kind."""
        train = partial(_logged, type(self).train, settings)
        of = SPREAD if peers else STILL
        logs, runs = zip(*self.ranks(train, world, str(tmp_path), of), strict=True)
        cycles = [run.losses[: len(run.losses) // STEPS * EVERY] for run in runs if run.losses]
        means = [sum(losses) / len(losses) for losses in cycles]
        [first, *_] = next(filter(None, logs))
        assert first == pytest.approx(sum(means) / len(means), rel=1e-5)
        for one, two in peers:
            assert find_equal_steps(runs[one], runs[two]) == ENDS

    @pytest.mark.parametrize("at", [EVERY, EVERY + 2])
    def test_it_resumes_bitwise_at_a_cycles_end_and_in_its_middle(
        self, tmp_path: Path, at: int
    ) -> None:
        ensemble = {**SPREAD, "controller": Halved()}
        whole = self.run(tmp_path, ensemble, save=at)
        resumed = self.run(tmp_path, ensemble, save=at, resume=at)
        for a, b in zip(whole, resumed, strict=True):
            self.check_same(a, b)
            assert a.state == b.state and a.metrics[-1:] == b.metrics[-1:]
            assert len(b.weights) == STEPS - at

    def test_checkpoints_of_a_plain_run_go_on_here_and_ours_there(self, tmp_path: Path) -> None:
        [plain] = self.run(tmp_path, None, 1, save=4)
        [ours] = self.run(tmp_path, STILL, 1, save=4, resume=4)
        [back] = self.run(tmp_path, None, 1, save=4, resume=8)
        assert torch.equal(plain.last, ours.last) and torch.equal(plain.last, back.last)
        assert len(ours.weights) == STEPS - 4 and len(back.weights) == STEPS - 8


class Halved(Controller):
    """Halves the rate at the first cycle's end; replicas are spread where there are several."""

    name = "halved"
    needs_replicas = False

    def plan(self) -> Plan:
        return Plan()

    def decide(self, evidence: Evidence) -> list[Decision]:
        is_first = evidence.cycle == 0
        decision = Decision(factor=0.5 if is_first else 1.0, note="halved" * is_first)
        return [decision] * len(evidence.knobs)

    def report(self) -> str:
        return "halves once"


def find_equal_steps(one: Any, two: Any) -> list[int]:
    """Steps after which two ranks have equal weights."""
    return [step for step in one.weights if torch.equal(one.weights[step], two.weights[step])]


class _Records(list[float]):
    """The losses of cycles, in the process that logs."""

    def __call__(self, record: dict[str, Any], step: int) -> None:
        losses = [loss for loss in record["losses"] if loss is not None]
        self.append(sum(losses) / len(losses))


def _logged(train: Any, settings: dict[str, Any], folder: str, of: Any) -> Any:
    records = _Records()
    run = train(folder, {**of, "log": records}, **settings)
    return list(records), run
