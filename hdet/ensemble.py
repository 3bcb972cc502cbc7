"""The engine on real tensors: fan out, observe, converge, control (docs/method.md)."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .core.clock import Clock
from .core.controller import Controller
from .core.divergence import Divergence, Verdict
from .core.engine import CycleOutcome, Engine, KnobSpec
from .core.evidence import Run
from .knobs import Bound, GroupKnob, Knob, LearningRate, bind_all, check_disjoint
from .measure.measurement import Watched
from .policies import Sync
from .profiling import ranged
from .replicas import Replicas
from .replicas.refusals import check_sharding
from .run.compatibility import averaged_tensors, check_arguments, check_controller, check_knobs, check_several, design_of
from .run.cycle_stats import CycleStats, gather_stats, masters_of, verdict_on
from .run.fan_out import FanOut
from .run.faults import Guard
from .run.history import cycle_record
from .run.measurements import Panel
from .run.replica_parameters import ReplicaWeights, check_tied
from .run.same_run import Agreement, check_gradients
from .schedule import Schedule, Scheduler
from .trial.arms import Closure, Searched

__all__ = ["Ensemble", "ReplicasDiverged"]


Measured = Mapping[str, list[list[float]]]
_LOG = logging.getLogger("hdet")


class ReplicasDiverged(RuntimeError):
    """No replica has finite parameters, so there is nothing to average. Raised on every rank alike."""


class Ensemble:
    """Drives the replicas: call ``ensemble.step(loss)`` where ``scheduler.step()`` was, after ``optimizer.step()``.

    Each process holds one of N, or one process all of them (`CoresidentReplicas`): then every replica's loss is observed inside
    its ``with replicas.use(k)``, and ``ensemble.step()`` follows the one optimizer step.

    Args:
        optimizer: any torch optimizer with all its groups; its parameters are averaged. Co-resident replicas need one of hdet's fused ones.
        scheduler: a torch scheduler of this optimizer, which the Ensemble steps and nobody else. None: constant values, or a schedule that you
            step yourself inside `rescheduling`.
        knobs: what to explore, of `hdet.knobs`; default ``[LearningRate(spread=1/9)]`` (docs/knobs.md).
        design: how multipliers are assigned to replicas: ``"permutation"``, each knob's grid by itself, as published; or ``"orthogonal"``,
            two levels for all knobs together, which tells their effects apart best. Default: orthogonal for 2 to N - 1 knobs.
        replicas: who takes part; default the world if torch.distributed is initialised, else a single replica; or a `CoresidentReplicas`.
            Parameters sharded over a mesh of one dimension that is the world (plain FSDP2): by default all ranks are one replica.
        warmup_steps: S_warm, steps before the controller may act; spread and averages run from the start.
        controller: None, `AutoLR`, `ProbeController`, or any `hdet.Controller` (docs/choosing.md).
        sync: when and how replicas are averaged: `Sync`.
        seed: key of the assignments of multipliers; must be equal on all ranks.
        log: called as ``log(record, step)`` once per cycle, with plain data; give it on the rank that writes.
        total_steps: length of the run; default the scheduler's ``total_steps`` if it has one. The last step ends a cycle.
        divergence: when a replica is left out of an average, or a cycle taken back: `Divergence`.

    Guarantees: between steps param_groups, and whatever else a knob moves, hold base values, the same on all ranks. A value that somebody else
    writes there is refused before it is used (`rescheduling`, `set_value`). Only the end of a cycle communicates (one collective of a few numbers per
    replica, then the average) and waits for the device; some kinds of `Sync.converge` communicate earlier. Replicas that cannot differ
    and are bitwise equal are not touched: spread 0 is data-parallel training bit for bit. A collective that fails raises `ReplicaLost`
    on every rank that is left; after it this object refuses to go on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        *,
        knobs: Sequence[Knob] | None = None,
        controller: Controller | None = None,
        replicas: Replicas | None = None,
        sync: Sync | None = None,
        divergence: Divergence | None = None,
        design: str | None = None,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        seed: int = 0,
        log: Callable[[dict[str, Any], int], object] | None = None,
    ) -> None:
        # Everything is validated before the optimizer is touched.
        knobs = [LearningRate()] if knobs is None else knobs
        sync = Sync() if sync is None else sync
        divergence = Divergence() if divergence is None else divergence
        check_arguments(
            optimizer, scheduler=scheduler, knobs=knobs, replicas=replicas, controller=controller, sync=sync, divergence=divergence,
            seed=seed, log=log,
        )  # fmt: skip
        self.optimizer, self.sync, self.divergence, self.log = optimizer, sync, divergence, log
        self.parameters = averaged_tensors(optimizer, sync.buffers)
        check_tied(sync.tied, self.parameters)
        replicas = Replicas.of_shards(self.parameters) if replicas is None else replicas
        check_sharding(
            optimizer, self.parameters, replicas, sync.gradients, decides=controller is not None or divergence.rollback is not None
        )
        self.replicas = Replicas.default() if replicas is None else replicas
        self.knobs: list[Bound] = bind_all(knobs, optimizer)
        check_several(self.replicas, self.knobs, controller)
        design = design_of(design, self.knobs, self.replicas)
        check_knobs(self.knobs, optimizer, self.replicas, controller, design=design, sync=sync)
        self.schedule = Schedule(scheduler, self.knobs, total_steps)
        specs = [KnobSpec(knob.name, knob.spread, knob.scale, rate=knob.key == "lr") for knob in self.knobs]
        clock = Clock(sync.every, warmup_steps, self.schedule.total_steps)
        self.engine = Engine(specs, self.replicas.count, clock, controller, seed, design)
        self.engine.step = max(0, int(self.schedule.step or 0))
        self.run = Run(
            clock, specs, self.replicas.count, self.schedule.floors(), local=sync.gradients == "local",
        )  # fmt: skip
        check_controller(controller, self.run)
        check_disjoint(self.knobs, tensors=controller is not None or self.engine.explores)
        if controller is not None and self.engine.step:
            self.engine.restart()
        self.during = Guard(self.replicas, lambda: (self.engine.cycle, self.engine.step))
        self._panel = Panel(self.engine, self.during)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        sets = self.replicas.sets(trained)
        masters = [masters_of(optimizer, trained, place) for place in range(len(sets))]
        self._search = None if controller is None else controller.search
        searched = [] if self._search is None else [self._search.model]
        models = [*self._panel.modules, *searched, *([sync.buffers] if isinstance(sync.buffers, nn.Module) else [])]
        self._panel.watch(
            Watched(
                optimizer, sets, masters, self.knobs, clock, self.replicas, lambda: self._fan_out.multipliers,
            )
        )  # fmt: skip
        if self._search is not None:
            self._search.attach(self._searched_run(trained, masters[0]))
            self._search.done = self._search.done or self.engine.step > 0  # the run's first steps are over
        # Last, because some ways of averaging give the optimizer a second set of parameters.
        self.weights = ReplicaWeights(self.parameters, optimizer, self.replicas, sync, divergence, models)

        settings = {
            "the number of replicas": self.replicas.count, "bucket_bytes": sync.bucket_bytes, "weights": sync.weights,
            "gradients": sync.gradients, "moments": sync.moments, "converge": sync.converge, "divergence": divergence, "design": design,
        }  # fmt: skip
        self._agreement = Agreement(self.engine, self.parameters, optimizer, self.schedule, self.replicas, models, settings)
        self._compared = any(knob.on_gradients for knob in self.knobs)  # is the kind of gradients known? These knobs change them.
        self._explored = False  # in this cycle
        self._lockstep = self.replicas.count == 1  # replicas are known to be equal, and stay so in this cycle
        self._marks = self.parameters.marks()  # of the buffers when they were averaged
        self._notes: list[str] = []
        self._trial: Mapping[str, Any] | None = None
        """What an `AutoLR` has measured, until the next record."""
        self.tell: Callable[[str], object] = _LOG.info
        """Takes what is worth a line in a log: notes of cycles, and what the controller reports. A framework's log may stand here."""
        self._told = ""
        self.history: dict[str, Any] | None = None
        """The last cycle's record, as `log` gets it (`hdet.run.history.cycle_record`). None before the first."""
        first, local = self.replicas.local[0], sync.gradients == "local"
        self._fan_out = FanOut(optimizer, self.schedule, first, self._on_cycle_start, skippable=local)
        self.replicas.attach(optimizer)
        self._begin_cycle()

    # -- the loop --------------------------------------------------------------------------------------------------------

    def observe(self, loss: torch.Tensor | float, weight: torch.Tensor | float = 1.0, replica: int | None = None) -> None:
        """Add a loss of this replica to the running cycle (per micro-batch, with its weight, e.g. its tokens). Never synchronises.

        Among co-resident replicas it is the one in ``use``, or ``replica``.

        Raises:
            ValueError: not a scalar, or a negative weight; or nothing says which replica's it is.
        """
        self.weights.local[self.replicas.place(replica)].loss_meter.add(loss, weight)

    def step(self, loss: torch.Tensor | float | None = None, closure: Closure | None = None) -> None:
        """After optimizer.step(): step the scheduler and count; at the end of a cycle average the replicas and let the controller act.

        ``closure``: computes the current batch's losses again, with a graph, for the trial of an `AutoLR`.

        Several calls for one optimizer step (accelerate steps a prepared scheduler once per process) advance the schedule, as in torch, but
        count one step of the cycle; a call without an optimizer step counts none. The end of the schedule always ends the last cycle.
        With local gradients each call counts, also where a GradScaler skips the step of one replica: all must count alike.

        Raises:
            ReplicasDiverged: at the end of a cycle no replica has finite parameters, and there is no snapshot to go back to.
            ReplicaLost: a collective failed or timed out.
            ValueError: somebody else has written a value (see `rescheduling` and `set_value`).
        """
        self._check_outside_use("step", "call it once per optimizer step, after all of them")
        self.during.check_whole()
        if closure is not None and not callable(closure):
            raise TypeError(
                f"closure must be a function, got {type(closure).__name__}: it computes the losses of the batch again, such as "
                "closure=lambda: losses_of(model, batch)"
            )
        self.schedule.check_unwritten()
        if loss is not None:
            self.observe(loss)
        self._agree()
        stepped = self._fan_out.take_stepped()
        if stepped and not self._compared:
            with self.during("agreement"):
                check_gradients(self.replicas, self._fan_out.gradient_norm, self.sync.gradients, self.weights.device)
            self._compared = True
        ends = False
        try:
            if stepped and self._search is not None:
                self._search_rate(closure)
            self.schedule.advance()
            if stepped:
                ends = self.engine.tick()
                self._panel.sample()
            ends = ends or (self.schedule.is_over and self.engine.position > 0)
            if ends:
                self._end_cycle()
            elif (
                stepped and (self._replicas_part or not self.weights.average.idle) and self.weights.average.acts_after(self.engine.position)
            ):
                with self.during("average"):
                    self._notes += self.weights.after_step(self.engine.position)
        finally:  # also when the schedule is past its end, or the user's loss raises: at rest there is the base value
            if not self.schedule.is_neutral:
                self.schedule.write(self.engine)
        if ends and self.history is not None:
            for note in self.history["notes"]:
                self.tell(f"hdet, step {self.engine.step}: {note}")
            self._tell_report()
            if self.log is not None:
                self.log(self.history, self.engine.step)  # may write values, too

    def _search_rate(self, closure: Closure | None) -> None:
        """One step of an `AutoLR`, and what it has decided."""
        assert self._search is not None
        with self.during("trial"):
            move = self._search.after_step(closure)
        if move is None:
            return
        if move.factor != 1:
            for k, (knob, peaks) in enumerate(zip(self.knobs, self.schedule.peaks(), strict=True)):
                if knob.key == "lr":
                    self._notes += self.engine.multiply(k, move.factor, peaks[0])
            self.schedule.write(self.engine)
        if move.restored:
            with self.during("average"):
                self.weights.took_back()
            self._mark_in_sync()
            self.engine.level = None
            self._panel.restart()
            self.reset_loss_meters()
        self._trial = move.trial
        self._notes.append(move.note)

    def converge(self) -> None:
        """Average the replicas now, e.g. before saving or evaluating; every rank must call it. The cycle goes on, its loss meters restart.

        Always exact, whatever `Sync.converge` is: an average under way is completed. A replica that is left out because its parameters are
        not finite is noted in the next record and warned of.
        """
        self._check_outside_use("converge", "it is of all replicas, call it after")
        self.schedule.check_at_rest()
        self.during.check_whole()
        self._agree()
        if self.replicas.count == 1:
            self.reset_loss_meters()
            return
        stats = self._gather(None, compare=True)
        finite = [r for r, stat in enumerate(stats) if stat.finite]
        if not finite:
            raise self._all_diverged("no replica has finite parameters left")
        # Equal replicas are left alone: N times x / N is not always x in floating point, and spread 0 is to be DDP bit for bit.
        if not (
            self.weights.average.idle and not self.weights.moments.are_averaged and len({(stat.digest, stat.marks) for stat in stats}) == 1
        ):
            with self.during("average"):
                self.weights.complete(finite, [stat.loss for stat in stats])
        self._mark_in_sync()
        for r, stat in enumerate(stats):
            if not stat.finite:
                note = f"replica {r} left out of the average: parameters not finite"
                warnings.warn(f"converge: {note}", stacklevel=2)
                self._notes.append(note)
        self.reset_loss_meters()

    @property
    def in_sync(self) -> bool:
        """Are the replicas' parameters and averaged buffers known to be equal now, with no average under way? Does not compare them."""
        return self._lockstep or (not self._fan_out.moved and self.weights.average.idle and self.parameters.unwritten(self._marks))

    @contextmanager
    def explore(self) -> Iterator[None]:
        """Around forward, backward and clipping: inside, dropout, smoothing, temperatures and the like have this replica's values (of
        co-resident replicas, that of the one in ``use``). Outside, also after an error, base values: evaluate and save there.

        Knobs that act inside ``optimizer.step()`` (rates, decay, betas, eps) do not need it.

        Raises:
            ValueError: co-resident replicas, none of which is in ``use``; or inside the ``explore()`` of another one.
        """
        if len(self.replicas.local) > 1 and not self.replicas.in_use:
            raise ValueError("which replica explores? Call explore() inside `with replicas.use(k):`")
        self.schedule.check_unwritten()
        with self._fan_out.exploring(self.replicas.place(None), lambda knob: True):
            self._explored = True
            yield

    @contextmanager
    def rescheduling(self) -> Iterator[None]:
        """Around a schedule that you step yourself (timm's, ReduceLROnPlateau, a formula in the loop): inside, param_groups and what else a knob
        moves hold the schedule's own values, without corrections. What stands there at the end becomes the schedule's next values. Build such a
        scheduler before the Ensemble, or inside.

        Raises:
            ValueError: inside itself; or somebody has written a value outside.
        """
        self._check_no_arm("rescheduling")
        with self.schedule.rescheduling(self.engine):
            yield

    def value(self, name: str) -> float:
        """The value of the knob ``name`` now: a replica's inside `explore`, else the base value.

        Raises:
            ValueError: there is no such knob.
        """
        self.schedule.check_unwritten()
        for knob in self.knobs:
            if knob.name == name:
                return knob.value()
        raise ValueError(f"there is no knob {name!r}, only {[knob.name for knob in self.knobs]}")

    def set_value(self, name: str, value: float) -> None:
        """Set the base value of the knob ``name``, on all ranks alike: its schedule goes on from here, corrected so that it is ``value`` now. Where a
        knob moves several groups, ``value`` is the first one's, and the others move with it.

        Example::

            ensemble.set_value("lr", 0.5 * ensemble.value("lr"))

        Raises:
            ValueError: there is no such knob; inside `explore` or `rescheduling`; or no correction leads from the schedule's value to this one
                (0, or a rate where the schedule is at 0 now).
        """
        self._check_not_exploring("set_value")
        self.schedule.check_at_rest()
        names = [knob.name for knob in self.knobs]
        if name not in names:
            raise ValueError(f"there is no knob {name!r}, only {names}")
        k = names.index(name)
        self.engine.set_value(k, float(value), self.knobs[k].uncorrected_value())
        self.schedule.write(self.engine)

    def guard(self) -> AbstractContextManager[None]:
        """Around a training loop: a collective of the loop's own that fails (DDP's, in a backward pass) becomes a `ReplicaLost` too."""
        return self.during("training step")

    # -- what is known ---------------------------------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        """Cycles completed."""
        return self.engine.cycle

    @property
    def corrections(self) -> dict[str, float]:
        return {knob.name: c for knob, c in zip(self.knobs, self.engine.corrections, strict=True)}

    @property
    def multipliers(self) -> dict[str, float]:
        """rho of this replica (of co-resident ones the one in ``use``) in the running cycle, by knob."""
        own = self._fan_out.multipliers[self.replicas.local.index(self.replicas.index)]
        return {knob.name: rho for knob, rho in zip(self.knobs, own, strict=True)}

    def values(self) -> dict[str, float]:
        """Corrected base value by knob: what param_groups hold at rest."""
        self.schedule.check_unwritten()
        return {knob.name: value for knob, value in zip(self.knobs, self.schedule.base_values(), strict=True)}

    def report(self) -> str:
        """What the controller is going to do, or has found, in a sentence; empty where it has nothing to say, or there is none."""
        return "" if self.engine.controller is None else self.engine.controller.report()

    def mean(self) -> list[torch.Tensor] | None:
        """The mean of the replicas' `parameters` at this very step, without communication, where this rank has it: converged, or
        with ``converge=ExactLocal()``; else None. Not to be written to."""
        return list(self.parameters) if self.in_sync else self.weights.average.mean()

    @property
    def private_state(self) -> bool:
        """Does the optimizer's state differ between replicas even when they are converged? (Local gradients that keep their moments.)"""
        return self.weights.moments.policy == "keep" and self.replicas.count > 1

    def _mark_in_sync(self) -> None:
        """Replicas are equal. Buffers may differ after the next step even without a spread, each having seen its own data."""
        self._fan_out.note_average()
        has_buffers = len(self.parameters.buffers) > 0
        self._lockstep = self.replicas.count == 1 or (self.weights.average.idle and not self._replicas_part and not has_buffers)
        self._marks = self.parameters.marks()

    @property
    def _replicas_part(self) -> bool:
        """Can replicas differ after steps of the running cycle?"""
        return self.engine.explores or (self.sync.gradients == "local" and self.replicas.count > 1)

    def _agree(self) -> None:
        if not self._agreement.reached:
            with self.during("agreement"):
                self._agreement.check(self.weights.device)
            self.weights.moments.check()
            self._tell_report()  # not before: a state may be loaded, and another `tell` be set

    def _tell_report(self) -> None:
        """Each sentence once."""
        controller, report = self.engine.controller, self.report()
        if controller is not None and report not in ("", self._told):
            # whoever shows no INFO would wait for a controller that does nothing from the first step on
            too_short = self._search is not None and self._search.is_too_short
            tell = _LOG.warning if self.engine.step == 0 and (controller.idle or too_short) else self.tell
            tell(f"hdet, {self.engine.controller_name}: {report}")
        self._told = report

    def _searched_run(self, trained: Sequence[torch.Tensor], masters: Callable[[], Any]) -> Searched:
        def peaks() -> list[tuple[int, float]]:
            rates = [
                (knob, of)
                for knob, of in zip(self.knobs, self._peaks_in_force(), strict=True)
                if isinstance(knob, GroupKnob) and knob.key == "lr"
            ]
            return [pair for knob, of in rates for pair in zip(knob.indices, of, strict=True)]

        if len(self.replicas.local) > 1:
            raise ValueError("AutoLR trains copies of the run, for which several replicas in one process are of no use: leave replicas out")
        assert self._search is not None
        return Searched(
            self._search.model, self.optimizer, trained, masters, peaks, self.replicas, self.sync.gradients == "shared",
            lambda: self._fan_out.aside(), self.sync.refresh is not None,
        )  # fmt: skip

    def _peaks_in_force(self) -> list[list[float]]:
        of_all = zip(self.knobs, self.schedule.peaks(), self.engine.corrections, strict=True)
        return [[knob.scale.corrected(peak, by) for peak in peaks] for knob, peaks, by in of_all]

    def _check_outside_use(self, name: str, remedy: str) -> None:
        if self.replicas.in_use:
            raise ValueError(f"ensemble.{name}() was called inside `with replicas.use(k):`; {remedy}")
        self._check_not_exploring(name)

    def _check_not_exploring(self, name: str) -> None:
        if self._fan_out.explored is not None:
            raise ValueError(f"ensemble.{name}() was called inside `with ensemble.explore():`, where values are a replica's: call it after")
        self._check_no_arm(name)

    def _check_no_arm(self, name: str) -> None:
        """Nor by a closure, which computes the losses of other weights than the run's."""
        if self._search is not None:
            self._search.check_in_place(f"ensemble.{name}()")

    # -- a cycle ---------------------------------------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        self._panel.begin_cycle()
        self.reset_loss_meters()
        self._explored = False
        table = self.engine.multipliers()
        replicas = [[row[r] for row in table] for r in self.replicas.local]
        self._fan_out.assign(*replicas, *[[1.0] * len(self.knobs)] * self.weights.average.companions)

    def _on_cycle_start(self) -> None:
        """Before the first optimizer step after an average."""
        self._agreement.look()
        self.weights.on_cycle_start()
        self._panel.on_cycle_start()
        if self._search is not None:
            self._search.before_first_step()

    def reset_loss_meters(self) -> None:
        for member in self.weights.local:
            member.loss_meter.reset()
        self._panel.reset()

    @ranged("hdet.cycle")
    def _end_cycle(self) -> None:
        self._check_explored()
        started = self._now()
        compare = self.replicas.count > 1 and not self._replicas_part
        rows = self._panel.rows(self._as_replica, len(self.replicas.local))
        probed = self._now()
        stats = self._gather(rows, compare=compare)
        measured = self._panel.measured(stats)
        searching = self._search is not None and not self._search.done
        verdict, losses = verdict_on(stats, self.divergence, self.engine.level, searching)
        self._notes += verdict.notes
        self._converge(verdict, losses, equal=compare and len({(stat.digest, stat.marks) for stat in stats}) == 1)
        averaged = self._now()
        outcome = self._control(verdict, losses, measured, stats)
        self._mark_in_sync()
        self.schedule.write(self.engine)
        self.history = cycle_record(
            self.engine, self.schedule, outcome, losses=losses, scores=measured, notes=self._notes,
            probe_ms=1e3 * (probed - started), converge_ms=1e3 * (averaged - probed), trial=self._trial, searching=searching,
        )  # fmt: skip
        self._notes, self._trial = [], None
        self._begin_cycle()

    def _gather(self, rows: Sequence[torch.Tensor] | None, *, compare: bool) -> list[CycleStats]:
        """The stats of all replicas, which have what must be alike, or `ReplicaDisagreement` is raised on every rank."""
        marks = [] if self.replicas.world_group is None else [self.schedule.mark(), *self.weights.marks()]
        with self.during("statistics"):
            stats = gather_stats(self.replicas, self.weights.local, rows, compare=compare, marks=marks)
        of_each = list(zip(*(stat.marks for stat in stats), strict=True))
        if of_each:
            self.schedule.check_marks(of_each[0])
            self.weights.check_marks(of_each[1:])
        return stats

    def _check_explored(self) -> None:
        names = ", ".join(knob.name for knob in self.knobs if knob.acts == "forward")
        if not self._explored and self.engine.explores and any(knob.acts == "forward" and knob.spread > 0 for knob in self.knobs):
            note = f"the replicas did not differ in {names}: run forward, backward and clipping inside `with ensemble.explore():`"
            warnings.warn(note, stacklevel=4)
            self._notes.append(note)

    @contextmanager
    def _as_replica(self, place: int) -> Iterator[None]:
        """While it is scored: with the local replica's own values of the knobs that affect an evaluation, base values of all others."""
        with self.replicas.use(self.replicas.local[place]), self._fan_out.exploring(place, lambda knob: knob.affects_eval_loss):
            yield

    @ranged("hdet.converge")
    def _converge(self, verdict: Verdict, losses: Sequence[float | None], *, equal: bool) -> None:
        """Average the replicas, or restore the beginning of a cycle that is taken back."""
        with self.during("average"):
            if verdict.roll_back:
                attempts = self.engine.rollbacks_in_row
                if attempts >= self.divergence.attempts:
                    raise self._all_diverged(f"{attempts} cycles in a row were taken back, and the next one diverged too")
                self.weights.roll_back(attempts)
            elif not verdict.healthy:
                raise self._all_diverged("no replica has finite parameters left")
            # Equal replicas are left alone: N times x / N is not always x in floating point, and spread 0 is to be DDP bit for bit.
            elif not (equal and self.weights.average.idle):
                self._notes += self.weights.end_cycle(verdict.healthy, losses)

    def _control(self, verdict: Verdict, losses: list[float | None], measured: Measured, stats: Sequence[CycleStats]) -> CycleOutcome:
        """Let the controller learn from the cycle; or, where it is taken back, lower the learning rate's base values."""
        if verdict.roll_back:
            self._panel.restart()
            self._notes.append(f"cycle taken back; base values multiplied by {self.divergence.lower:g}")
            return self.engine.roll_back(self.divergence.lower)
        self.engine.accept(verdict.level, len(stats) - len(verdict.healthy))
        voting: dict[str, Any] = {
            name: [row if stat.votes else None for row, stat in zip(rows, stats, strict=True)] for name, rows in measured.items()
        }
        peaks = [of_cells[0] for of_cells in self.schedule.peaks()]
        outcome = self.engine.close(
            losses, voting, scheduled=self.schedule.values(), peak=peaks, floor=self.schedule.floors(), highest=self.schedule.highest(),
            schedule_step=self.schedule.step, local=self.sync.gradients == "local",
        )  # fmt: skip
        if outcome.evidence is not None:
            self.schedule.forget_highest()
        return outcome

    def _all_diverged(self, why: str) -> ReplicasDiverged:
        return ReplicasDiverged(
            f"cycle {self.engine.cycle} (step {self.engine.step}): {why}. "
            "Resume from the last checkpoint with a lower rate or spread, or clip gradients"
        )

    def _now(self) -> float:
        """Seconds; once the device is done if somebody will read the difference (a log is given)."""
        if self.log is not None and self.weights.device.type == "cuda":
            torch.cuda.synchronize(self.weights.device)
        return time.perf_counter()

    # -- checkpoint ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        raise TypeError(
            "an Ensemble cannot be copied: the copy's steps would count nothing. Copy the model and the optimizer, make another Ensemble of "
            "the copies, and give it ensemble.state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; no communication; the same on every rank; loads with another N.

        Save when `in_sync`; else it warns. In the middle of a cycle each replica has its own parameters. The losses of the running cycle
        are not part of the state.
        """
        self.during.check_whole()
        self._check_not_exploring("state_dict")
        self.schedule.check_unwritten()
        if not self.in_sync and self._replicas_part and (self.engine.position or self._fan_out.stepped):
            warnings.warn(
                "saving in the middle of a cycle: this replica's parameters are not the average; call converge() on all ranks first",
                stacklevel=2,
            )
        return {**self.engine.state_dict(), **self.schedule.state_dict()}

    def check_state(self, state: Any) -> None:
        """Raise ValueError for a state that `load_state_dict` refuses; nothing is changed in any case."""
        self._check_not_exploring("load_state_dict")
        self.schedule.check_at_rest()
        self.schedule.check_state(state)
        self.engine.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run, on all ranks alike. Load parameters, buffers and optimizer too, in any order; N may differ from the saved run's.
        A trial that was under way is lost.

        Without a controller the state of any is taken: its corrections stay in force, and nothing is searched any more. It warns of that.

        Raises:
            ValueError: another version, missing or damaged values, other knobs, another controller or scheduler; nothing is changed then.
        """
        self._check_not_exploring("load_state_dict")
        self.schedule.check_at_rest()
        with self.schedule.taken_over(state):
            self.engine.load_state_dict(state)
        self.engine.restart()  # the plan in force is that of the state, from here on
        self.schedule.write(self.engine)
        self._agreement.reset()
        self._lockstep = self.replicas.count == 1
        self._fan_out.note_load(rewrite=lambda: self.schedule.write(self.engine))
        self.weights.loaded()
        self._panel.restart()
        self._begin_cycle()
        if self.engine.controller is None and state["controller"] is not None:
            kept = ", ".join(f"{name} {correction:.4g}" for name, correction in self.corrections.items())
            spread = ", and replicas stay spread: knobs=[hdet.LearningRate(0)] ends that" if self.engine.explores else ""
            warnings.warn(
                f"the ensemble's state was saved with controller {state['controller']!r}, and this run has none: the corrections {kept} stay in force, "
                f"nothing is searched any more{spread}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Take the multiplier off the optimizer for good. Parameters stay as they are: converge() first. A second call does nothing."""
        if getattr(self.optimizer, "_hdet_fan_out", None) is not self._fan_out:  # it may be another's by now
            return
        self._check_no_arm("close")
        self._panel.release()
        if self._search is not None:
            self._search.close()
        self._fan_out.close()
        self.weights.average.close()
        self.replicas.detach()
