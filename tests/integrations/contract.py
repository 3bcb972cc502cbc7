"""What an adapter promises, whatever the framework: a module of tests says how it trains there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet

from ..distributed import RankError
from .frameworks import (
    EVERY,
    FIRST,
    LOOKED,
    SPREAD,
    STEPS,
    STILL,
    TRIED,
    Halved,
    equal,
    halved,
    on_ranks,
    told,
    trial,
)


@dataclass
class Trained:
    """What is to be seen of a run, on one rank.

    Attributes:
        last: all weights at the end.
        weights: [step] after it, before anybody looks.
        lines: what the framework logs, of each step, without hdet's numbers.
        rates: that it logs, of each step.
        losses: of each step, or of each micro-batch.
        metrics: hdet's numbers in its log.
        evaluated: weights with which it evaluates after step 7.
        saved: weights in the checkpoint.
        told: hdet's lines in its log.
        skipped, counted: after each step: has a GradScaler skipped it, and how many hdet counts.
        state: of each Ensemble, (step, cycle, corrections).
        looked: (correction, cost of trials, losses of each arm, scaler) of an AutoLR.
    """

    last: torch.Tensor
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    lines: list[Any] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    evaluated: list[torch.Tensor] = field(default_factory=list)
    saved: torch.Tensor | None = None
    told: list[str] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    looked: Any = None

    def see(self, ensembles: list[Any]) -> Trained:
        """Adds what an adapter's Ensembles say."""
        self.state = [(of.steps_done, of.cycle, of.corrections) for of in ensembles]
        auto = ensembles[0].search if ensembles else None
        if auto is not None and auto.interval is not None:
            arms = [arm.losses for arm in auto.interval.trial.arms]
            self.looked = (
                ensembles[0].corrections["lr"],
                auto.cost,
                arms,
                auto.scaler_in_use is not None,
            )
        return self


class Contract:
    """``train(folder, ensemble, lr=, steps=, until=, save=, resume=, evaluate=, ...)`` -> `Trained`
    trains for ``until`` of ``steps`` steps, saves after each ``save``, goes on after ``resume``."""

    train: Callable[..., Trained]
    ranks: Callable[..., list[Any]] = staticmethod(on_ranks)
    plain: Sequence[tuple[int, dict[str, Any]]] = ((1, {}), (2, {}))
    """(ranks, settings) in which spread 0 is the plain run."""
    spread: Any = ()
    """Settings in which replicas are spread: a plain step, in the direction of the gradient."""
    good, low, world = 1e-2, 1e-6, 2
    """Rates; ranks of a trial."""
    trial_settings: Any = ()
    layouts: Sequence[tuple[int, Any, dict[str, Any], Any]] = ((1, STILL, {}, ()),)
    """(ranks, Ensemble, settings, pairs of ranks with the same part of two replicas)"""
    several: tuple[int, Any] | None = None
    """(ranks, settings) of a run with two optimizers, if there can be; the ranks' second half is a
    replica with the parts of the first."""

    again: Callable[..., Any]
    """``again(folder, **settings)`` -> the losses of a step of rate 0, its gradients, and
    `computed_again` of its closure."""
    anew: Sequence[tuple[int, dict[str, Any]]] = ((2, {}),)
    """(ranks, settings) in which they are."""

    def run(self, folder: Path, ensemble: Any, world: int = 2, **settings: Any) -> list[Trained]:
        return self.ranks(partial(type(self).train, **settings), world, str(folder), ensemble)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "peers" in metafunc.fixturenames:
            metafunc.parametrize(("world", "of", "settings", "peers"), self.layouts)
        elif "settings" in metafunc.fixturenames:
            is_anew = "anew" in metafunc.function.__name__
            metafunc.parametrize(("world", "settings"), self.anew if is_anew else self.plain)

    def check_same(self, plain: list[Trained], ours: list[Trained], steps: int) -> None:
        for a, b in zip(plain, ours, strict=True):
            assert torch.equal(a.last, b.last) and len(a.lines) >= steps
            assert repr(a.lines) == repr(b.lines)  # a norm that overflows is no number
            assert a.rates == b.rates and equal(
                [torch.stack([of.last, *of.evaluated]) for of in (a, b)]
            )

    def test_spread_0_is_the_plain_run_bit_for_bit(
        self, tmp_path: Path, world: int, settings: dict[str, Any]
    ) -> None:
        runs = [self.run(tmp_path, of, world, evaluate=7, **settings) for of in (None, STILL)]
        self.check_same(*runs, STEPS)

    def test_by_default_the_first_steps_are_looked_at_at_no_cost(self, tmp_path: Path) -> None:
        plain, ours, low = (
            self.run(tmp_path, of, lr=lr, steps=LOOKED)
            for of, lr in ((None, self.good), ({}, self.good), ({}, self.low))
        )
        self.check_same(plain, ours, LOOKED)
        assert all(of.looked == (1.0, 0.0, [()], False) for of in ours)
        assert all(of.looked[0] > 10 for of in low)

    def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(
        self, tmp_path: Path
    ) -> None:
        records: Any = Records()
        ensemble = {**SPREAD, "controller": Halved(), "log": records}
        one, two = self.run(tmp_path, ensemble, save=8, evaluate=7, **dict(self.spread))
        plain, _ = self.run(tmp_path, None, **dict(self.spread))
        assert meet(one, two) == [5, 10, 12]
        for name in ("last", "evaluated", "saved"):
            first, second = getattr(one, name), getattr(two, name)
            assert len(first) and equal([torch.stack(list(of)) for of in (first, second)])
        mean = (one.weights[8] + two.weights[8]) / 2
        torch.testing.assert_close(one.saved.sort().values, mean.sort().values, rtol=0, atol=1e-7)
        for of in (one, two):
            rates = [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(plain.rates)]
            assert of.rates == pytest.approx(rates, rel=1e-6) and len(rates) == STEPS
            corrections = [line["hdet/corrections/lr"] for line in of.metrics]
            assert corrections[0] == 1 and set(corrections[EVERY:]) == {0.5}
            assert {"hdet/values/lr", "hdet/cycle"} < of.metrics[0].keys()
        for a, b in zip(one.metrics, two.metrics, strict=True):
            both = sorted(of["hdet/multipliers/lr"] for of in (a, b))
            assert both == pytest.approx([0.7, 1.3])

    def test_a_cycles_loss_is_the_mean_of_what_the_run_trains_on(
        self, tmp_path: Path, world: int, of: Any, settings: dict[str, Any], peers: Any
    ) -> None:
        """In each layout, where a part of a model is averaged with its own kind."""
        train = partial(_logged, type(self).train, {**dict(self.spread), **settings})
        logs, runs = zip(*self.ranks(train, world, str(tmp_path), of), strict=True)
        cycles = [run.losses[: len(run.losses) // STEPS * EVERY] for run in runs if run.losses]
        means = [sum(losses) / len(losses) for losses in cycles]
        [first, *_] = next(filter(None, logs))
        assert first == pytest.approx(sum(means) / len(means), rel=1e-5)
        for one, two in peers:
            assert meet(runs[one], runs[two]) == [5, 10, 12]

    def test_losses_and_gradients_are_computed_anew_as_the_framework_has_made_them(
        self, tmp_path: Path, world: int, settings: dict[str, Any]
    ) -> None:
        found = self.ranks(partial(type(self).again, **settings), world, str(tmp_path))
        for _, gradient, (loss, scored, again) in found:
            assert torch.equal(gradient, again) and 0 < float(gradient.norm()) <= 0.5 + 1e-6
            assert loss is scored is None or torch.equal(loss, scored)  # None: not the last stage
        losses = [float(loss) for _, _, (loss, *_) in found if loss is not None]
        expected = [sum(map(float, of)) for of, *_ in found if of]
        assert sum(losses) == pytest.approx(sum(expected), rel=1e-6)

    @pytest.mark.parametrize("at", [EVERY, EVERY + 2])
    def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(
        self, tmp_path: Path, at: int
    ) -> None:
        ensemble = {**SPREAD, "controller": halved}
        whole = self.run(tmp_path, ensemble, save=at)
        resumed = self.run(tmp_path, ensemble, save=at, resume=at)
        for a, b in zip(whole, resumed, strict=True):
            assert torch.equal(a.last, b.last) and a.state == b.state
            assert a.lines[at - STEPS :] == b.lines[at - STEPS :]
            assert len(b.weights) == STEPS - at and a.metrics[-1] == b.metrics[-1]

    def test_checkpoints_of_a_plain_run_go_on_here_and_ours_there(self, tmp_path: Path) -> None:
        [plain] = self.run(tmp_path, None, 1, save=4)
        [ours] = self.run(tmp_path, STILL, 1, save=4, resume=4, from_plain=True)
        [back] = self.run(tmp_path, None, 1, save=4, resume=8)
        assert equal([of.last for of in (plain, ours, back)])
        assert len(ours.weights) == STEPS - 4 and len(back.weights) == STEPS - 8

    def test_a_trial_raises_a_rate_that_is_far_too_low_and_is_told_of(self, tmp_path: Path) -> None:
        found = self.run(
            tmp_path, {"search": trial, "sync": hdet.Sync(EVERY)}, self.world, lr=self.low,
            steps=TRIED, until=FIRST, **dict(self.trial_settings),
        )  # fmt: skip
        assert len({of.looked[0] for of in found}) == 1 and found[0].looked[0] >= 8
        lines = found[0].told
        assert lines[0].startswith("hdet, AutoLR: a trial in the first 56 steps")
        assert sum("learning rate " in line and " -> " in line for line in lines) == 1

    def test_several_optimizers_have_an_ensemble_each(self, tmp_path: Path) -> None:
        """And one controller for all, or a trial, is refused."""
        if self.several is None:
            pytest.skip("this framework's run has one optimizer")
        world, settings = self.several
        found = self.run(tmp_path, {**SPREAD, "controller": halved}, world, **settings)
        for one, two in zip(found[: world // 2], found[world // 2 :], strict=True):
            assert meet(one, two) == [5, 10, 12] and torch.equal(one.last, two.last)
            assert len(one.state) == 2
            corrections = [one.metrics[-1][f"optimizer {n}/hdet/corrections/lr"] for n in (0, 1)]
            assert corrections == [0.5, 0.5]
        for name, of, message in (
            ("search", trial, "AutoLR trains copies of a run with one optimizer, and there are 2"),
            ("controller", Halved(), "several optimizers, each with a controller of its own: pass"),
        ):
            with pytest.raises((ValueError, RankError), match=message):
                self.run(tmp_path, {**SPREAD, name: of}, world, **settings)

    def test_a_setting_that_an_ensemble_does_not_have_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises((TypeError, RankError), match="unexpected keyword argument 'controler'"):
            self.run(tmp_path, {"controler": None}, 1)

    def test_a_trial_leaves_no_trace_in_the_run(self, tmp_path: Path) -> None:
        plain, ours = (
            self.run(
                tmp_path, of, 1, lr=self.good, steps=TRIED, until=FIRST, **dict(self.trial_settings)
            )
            for of in (None, {"search": told, "sync": hdet.Sync(EVERY)})
        )
        self.check_same(plain, ours, FIRST)
        assert ours[0].looked[0] == 1 and any("good rates for" in line for line in ours[0].told)


class Records(list[Any]):
    """A log that is left behind in another process."""

    def __call__(self, record: dict[str, Any], step: int) -> None:
        losses = [loss for loss in record["losses"] if loss is not None]
        self.append(sum(losses) / len(losses))


def meet(one: Trained, two: Trained) -> list[int]:
    """Steps after which two ranks are equal."""
    return [step for step in one.weights if torch.equal(one.weights[step], two.weights[step])]


def _logged(train: Any, settings: dict[str, Any], folder: str, of: Any) -> Any:
    records = Records()
    run = train(folder, {**of, "log": records}, **settings)
    return list(records), run


class Float16(Contract):
    """``train(..., float16=True)`` has a GradScaler, which a CPU has, too."""

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_under_float16_spread_0_is_the_plain_run_and_skipped_steps_do_not_count(
        self, tmp_path: Path, ranks: int
    ) -> None:
        plain, ours = (self.run(tmp_path, of, ranks, float16=True) for of in (None, STILL))
        self.check_same(plain, ours, STEPS)
        for a, b in zip(plain, ours, strict=True):
            assert a.skipped == b.skipped and a.skipped[0] and any(a.skipped[3:])
            assert b.counted == [step - sum(a.skipped[:step]) for step in range(1, STEPS + 1)]

    def test_under_float16_replicas_differ_within_a_cycle_and_are_equal_after_it(
        self, tmp_path: Path
    ) -> None:
        one, two = self.run(tmp_path, SPREAD, float16=True)
        assert one.skipped == two.skipped and one.counted == two.counted and any(one.skipped[3:])
        same = [torch.equal(one.weights[step], two.weights[step]) for step in one.weights]
        assert same[:-1] == [count % EVERY == 0 for count in one.counted[:-1]]
        assert torch.equal(one.last, two.last) and one.last.isfinite().all()

    def test_under_float16_a_trial_has_the_scaler_and_the_clipping(self, tmp_path: Path) -> None:
        settings = {"float16": True, "steps": TRIED, **dict(self.trial_settings)}
        [raised] = self.run(tmp_path, {"search": trial}, 1, lr=self.low, **settings)
        assert raised.looked[0] >= 8 and raised.looked[3] and raised.last.isfinite().all()
        plain, ours = (
            self.run(tmp_path, of, 1, lr=self.good, **settings) for of in (None, {"search": told})
        )
        self.check_same(plain, ours, TRIED)
