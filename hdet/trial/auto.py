"""`AutoLR`: finds the learning rate of a run in its first steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..core.controller import Controller
from ..core.evidence import Evidence, Run
from ..core.plan import Learned, Moment, Plan
from ..core.schema import COUNT, FLAG, Instance, Number, Optional, read
from ..core.validate import within
from ..run.snapshot import Snapshot
from .arms import Closure, Searched
from .best_weights import BestWeights
from .displacement import Displacement
from .own_steps import OwnSteps
from .rule import MULTIPLES, SCORES, STEPS, RateInterval, Trial
from .steps import NOT_THE_RATE, REPEATS, TrialSteps, can_spread, trial_cost

__all__ = ["AutoLR", "Move"]

PART = 0.03
"""Of a run's compute: what a trial may cost by default, in runs that are long enough."""
SHORTEST = 1000
"""Steps of a run from which on a trial is made whatever part of it that costs."""


@dataclass(frozen=True)
class Move:
    """What a search has decided."""

    factor: float
    """Of all rates; 1: nothing changes."""
    restored: bool
    """Are the run's first weights in place again?"""
    note: str
    trial: Mapping[str, Any]
    """`RateInterval.to_dict`, for the log."""


class AutoLR(Controller):
    """Finds out in the first steps of a run which peak learning rates are good for a run of its
    length, and moves the rate only if it lies outside of that interval.

    With a closure, copies of the model train for 28 steps at 1/8, 1, 8, 64 and 512 times the rate
    and are compared on the 28 batches after that (`hdet.trial.rule`). Without one, or in a run of
    fewer than 1 000 steps, only how far the run's own first 28 steps move the weights counts:
    that costs nothing, and finds what is wrong by a factor of ten or more.

    A rate that is lowered begins with the run's first weights again; a rate that is raised goes on
    with the weights that are there. If nothing moves, the run is bitwise the one without AutoLR.

    Args:
        model: whose losses the closure computes, as the loop calls it (with its
            DistributedDataParallel, if it has one).
        budget: the part of the run's compute that a trial may take, in (0, 1); 0: no trial.
            Default: 3 %, and in runs of 1 000 steps and more at least one trial, which costs as
            much as about 155 steps, at most 196.
        before_step: called between an arm's backward pass and its step, for what the loop does
            there, such as clipping.
        scaler: the loop's GradScaler, under float16.
        place: "device" or "host", where copies live. A trial holds up to seven copies of all that
            is trained (parameters, masters, moments, buffers); without a closure it is one copy,
            for 28 steps.
        val_batches: ``(loss_fn, batches)`` with ``loss_fn(model, batch)`` -> losses: held-out data
            by which the best weights of the run are kept, see `restore_best_weights`.
        spread_arms: does each replica train arms of its own, on its own part of the batch? Then a
            trial takes less time (three replicas: 112 steps' worth for 196), and lowers a rate
            only if it is far too high. Closure and before_step must not communicate then. It needs DistributedDataParallel or local gradients, where it is the default.

    Raises:
        TypeError, ValueError: an argument that cannot be used.

    Example::

        auto = hdet.AutoLR(model)
        ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=n, controller=auto)
        ...
        ensemble.step(loss, closure=lambda: losses_of(model, batch))
    """

    name = "auto"
    needs_replicas = False
    plans_lengths = True
    judges_held_out = True

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: float | None = None,
        before_step: Callable[[], object] | None = None,
        scaler: Any = None,
        place: str = "device",
        val_batches: tuple[Callable[[nn.Module, Any], Any], Sequence[Any]] | None = None,
        spread_arms: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"AutoLR(model): a torch.nn.Module is needed, got {type(model).__name__}"
            )
        if before_step is not None and not callable(before_step):
            raise TypeError(f"before_step must be callable without arguments, got {before_step!r}")
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(f"scaler must be a torch GradScaler, got {type(scaler).__name__}")
        if place not in ("device", "host"):
            raise ValueError(f"place must be 'device' or 'host', got {place!r}")
        if budget is not None:
            within(budget, "budget", "[0, 1)", "a part of the run's compute: for 3 % write 0.03")
        self.model, self.before_step, self.scaler, self.place = model, before_step, scaler, place
        self.budget, self.spread_arms = budget, spread_arms
        self.best_weights = None if val_batches is None else BestWeights(*val_batches)
        self.interval: RateInterval | None = None
        """What was found. None: nothing yet."""
        self.layers: Mapping[str, float] = {}
        """How far each matrix was moved at the rate that is in force, by name (displacement)."""
        self.cost = 0.0
        """What trials have cost, in steps of the run."""
        self.done = False
        """Is the search over?"""
        self.obeyed = True
        """Does the run do what is decided? Not inside `Shadow`."""
        self._repeats = 0
        self._rate = 0.0  # before the search
        self._run: Searched | None = None
        self._total: int | None = None
        self._steps: TrialSteps | OwnSteps | None = None
        self._first: Snapshot | None = None

    # -- what an Ensemble asks ---------------------------------------------------------------------

    @property
    def search(self) -> AutoLR:
        return self

    def start(self, run: Run) -> None:
        """Raises ValueError for a run without a learning rate among its knobs."""
        if not any(knob.rate for knob in run.knobs):
            raise ValueError(
                "AutoLR moves learning rates, and there is no such knob: leave knobs out, or add "
                "hdet.LearningRate()"
            )
        if run.clock.warmup_steps:
            raise ValueError(
                f"AutoLR searches in the first steps: leave out warmup_steps={run.clock.warmup_steps}"
            )
        self._total = run.total_steps

    def attach(self, run: Searched) -> None:
        """Before the first step. Raises ValueError for a run of which no copies can be trained, and
        if it has searched for another run."""
        if self._run is not None:
            raise ValueError("this AutoLR belongs to another run: make a new one for each")
        if self._trial_is_affordable:
            run.check()
        leaves = run.leaves_gradients or not run.shares_gradients
        if self.spread_arms and not (leaves and can_spread(run, self.scaler)):
            raise ValueError(
                "spread_arms=True needs gradients that a trial can leave unreduced (pass the model "
                "with its DistributedDataParallel to AutoLR, without find_unused_parameters), no "
                "GradScaler and no SyncBatchNorm: leave spread_arms out"
            )
        self._run = run
        if self.best_weights is not None:
            self.best_weights.attach(run, self._total, self.place)

    def before_first_step(self) -> None:
        """The weights that are there are the first ones."""
        if self.done or self._run is None or self._first is not None:
            return
        self._first = self._run.snapshot(self.place)
        self._first.take()
        self._displacement = Displacement(self._run.weights, self._run.names())

    def after_step(self, closure: Closure | None) -> Move | None:
        """After each optimizer step, with its rates still in force and its gradients still there.
        Returns what was decided, or None while nothing is.

        Raises:
            TypeError: the closure of a trial is missing.
        """
        if self.best_weights is not None:
            self.best_weights.after_step()
        if self.done or self._first is None:
            return None
        assert self._run is not None
        if not self._run.rate:
            return None  # the search begins with the first step that has a rate
        if self._steps is None:
            self._steps = self._make_steps(closure)
        if isinstance(self._steps, OwnSteps):
            trial = self._steps.after_step()
        else:
            if closure is None:
                raise TypeError(
                    "AutoLR's trial needs the batch's losses again in each of its steps: call "
                    "ensemble.step(loss, closure=lambda: losses_of(model, batch))"
                )
            trial = self._steps.after_step(closure)
        return None if trial is None else self._decide(trial)

    def check_in_place(self, what: str) -> None:
        """Raises RuntimeError if ``what`` was called by the closure, for an arm; waits in another
        thread."""
        if self._steps is not None:
            self._steps.check(what)

    def _make_steps(self, closure: Closure | None) -> TrialSteps | OwnSteps:
        assert self._run is not None and self._first is not None
        if closure is None or not self._trial_is_affordable:
            return OwnSteps(self._run, self._displacement)
        spread = not self._run.shares_gradients if self.spread_arms is None else self.spread_arms
        return TrialSteps(
            self._run, self._first, self._displacement, self.before_step, self.scaler, self.place,
            spread,
        )  # fmt: skip

    @property
    def _trial_is_affordable(self) -> bool:
        if self._total is None or self.budget == 0:
            return False
        affordable = (PART if self.budget is None else self.budget) * self._total >= trial_cost()
        return affordable or (self.budget is None and self._total >= SHORTEST)

    @property
    def is_too_short(self) -> bool:
        """Is the run too short for the trial that was not forbidden?"""
        return self.budget != 0 and self._total is not None and not self._trial_is_affordable

    def _decide(self, trial: Trial) -> Move:
        steps, first = self._steps, self._first
        assert steps is not None and first is not None and self._run is not None
        self.cost, self.layers = self.cost + steps.cost, steps.layers()
        self._rate = self._rate or trial.rate
        found = trial.interval(self._total or STEPS)
        unsure = steps.is_beyond_measure(trial)
        if unsure and self._repeats == REPEATS:
            found = replace(
                found, low=0.0, high=math.inf, suggestion=self._rate,
                reason=NOT_THE_RATE,
            )  # fmt: skip
        self.interval, factor = found, found.suggestion / trial.rate
        note = self._note(factor)
        lowers = factor < 1 and self.obeyed
        if lowers:
            first.restore(keep_new_buffers=True)
            self._run.forget_gathered()
        self.done = not (lowers and unsure)
        self._repeats += not self.done
        self._close()
        return Move(factor if self.obeyed else 1.0, lowers, note, found.to_dict())

    def _note(self, factor: float) -> str:
        found = self.interval
        assert found is not None
        if factor == 1:
            return f"learning rate {found.rate:.2g} stays: {found.reason}"
        to = f"{found.rate:.2g} -> {found.rate * factor:.2g}"
        return f"learning rate {'' if self.obeyed else 'would go '}{to}: {found.reason}"

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._steps = self._first = None

    def close(self) -> None:
        """The Ensemble is closed: copies and hooks go."""
        self._close()

    def plan(self, now: Moment) -> Plan:
        return Plan(spread=False)

    def decide(self, evidence: Evidence) -> Learned:
        return self._nothing(evidence)

    @property
    def finished(self) -> bool:
        return self.done

    @property
    def idle(self) -> bool:
        return self.done

    def restart(self, now: Moment) -> None:
        """Other weights were loaded: a search that was under way begins again with them."""
        self._close()

    # -- what a user asks --------------------------------------------------------------------------

    def restore_best_weights(self) -> float:
        """Puts the weights with the lowest held-out loss into the model, on every rank, and returns
        that loss. Call it when training has ended.

        Raises:
            ValueError: there are no ``val_batches``, or none was evaluated yet.
        """
        if self.best_weights is None:
            raise ValueError(
                "pass AutoLR(model, val_batches=(loss_fn, batches)) to keep best weights"
            )
        return self.best_weights.restore()

    def report(self) -> str:
        """What is going to happen, or what was found: some short lines."""
        lines = self._found() if self.interval is not None else [self._plan_in_words()]
        if self.best_weights is not None and self.best_weights.step:
            lines.append(str(self.best_weights))
        return "\n".join(lines)

    def _plan_in_words(self) -> str:
        if self.done:
            return "no search: the run was resumed after its first steps"
        if self._trial_is_affordable:
            part = 100 * trial_cost() / (self._total or 1)
            tried = ", ".join(f"{multiple:g}" for multiple in MULTIPLES)
            return (
                f"a trial in the first {STEPS + SCORES} steps, at {tried} times your rate; it costs "
                f"at most {trial_cost():.0f} steps ({part:.1f} % of the run)"
            )
        looks = f"only how far the first {STEPS} steps move the weights is looked at"
        if self._total is None or self.budget == 0:
            return looks
        return (
            f"{self._total} steps are too few for a trial within the budget, so {looks}. For a trial "
            f"pass budget={math.ceil(100 * trial_cost() / self._total) / 100:g}, or use hdet.find_rate"
            if trial_cost() < self._total
            else f"{self._total} steps are too few for a trial, so {looks}. Use hdet.find_rate"
        )

    def _found(self) -> list[str]:
        found = self.interval
        assert found is not None
        rate = self._rate or found.rate
        to = (
            f"{rate:.2g} stays"
            if found.suggestion == rate
            else f"{rate:.2g} -> {found.suggestion:.2g}"
        )
        low = f"{found.low:.2g}" if found.low else "any lower rate"
        high = f"{found.high:.2g}" if math.isfinite(found.high) else "any higher rate"
        lines = [f"learning rate: {to} ({found.reason})",
                 f"good rates for {found.total_steps} steps: {low} to {high}"]  # fmt: skip
        arms = [arm for arm in found.trial.arms if arm.losses]
        if arms:
            tried = ", ".join(f"{arm.loss:.4g} at {arm.rate:.2g}" for arm in arms)
            lines.append(f"losses after {found.trial.steps} steps: {tried}")
            if not found.trial.has_learned:
                lines.append("no rate has learned anything in the trial: only displacement counts")
        if self.cost:
            part = f" ({100 * self.cost / self._total:.1f} % of the run)" if self._total else ""
            lines.append(f"cost: {self.cost:.0f} steps{part}")
        return lines + self._outliers()

    def _outliers(self) -> list[str]:
        """Layers that move far less or far more than the others."""
        known = sorted(value for value in self.layers.values() if 0 < value < math.inf)
        if len(known) < 3:
            return []
        middle = known[len(known) // 2]
        far = {name: x for name, x in self.layers.items() if x > 8 * middle or 0 < x < middle / 8}
        named = [f"{name} by {x:.2g}" for name, x in sorted(far.items(), key=lambda item: -item[1])]
        if not named:
            return []
        return [f"the median matrix moved by {middle:.2g} of its size, but {', '.join(named[:4])}"]

    @staticmethod
    def decided_again(then: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the rule makes of a recorded trial (`RateInterval.to_dict`), and what it made then:
        suggestion and ends."""
        now = Trial.from_dict(then["trial"]).interval(then["total_steps"]).to_dict()
        return [{key: of[key] for key in ("suggestion", "low", "high")} for of in (now, then)]

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Copies of a trial under way are not in it: it begins again after loading."""
        found = self.interval
        return {
            "done": self.done,
            "cost": self.cost,
            "rate": self._rate,
            "repeats": self._repeats,
            "interval": None if found is None else found.to_dict(),
        }

    def check_state(self, state: Any, knobs: int | None = None) -> dict[str, Any]:
        kinds = {"done": FLAG, "cost": Number(0), "rate": Number(0), "repeats": COUNT,
                 "interval": Optional(Instance(Mapping))}  # fmt: skip
        found = read(state, kinds, "AutoLR's", knobs)
        if found["interval"] is not None:
            try:
                found["interval"] = interval = RateInterval.from_dict(found["interval"])
                str(interval), interval.trial.interval(interval.total_steps)  # fails if damaged
            except Exception as error:
                raise ValueError(
                    f"AutoLR's state has a damaged trial ({type(error).__name__}: {error})"
                ) from error
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = self.check_state(state)
        self._close()
        self.done, self.cost, self.interval = found["done"], found["cost"], found["interval"]
        self._rate, self._repeats = found["rate"], found["repeats"]
        self.layers = {}
        if not self.done and self._run is not None:
            warnings.warn(
                "AutoLR: the checkpoint was saved during the search, which begins again with the "
                "weights that were loaded",
                stacklevel=2,
            )
