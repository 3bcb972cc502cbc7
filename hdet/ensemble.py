"""The engine on real tensors: fan out, observe, converge, control (docs/method.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from .converge.sync import Sync
from .core.controller import Controller
from .core.divergence import Divergence
from .core.plan import Decision
from .core.schema import MAPPING, loaded, optional, read
from .core.validate import warn
from .knobs import Knob
from .logging import CycleRecord
from .optim.snapshot import in_train_mode, is_schedule_free
from .replicas import Replicas
from .run.cycles import Cycles, ReplicasDiverged
from .run.fan_out import FanOut
from .run.faults import Guard
from .run.history import Records
from .run.mistakes import (
    refuse_backward,
    refuse_eval_mode,
    warn_of_less_control,
    warn_of_lost_state,
    warn_of_unknown_period,
)
from .run.prepare import prepare
from .run.same_run import Agreement
from .run.setup import Setup
from .schedule import Scheduler
from .trial.auto import AutoLR
from .trial.searched import Closure, Searched
from .trial.steps import LoopLoss

__all__ = ["Ensemble", "ReplicasDiverged"]


class Ensemble:
    """Lets a search and a controller correct the schedule while a model trains: call
    ``ensemble.step(loss)`` where ``scheduler.step()`` was, after ``optimizer.step()``. Each process
    holds one replica of N, or all of them (`CoresidentReplicas`).

    Args:
        optimizer: any torch optimizer with all its groups; its parameters are averaged.
            Co-resident replicas need one of hdet's fused ones.
        scheduler: a torch scheduler of this optimizer, which the Ensemble steps and nobody else.
            None: constant values, or a schedule that you step yourself inside `rescheduling`.
        knobs: what to explore, of `hdet.knobs`; default ``[LearningRate(spread=1/9)]``.
        search: an `AutoLR`, which finds the learning rate in the first steps. Replicas train alike
            until it is over, and without a controller for good.
        controller: decides where a cycle ends, once a search is over: None, `ProbeController`, or
            any `hdet.Controller` (docs/choosing.md).
        replicas: who takes part: `Replicas`, or `CoresidentReplicas`. Default: each rank is a
            replica, but under plain FSDP2 (a mesh of one dimension) all of them are one.
        sync: when and how replicas are averaged: `Sync`.
        divergence: when a replica is left out of an average, or a cycle rolled back: `Divergence`.
        design: ``"permutation"``, each knob's grid of multipliers by itself, as published; or
            ``"orthogonal"``, two levels, which tells the effects of several knobs apart best.
            Default: orthogonal for 2 to N - 1 knobs where N is a power of two.
        warmup_steps: S_warm, steps before the controller may act; with a search leave it out.
        total_steps: length of the run; default the scheduler's ``total_steps`` if it has one.
        seed: key of the assignments of multipliers; must be equal on all ranks.
        log: called as ``log(record, step)`` once per cycle, with a `hdet.logging.CycleRecord`; give
            it on the rank that writes.

    Keep it for as long as the run lasts: one that is dropped is closed. Between steps param_groups,
    and whatever else a knob moves, hold base values, the same on all ranks. Only the first step,
    the end of a cycle and a trial communicate.
    Replicas that cannot differ and are bitwise equal are not touched, but by an outer step: spread
    0 is bitwise data-parallel training.

    Example::

        ensemble = hdet.Ensemble(
            optimizer, scheduler, total_steps=2000, search=hdet.AutoLR(model)
        )
        for batch in loader:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(loss)  # in the place of scheduler.step()
    """

    _attached = ExitStack()
    """Undoes what was attached to optimizer, model and search."""

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        *,
        knobs: Sequence[Knob] | None = None,
        search: AutoLR | None = None,
        controller: Controller | None = None,
        replicas: Replicas | None = None,
        sync: Sync | None = None,
        divergence: Divergence | None = None,
        design: str | None = None,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        seed: int = 0,
        log: Callable[[CycleRecord, int], object] | None = None,
    ) -> None:
        given: dict[str, Any] = {"replicas": replicas, "sync": sync, "divergence": divergence}
        run = prepare(
            Setup(
                optimizer, scheduler, knobs, search, controller, design=design,
                warmup_steps=warmup_steps, total_steps=total_steps, seed=seed, log=log, **given,
            )
        )  # fmt: skip
        self.optimizer, self.search, self.controller = optimizer, search, controller
        self.parameters, self.replicas, self.run = run.tensors, run.replicas, run.facts
        self.sync, self.divergence, self.knobs = run.sync, run.divergence, run.engine.knobs
        self._schedule, self._engine = run.schedule, run.engine
        self._has_modes, self._lost_state = is_schedule_free(optimizer), run.schedule.doubt
        self._guard, self._fan_out = Guard(run.replicas, run.engine), FanOut(run)
        self._agreement, self._records = Agreement(run), Records(run)
        with ExitStack() as attached:  # what is refused in here has changed nothing
            self._cycles = Cycles(run, self._fan_out, self._agreement, self._guard, attached)
            self.averager = self._cycles.parameters.average
            attached.callback(run.replicas.detach)
            run.replicas.attach(optimizer)
            attached.callback(self._fan_out.close)
            self._fan_out.attach(self._cycles.begin_steps)
            self._cycles.begin()
            if search is not None:
                search.attach(Searched(
                    search.model, optimizer, run.replicas, run.schedule.peak_rates,
                    not run.is_local or bool(run.sync.begin), self._fan_out.aside,
                    run.sync.refresh is not None, run.schedule.find_doubt,
                ))  # fmt: skip
                search.done = search.done or not run.engine.is_searching
                attached.callback(search.detach)
            self._attached = attached.pop_all()

    # -- the loop ----------------------------------------------------------------------------------

    def observe(
        self,
        loss: torch.Tensor | float,
        weight: torch.Tensor | float = 1.0,
        replica: int | None = None,
    ) -> None:
        """Add a loss of this replica to the running cycle. Never waits for the device. Raises
        ValueError for what is no scalar, and for a negative weight.

        Args:
            loss: of a micro-batch, a scalar.
            weight: of it, such as its tokens, >= 0.
            replica: whose it is; None: this process's, or that of the co-resident one in ``use``.
        """
        self._cycles.losses[self.replicas.slot(replica)].add(loss, weight)

    def step(
        self, loss: torch.Tensor | float | None = None, closure: Closure | None = None
    ) -> None:
        """After ``optimizer.step()``: step the scheduler and count; at the end of a cycle average
        the replicas and let the controller act.

        Several calls for one optimizer step advance the schedule, as in torch, but count one step;
        a call without an optimizer step counts none. With local gradients each call counts, also
        where a GradScaler skips the step of one replica: all must count alike.

        Args:
            loss: as for `observe`.
            closure: computes the current batch's losses again, with a graph, for the trial of an
                `AutoLR`.

        Raises:
            ReplicasDiverged: no replica has finite parameters, and there is no snapshot.
            ReplicaLost: a collective failed or timed out; afterwards every call is refused.
            ReplicaDisagreement: ranks differ in their settings, values or calls.
            RuntimeError: a schedule-free optimizer is in eval mode.
            TypeError: no closure in a step of a trial.
            ValueError: somebody else has written a value (see `rescheduling` and `set_value`).
        """
        cycles, schedule = self._cycles, self._schedule
        if (
            self.replicas.in_use
            or self._fan_out.explored is not None
            or self.search is not None
            or getattr(cycles.optimizer, "is_averaged", False)
        ):
            cycles.check_at_rest("step")
        if self._guard.lost is not None:
            self._guard.check_whole()
        if self._has_modes:
            refuse_eval_mode(self.optimizer)
        schedule.check_unwritten()
        if loss is not None:
            cycles.losses[self.replicas.slot(None)].add(loss)
        if not self._agreement.reached:
            self._agree()
        stepped, ends = self._fan_out.take_stepped(), False
        if stepped and not self._agreement.knows_gradients:
            with self._guard("agreement"):
                self._agreement.check_gradients(self._fan_out.gradient_norm)
            self._agreement.knows_gradients = True
        try:
            if stepped and self.search is not None:
                self._search_rate(self.search, closure, loss)
            is_over = schedule.advance()
            if stepped:
                ends = self._engine.tick()
                if cycles.has_samples:
                    cycles.measurements.sample()
            ends = ends or (is_over and self._engine.position > 0)
            if ends:
                record = cycles.end()
        finally:  # also when the schedule is past its end: at rest there is the base value
            if not schedule.is_neutral:
                schedule.write()
        if ends:
            self._records.add(record)

    def _agree(self) -> None:
        """Before anything of the run is averaged, and again after a load."""
        with self._guard("agreement"):
            self._agreement.check()
        self._cycles.parameters.moments.check()
        warn_of_unknown_period(self._engine)
        if self._lost_state:  # unless the Ensemble's state was loaded meanwhile
            warn_of_lost_state(self._lost_state)
            self._lost_state = ""
        self._records.tell_report()  # not earlier: the state and `tell` may change

    def _search_rate(self, search: AutoLR, closure: Closure | None, loss: LoopLoss) -> None:
        """One step of the search, and what it decides."""
        if closure is not None and not search.done:
            refuse_backward(loss)
        with self._guard("trial"):
            factor = search.after_step(closure, loss)
        if factor is None:
            return
        assert search.interval is not None
        spent = search.cost, 1e3 * search.seconds
        self._cycles.trial = search.interval.to_dict(), *spent
        notes: list[str] = []
        if factor != 1:
            for knob in self._schedule.knobs:
                if knob.key == "lr":
                    notes += knob.move(Decision(factor=factor))
            self._schedule.write()
        if factor < 1:  # the first weights are in place again
            self._cycles.note_restore()
            search.note_restart()
        self._cycles.notes += [*notes, search.note]
        self._records.tell_note(search.note)

    def converge(self) -> None:
        """Average the replicas now, e.g. before saving or evaluating; every rank must call it.
        Always exact, whatever `Sync.converge` is. The cycle goes on, its loss meters restart."""
        self._cycles.check_at_rest("converge")
        self._guard.check_whole()
        if not self._agreement.reached:
            self._agree()
        with in_train_mode(self.optimizer):
            self._cycles.converge()

    @contextmanager
    def explore(self) -> Iterator[None]:
        """Around forward, backward and clipping: inside, knobs that do not act in
        ``optimizer.step()`` (dropout, smoothing, temperatures) have this replica's values. Outside,
        also after an error, base values: evaluate and save there. Of co-resident replicas one must
        be in ``use``."""
        if len(self.replicas.local) > 1 and not self.replicas.in_use:
            raise ValueError(
                "which replica explores? Call explore() inside `with replicas.use(k):`"
            )
        self._schedule.check_unwritten()
        with self._fan_out.exploring(self.replicas.slot(None), lambda knob: True):
            self._cycles.has_explored = True
            yield

    def rescheduling(self) -> AbstractContextManager[None]:
        """Around a schedule that you step yourself (timm's, ReduceLROnPlateau, a formula in the
        loop): inside, knobs have the schedule's own values, without corrections. What stands there
        at the end becomes the schedule's next values. Build such a scheduler before, or inside.
        Raises ValueError inside itself, or where somebody has written a value outside."""
        self._cycles.check_no_arm("rescheduling")
        return self._schedule.rescheduling()

    def set_value(self, name: str, value: float) -> None:
        """Set the base value of the knob ``name``, on all ranks alike: its schedule goes on from
        here, corrected so that it is ``value`` now. Of several groups ``value`` is the first
        one's, and the others move with it. Of a learning rate it ends a search that is under way,
        which would move this value again; before the first step it is what the search begins with.

        Example::

            ensemble.set_value("lr", 0.5 * ensemble.value("lr"))

        Raises:
            ValueError: there is no such knob; inside `explore` or `rescheduling`; or no correction
                leads from the schedule's value to this one, because one of them is 0.
        """
        self._cycles.check_at_rest("set_value")
        knob = self._schedule.named(name)
        knob.set(float(value))
        self._schedule.write()
        if self.search is not None and knob.spec.rate:
            self.search.give_up("set_value() has set the rate")

    def guard(self, phase: str = "training step") -> AbstractContextManager[None]:
        """Around a training loop: a collective of the loop's own that fails (DDP's, in a backward
        pass) becomes a `ReplicaLost` too. ``phase``: what is under way, for its message."""
        return self._guard(phase)

    def check_at_rest(self, name: str) -> None:
        """Raises ValueError inside `explore`, `rescheduling` or ``replicas.use``, and for a closure
        that a trial calls. ``name``: of what is refused there."""
        self._cycles.check_at_rest(name, takes_averages=True)  # which may be exported

    def forget_losses(self) -> None:
        """The losses of the running cycle do not count."""
        self._cycles.reset_losses()

    # -- in a framework ----------------------------------------------------------------------------

    def simulate(self, schedulers: Sequence[tuple[Any, int]]) -> None:
        """Let search and controller know what a framework steps inside `rescheduling`. Of what
        cannot be simulated they say so, and move nothing.

        Args:
            schedulers: each with the number of optimizer steps from one of its steps to the next.
        """
        try:
            self._schedule.simulate(self.optimizer, schedulers)
        except ValueError as error:
            self._schedule.doubt = str(error)
        if self.has_begun:
            return
        self._engine.note_schedule()
        if any(knob.grid.values for knob in self.knobs):
            self._engine.restart()  # they are tried as multiples of the peak
            self._cycles.begin()

    def report_to(
        self, tell: Callable[[str], object], log: Callable[[CycleRecord, int], object] | None = None
    ) -> Callable[[CycleRecord, int], object] | None:
        """Let lines of text go to ``tell``, and records to ``log`` if it is given. Returns where
        records went before."""
        before, self._records.tell = self._records.log, tell
        self._records.log = before if log is None else log
        return before

    # -- what is known -----------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        """Cycles completed."""
        return self._engine.cycle

    @property
    def steps_done(self) -> int:
        """Optimizer steps counted since the beginning of the run."""
        return self._engine.step

    @property
    def has_begun(self) -> bool:
        """Was a step of the running cycle taken?"""
        return self._cycles.has_begun

    @property
    def history(self) -> list[CycleRecord]:
        """The records of this process's last 1000 cycles, as ``log`` gets them, with an empty
        ``record``."""
        return list(self._records.history)

    @property
    def in_sync(self) -> bool:
        """Are the replicas' parameters and averaged buffers known to be equal now, and is nothing
        kept back for the next average? Does not compare them."""
        return self._cycles.in_sync

    def value(self, name: str) -> float:
        """The value of the knob ``name`` now: a replica's inside `explore`, else the base value.
        Raises ValueError where there is no such knob."""
        self._schedule.check_unwritten()
        return self._schedule.named(name).value()

    def values(self) -> dict[str, float]:
        """Corrected base value by knob: what param_groups hold at rest."""
        self._schedule.check_unwritten()
        return self._schedule.by_knob(self._schedule.base_values())

    @property
    def corrections(self) -> dict[str, float]:
        return self._schedule.by_knob(self._schedule.corrections())

    @property
    def multipliers(self) -> dict[str, float]:
        """rho of this replica in the running cycle, by knob."""
        slot = self.replicas.local.index(self.replicas.index)
        return self._schedule.by_knob(self._fan_out.multipliers[slot])

    def report(self) -> str:
        """What search and controller are going to do, or have measured: some short lines."""
        return self._records.report()

    def mean(self) -> list[torch.Tensor] | None:
        """The mean of the replicas' `parameters` at this very step, not to be written to, where
        this rank has it: converged, or with ``converge=ExactLocal()``; else None."""
        return list(self.parameters) if self.in_sync else self.averager.mean()

    # -- checkpoint --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        raise TypeError(
            "an Ensemble cannot be copied: copy the model and the optimizer, make another Ensemble "
            "of the copies, and give it ensemble.state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data; no communication; the same on every rank; loads with another N. Without the
        losses of the running cycle. Warns where replicas are not `in_sync`."""
        self._guard.check_whole()
        self._cycles.check_at_rest("state_dict")
        self._schedule.check_unwritten()
        if self._cycles.can_differ and self._cycles.has_begun and not self.in_sync:
            warn(
                "saving in the middle of a cycle: this replica's parameters are not the average; "
                "call converge() on all ranks first"
            )
        search = self.search
        if search is not None:
            search.note_save()
        own = {"search": None if search is None else search.state_dict()}
        return {**self._engine.state_dict(), **self._schedule.state_dict(), **own}

    def check_state(self, state: Any) -> None:
        """Raise ValueError for a state that `load_state_dict` refuses; change nothing."""
        self._cycles.check_at_rest("load_state_dict")
        self._schedule.check_state(state)
        self._engine.check_state(state)
        self._check_search(state)

    def _check_search(self, state: Any) -> Any:
        """The search's part of a state, checked. A run without a search takes the state of any."""
        [given] = read(state, {"search": optional(MAPPING)}, "the ensemble's state").values()
        if self.search is None:
            return None
        if given is None:
            raise ValueError(
                "the ensemble's state was saved without a search, this run has one: construct it "
                "without search, which keeps the corrections"
            )
        self.search.check_state(given)
        return given

    @property
    def shares_moments(self) -> bool:
        """Do all replicas have one state of the optimizer after `converge`, wherever in a cycle?"""
        return self.sync.gradients != "local" and self.sync.moments != "reset"

    def shares_moments_after(self, state: Any) -> bool:
        """The same, of the run once this state is loaded. Raises ValueError for a state that does
        not say."""
        return self.shares_moments or not self._engine.may_differ_after(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run, on all ranks alike. Load parameters, buffers and optimizer too, in any
        order; N may differ. Without a search or a controller the state of any is taken, and
        warned of: its corrections stay in use.

        Raises:
            ValueError: another version, missing or damaged values, other knobs, another controller
                or scheduler, or a search where none was saved; nothing is changed then.
        """
        with self.taken_over(state):
            pass

    @contextmanager
    def taken_over(self, state: Mapping[str, Any]) -> Iterator[None]:
        """`load_state_dict`, unless what is done inside raises: nothing is changed then."""
        self._cycles.check_at_rest("load_state_dict")
        searched = self._check_search(state)
        with (  # the search last, which warns of what it loads
            self._schedule.taken_over(state),
            self._engine.taken_over(state),
            loaded(self.search, searched),
        ):
            yield
        if self.search is not None:
            self.search.close()
        self._schedule.write()
        self._lost_state = self._schedule.doubt = ""
        self._agreement.reset()
        self._fan_out.note_load()
        self._cycles.note_load()
        warn_of_less_control(self._engine, state)

    def close(self) -> None:
        """Take the multiplier off the optimizer for good. Parameters stay as they are: converge()
        first. A second call does nothing."""
        self._cycles.check_no_arm("close")
        self._attached.close()

    def __del__(self) -> None:
        # No weakref.finalize: it would hold what leads back here, such as a `log` of the user's.
        if not sys.is_finalizing():
            self._attached.close()
