"""What an adapter of hdet's own promises beside `hdet.testing.AdapterContract`, whatever the
framework: a module of tests says how it trains there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet import testing
from hdet.testing.adapters import ENDS, EVERY, SPREAD, STEPS, STILL, Halved, find_equal_steps

from ..distributed import RankError
from .frameworks import FIRST, LOOKED, TRIED, halved, on_ranks, told, trial


@dataclass
class Trained(testing.Trained):
    """Also of a run on one rank.

    Attributes:
        lines: what the framework logs, of each step, without hdet's numbers.
        told: hdet's lines in its log.
        skipped, counted: after each step: has a GradScaler skipped it, and how many hdet counts.
        state: of each Ensemble, (step, cycle, corrections).
        looked: (correction, cost of trials, losses of each arm, scaler) of an AutoLR.
    """

    lines: list[Any] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
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


class Contract(testing.AdapterContract):
    """``train(folder, ensemble, lr=, steps=, until=, ...)`` -> `Trained` also trains at a rate, for
    ``until`` of ``steps`` steps."""

    train: Callable[..., Trained]
    ranks: Callable[..., list[Any]] = staticmethod(on_ranks)
    layouts = ((1, {}, ()),)
    good, low, world = 1e-2, 1e-6, 2
    """Rates; ranks of a trial."""
    trial_settings: Any = ()
    several: tuple[int, Any] | None = None
    """(ranks, settings) of a run with two optimizers, if there can be; the ranks' second half is a
    replica with the parts of the first."""

    again: Callable[..., Any]
    """``again(folder, **settings)`` -> the losses of a step of rate 0, its gradients, and
    `computed_again` of its closure."""
    anew: Sequence[tuple[int, dict[str, Any]]] = ((2, {}),)
    """(ranks, settings) in which they are."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "anew" in metafunc.function.__name__:
            metafunc.parametrize(("world", "settings"), self.anew)
        else:
            super().pytest_generate_tests(metafunc)

    def check_same(self, one: Trained, other: Trained) -> None:
        super().check_same(one, other)
        lines = one.lines[len(one.lines) - len(other.lines) :]
        assert repr(lines) == repr(other.lines)  # a norm that overflows is no number

    def check_all_same(self, plain: list[Trained], ours: list[Trained], steps: int) -> None:
        for a, b in zip(plain, ours, strict=True):
            self.check_same(a, b)
            assert len(a.lines) == len(b.lines) >= steps

    def test_by_default_the_first_steps_are_looked_at_at_no_cost(self, tmp_path: Path) -> None:
        plain, ours, low = (
            self.run(tmp_path, of, lr=lr, steps=LOOKED)
            for of, lr in ((None, self.good), ({}, self.good), ({}, self.low))
        )
        self.check_all_same(plain, ours, LOOKED)
        assert all(of.looked == (1.0, 0.0, [()], False) for of in ours)
        assert all(of.looked[0] > 10 for of in low)

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
            assert find_equal_steps(one, two) == ENDS and torch.equal(one.last, two.last)
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
        self.check_all_same(plain, ours, FIRST)
        assert ours[0].looked[0] == 1 and any("good rates for" in line for line in ours[0].told)


class Float16(Contract):
    """``train(..., float16=True)`` has a GradScaler, which a CPU has, too."""

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_under_float16_spread_0_is_the_plain_run_and_skipped_steps_do_not_count(
        self, tmp_path: Path, ranks: int
    ) -> None:
        plain, ours = (self.run(tmp_path, of, ranks, float16=True) for of in (None, STILL))
        self.check_all_same(plain, ours, STEPS)
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
        self.check_all_same(plain, ours, TRIED)
