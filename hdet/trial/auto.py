"""`AutoLR`: finds the learning rate of a run in its first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..core.evidence import Run
from ..core.schema import COUNT, FLAG, MAPPING, list_of, number, optional, read
from ..core.validate import warn, within
from .arms import Arms, Beginning
from .best_weights import BestWeights
from .budget import Budget
from .communication import Communication
from .in_place import InPlace
from .rule import SCORES, STEPS, Arm, RateInterval, Trial
from .searched import Closure, Searched
from .steps import LoopLoss, OwnSteps, TrialSteps

__all__ = ["AutoLR"]

REPEATS = 3
"""How often a trial is repeated at a far lower rate. If nothing helps, it is not the rate, which
goes back to where it was."""
NOT_THE_RATE = "far lower rates break too: it is not the rate"


class AutoLR:
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
            Default: one trial in runs of 1 000 steps and more, which costs as much as about 155
            steps, at most 196.
        before_step: called between an arm's backward pass and its step, for what the loop does
            there, such as clipping. Where arms are spread, it sees the gradients of the arm's own
            part of the batch, which are longer.
        on_restart: called on every rank when the first weights are back: for averages of weights
            that the loop keeps, which begin again (``averaged.n_averaged.zero_()``).
        scaler: the loop's GradScaler, under float16.
        place: "device" or "host", where copies live. A trial holds up to seven copies of all that
            is trained (parameters, masters, moments, buffers, a teacher in the model); without a
            closure it is one copy, for 28 steps.
        val_batches: ``(loss_fn, batches)`` with ``loss_fn(model, batch)`` -> losses: held-out data
            by which the best weights of the run are kept, see `restore_best_weights`.
        spread_arms: does each replica train arms of its own, on its own part of the batch? Then a
            trial costs fewer steps: about 112 on 2 replicas, 74 on 8. True needs local gradients,
            or DistributedDataParallel (pass it as ``model``) without find_unused_parameters,
            SyncBatchNorm and a scaler; and that closure, before_step and the optimizer's step send
            nothing to other replicas. None: where all that holds, and either gradients are local
            or a trial would cost more than 3 % of the run (less than 6 534 steps). Whether they
            send is found out in the first step. It is not noticed of what goes past
            torch.distributed's groups: pass False then.
        report_only: measure and report, and move nothing.

    Attributes:
        interval: what was measured, a `RateInterval`; None: nothing yet.
        cost: of trials, in steps of the run.
        seconds, num_bytes: their time and the most memory that copies took, on this rank and in
            this process; a checkpoint does not have them.
        done: is the search over?

    Raises:
        TypeError: ``model`` is no module, ``before_step`` or ``on_restart`` no function.
        ValueError: an argument that cannot be used.

    Example::

        ensemble = hdet.Ensemble(
            optimizer, scheduler, total_steps=2000, search=hdet.AutoLR(model)
        )
        for batch in loader:
            loss = losses_of(model, batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(loss, closure=lambda: losses_of(model, batch))
        print(ensemble.report())
    """

    name = "AutoLR"

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: float | None = None,
        before_step: Callable[[], object] | None = None,
        on_restart: Callable[[], object] | None = None,
        scaler: Any = None,
        place: str = "device",
        val_batches: tuple[Callable[[nn.Module, Any], Any], Sequence[Any]] | None = None,
        spread_arms: bool | None = None,
        report_only: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"AutoLR(model): model must be a torch.nn.Module, got {type(model).__name__}"
            )
        if place not in ("device", "host"):
            raise ValueError(f"place must be 'device' or 'host', got {place!r}")
        for name, call in (("before_step", before_step), ("on_restart", on_restart)):
            if call is not None and not callable(call):
                raise TypeError(
                    f"{name} must be a function without arguments, got a {type(call).__name__}: "
                    f"write {name}=lambda: ..."
                )
        if budget is not None:
            within(budget, "budget", "[0, 1)", "it is a part of the run: for 3 % write 0.03")
        self.model, self.before_step, self.scaler, self.place = model, before_step, scaler, place
        self.budget, self.spread_arms, self.on_restart = budget, spread_arms, on_restart
        self.val_batches = val_batches
        self.best_weights = None if val_batches is None else BestWeights(val_batches)
        self._has_restarted = False
        self.total_steps: int | None = None
        self.interval: RateInterval | None = None
        self.cost = 0.0
        self._seconds, self._num_bytes = 0.0, 0  # of this rank: no settings, which ranks compare
        self.done = False
        self.report_only = report_only
        self._repeats, self._given_up = 0, ""
        self._run: Any = None  # a `Searched`, from `attach` on
        self._framework: Any = None
        self._begun: Beginning | None = None
        self._steps: TrialSteps | OwnSteps | None = None
        self.in_place = InPlace()
        """Keeps others from seeing an arm of a trial in the run's place."""

    @property
    def framework(self) -> Any:
        """An `hdet.integrations.common.Adapter`, whose part comes before the user's functions."""
        return self._framework

    @framework.setter
    def framework(self, adapter: Any) -> None:
        """Raises ValueError if arms were to be spread, which its scaler does not allow."""
        if self._run is not None and adapter is not None:
            self._can_spread(self._run, adapter.scaler)
        self._framework = adapter

    @property
    def scaler_in_use(self) -> Any:
        """The user's, or the framework's."""
        return self.scaler or (self.framework and self.framework.scaler)

    @property
    def seconds(self) -> float:
        """Of trials, on this rank."""
        return self._seconds

    @property
    def num_bytes(self) -> int:
        """The most memory that copies took, on this rank."""
        return self._num_bytes

    # -- what an Ensemble asks ---------------------------------------------------------------------

    def start(self, run: Run) -> None:
        """Raises ValueError for a run without a learning rate among its knobs."""
        if not any(knob.rate for knob in run.knobs):
            raise ValueError(
                "AutoLR moves learning rates, and there is no such knob: leave knobs out, or add "
                "hdet.LearningRate()"
            )
        if steps := run.clock.warmup_steps:
            raise ValueError(f"AutoLR searches in the first steps: leave out warmup_steps={steps}")
        self.total_steps = run.total_steps

    def attach(self, run: Searched) -> None:
        """Before the first step. Raises ValueError for a run of which no copies can be trained, and
        if it has searched for another run."""
        if self._run is not None:
            raise ValueError("this AutoLR belongs to another run: make a new one for each")
        if self._budget.allows_trial:
            run.check()
        self._can_spread(run, self.scaler_in_use)
        if self.best_weights is not None:
            self.best_weights.attach(run, self.total_steps, self.place)
        self._run = run

    def _can_spread(self, run: Searched, scaler: Any) -> bool:
        """Raises ValueError where arms cannot be spread, and were to be."""
        can_spread = run.can_spread(scaler)
        if self.spread_arms and not can_spread:
            raise ValueError(
                "spread_arms=True needs gradients that a trial can leave unreduced (pass the model "
                "with its DistributedDataParallel to AutoLR, without find_unused_parameters), no "
                "GradScaler and no SyncBatchNorm: leave spread_arms out"
            )
        return can_spread

    def before_first_step(self) -> None:
        """The weights that are there are the first ones."""
        if not self.done and self._begun is None:
            self._begun = Beginning(self._run, self.place)

    def after_step(self, closure: Closure | None, loss: LoopLoss = None) -> float | None:
        """After each optimizer step, with its rates still in use and its loss. Returns the factor
        of all rates once it is decided: 1 if nothing changes; below 1, the first weights are in
        place again. Raises TypeError where the closure of a trial is missing."""
        if self.best_weights is not None:
            self.best_weights.after_step()
        if self.done or self._begun is None or not self._run.rate:
            return None  # the search begins with the first step that has a rate
        run: Searched = self._run
        trial = Trial(run.rate, (Arm(run.rate),))
        if self._given_up and isinstance(self._steps, TrialSteps):
            run.replicas.meet("a trial that was given up")  # by all ranks, or others would wait
        elif self._steps or not run.find_doubt():
            self._steps = self._steps or self._make_steps(self._begun, closure)
            measured = self._steps.after_step(closure, loss)
            if measured is None:
                return None
            trial, steps = measured, self._steps
            self.cost, self._seconds = self.cost + steps.cost, self._seconds + steps.seconds
            self._num_bytes = max(self._num_bytes, steps.num_bytes)
        given_up = self._given_up or run.find_doubt() or trial.given_up
        factor = self._decide(replace(trial, given_up=given_up))
        self._has_restarted = factor < 1
        if factor < 1:
            run.restore(self._begun.weights)
        self.close()
        return factor

    def _make_steps(self, begun: Beginning, closure: Closure | None) -> TrialSteps | OwnSteps:
        run = self._run
        if closure is None or not self._budget.allows_trial:
            run.replicas.meet("a step without a closure")
            return OwnSteps(run, begun)
        may_spread = self.spread_arms
        if may_spread is None:
            may_spread = self._budget.is_dear or not run.shares_gradients
        is_alone = run.replicas.peer_group is None
        may_spread = may_spread and not is_alone and self._can_spread(run, self.scaler_in_use)
        self.in_place.watch([*run.module.modules(), run.optimizer])
        given = self._prepare_step, self.scaler_in_use, self.place
        is_checked = may_spread and self.spread_arms is None
        communication = Communication(run.replicas) if is_checked else None
        return TrialSteps(Arms(run, begun, self.in_place, *given, communication), may_spread)

    def _prepare_step(self) -> None:
        """Between an arm's backward pass and its step."""
        if self.framework is not None:
            self.framework.prepare_step(self.before_step)
        elif self.before_step is not None:
            self.before_step()

    def _decide(self, trial: Trial) -> float:
        given, measured_at = self.interval or trial, trial.rate
        repeats = trial.needs_repeat and self._repeats < REPEATS
        if trial.needs_repeat and not repeats:
            trial = replace(trial, rate=given.rate, given_up=NOT_THE_RATE)
        interval = trial.interval(self.total_steps or STEPS)
        if self.interval is not None and interval.suggestion == measured_at:
            interval = replace(interval, reason=self.interval.reason)  # of what has moved it here
        groups = sum(peak > 0 for _, peak in self._run.peaks())
        self.interval = replace(interval, rate=given.rate, groups=groups)
        factor = interval.suggestion / measured_at if not self.report_only else 1.0
        self.done = not (repeats and factor < 1)
        self._repeats += not self.done
        return factor

    @property
    def note(self) -> str:
        """What was decided, in a line."""
        assert self.interval is not None
        would = " would go" if self.interval.moves and self.report_only else ""
        line = str(self.interval).splitlines()[0].replace("rate:", f"rate{would}")
        advice = "" if self.on_restart else ": begin averages of weights again (on_restart=)"
        restarts = f"; the run begins again with its first weights{advice}"
        return line + restarts * self._has_restarted

    def give_up(self, why: str) -> None:
        """Let a search that is under way move nothing. A trial ends with the next step."""
        if not self.done and (self._begun is not None or self._repeats):
            self._given_up = why

    def note_restart(self) -> None:
        """The first weights are in place again."""
        if self.framework is not None:
            self.framework.begin_averages()
        if self.on_restart is not None:
            self.on_restart()

    def note_save(self) -> None:
        """Warns if a run that is resumed from here is another one."""
        if self._steps is not None:
            warn(
                "saved during AutoLR's search: a run that is resumed from here searches again, "
                f"from these weights, and is another run; save after its first {STEPS + SCORES} "
                "steps for one that goes on bitwise"
            )

    def close(self) -> None:
        """Copies and hooks go. A search that was under way begins again with the next step."""
        self.in_place.close()
        if self._begun is not None:
            self._begun.close()
        self._steps = self._begun = None
        self._given_up = ""

    def detach(self) -> None:
        """The run has ended. If nothing of it was measured, this is free for another one."""
        has_measured = (
            self._begun or self.interval or (self.best_weights and self.best_weights.steps)
        )
        self.close()
        if not has_measured:
            self._run, self.framework, self.done = None, None, False

    @property
    def _budget(self) -> Budget:
        return Budget(self.budget, self.total_steps)

    @property
    def idle(self) -> bool:
        """Is it over, or the run too short for the trial that was not forbidden?"""
        return self.done or self._budget.is_too_small

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
        """What is going to happen, or what was measured: some short lines."""
        if self.interval is not None:
            lines = [str(self.interval)]
            if self.cost:
                measured = f", {self.seconds:.1f} s, {self.num_bytes / 1e6:.1f} MB of copies"
                spent = self._budget.cost(self.cost)
                lines.append(f"cost: {spent}{measured if self.seconds else ''}")
            elif not (self.interval.trial.first_losses or self.interval.trial.given_up):
                lines += self._budget.why_no_trial()
        elif self.done:
            lines = ["no search: the run was resumed after its first steps",
                     "a move made before is in ensemble.state_dict(): load it"]  # fmt: skip
        else:
            lines = [self._budget.plan()]
        if self.best_weights is not None and self.best_weights.step:
            lines.append(str(self.best_weights))
        return "\n".join(lines) + " (reported only: nothing is moved)" * self.report_only

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Copies of a trial under way are not in it: it begins again after loading."""
        interval = None if self.interval is None else self.interval.to_dict()
        return {
            "done": self.done, "cost": self.cost, "repeats": self._repeats, "interval": interval,
            "best": None if self.best_weights is None else self.best_weights.state(),
        }  # fmt: skip

    def check_state(self, state: Any) -> dict[str, Any]:
        checks = {"done": FLAG, "cost": number(0), "repeats": COUNT, "interval": optional(MAPPING),
                  "best": optional(list_of(number(), 3))}  # fmt: skip
        checked = read(state, checks, "the AutoLR's state")
        if checked["interval"] is not None:
            try:
                checked["interval"] = interval = RateInterval.from_dict(checked["interval"])
                # All that is done with it later fails here if it is damaged.
                str(interval), interval.to_dict(), interval.trial.interval(interval.total_steps)
            except Exception as error:
                raise ValueError(
                    f"AutoLR's state has a damaged trial ({type(error).__name__}: {error})"
                ) from error
        return checked

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checked = self.check_state(state)
        self.done, self.cost, self.interval = checked["done"], checked["cost"], checked["interval"]
        self._repeats = checked["repeats"]
        if self.best_weights is not None and checked["best"] is not None:
            self.best_weights.load_state(checked["best"])
        if not self.done and self._run is not None:
            warn(
                "AutoLR: the checkpoint was saved during the search, which begins again with the "
                "weights that were loaded"
            )
