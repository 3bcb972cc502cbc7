"""Cycles of a run: they begin with multipliers, and end with statistics, an average, a decision."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from ..controllers.probe_rule import PROBE
from ..core.divergence import Verdict, judge
from ..core.engine import CycleOutcome
from ..core.validate import warn
from ..logging import CycleRecord
from ..optim.snapshot import inner_optimizer
from ..tensors.profiling import ranged
from .cycle_stats import CycleStats, LossMeter, Measured, gather_stats
from .fan_out import FanOut
from .faults import Guard
from .measurements import Measurements
from .replica_parameters import ReplicaParameters
from .same_run import Agreement
from .setup import Setup
from .shared_phase import SharedPhase

__all__ = ["Cycles", "ReplicasDiverged"]

_NO_TRIAL: tuple[dict[str, Any] | None, float, float] = None, 0.0, 0.0
"""What a search has measured, its cost in steps, its milliseconds."""


class ReplicasDiverged(RuntimeError):
    """No replica has finite parameters, so there is nothing to average.

    Raised on every rank alike.
    """


class Cycles:
    """Begins and ends the cycles of one run.

    Args:
        run: what it is made of.
        fan_out: puts multipliers into the optimizer's step.
        agreement: sees the parameters before the first step.
        guard: put, with a name, around what communicates.
        attached: is given what undoes each change to what the user has made.
    """

    def __init__(
        self,
        run: Setup,
        fan_out: FanOut,
        agreement: Agreement,
        guard: Guard,
        attached: ExitStack,
    ) -> None:
        self.engine, self.schedule, self.search = run.engine, run.schedule, run.search
        self.fan_out, self._agreement = fan_out, agreement
        self.optimizer = inner_optimizer(run.optimizer)
        self.replicas, self._divergence = run.replicas, run.divergence
        self._guard, self.measurements = guard, Measurements(run, guard, attached)
        self.parameters = parameters = ReplicaParameters(run)
        attached.callback(parameters.average.close)
        self.losses = [LossMeter(parameters.device) for _ in run.replicas.local]
        """[local replica]: since the running cycle began."""
        self._is_local, self._times_device = run.is_local, run.log is not None
        self._moves_equal = run.sync.converge.moves_equal
        self.notes: list[str] = []
        """For the next record."""
        self.trial = _NO_TRIAL
        """Of a search, for the next record."""
        self.has_explored = False
        """Was `Ensemble.explore` entered in this cycle?"""
        self.can_differ = False
        """Can replicas differ after steps of the running cycle?"""
        self.has_samples = False
        """Does something look at steps of the running cycle?"""
        self._stay_equal = self.replicas.count == 1
        self._buffer_marks = parameters.tensors.marks()
        self._phase = SharedPhase(run) if run.sync.begin else None
        if self._phase is not None:
            attached.callback(self._phase.end)

    # -- begin -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A cycle: its multipliers, its measurements."""
        self.measurements.release(keep=self.engine.plan.measures)
        self.reset_losses()
        self.has_explored, self.has_samples = False, bool(self.engine.plan.measures)
        _ = self.engine.interval  # decided by the rate that stands here
        if self._phase is not None:
            is_shared = not self.engine.may_differ
            self._phase.turn(is_shared)
            if self._agreement.expect("shared" if is_shared else "local"):
                self.fan_out.gradient_norm = None  # of the next step
        table = self.engine.multipliers()
        self.can_differ = self._can_replicas_differ()
        replicas = [[row[r] for row in table] for r in self.replicas.local]
        base = [[1.0] * len(table)] * self.parameters.average.companions
        self.fan_out.assign(*replicas, *base)

    def _can_replicas_differ(self) -> bool:
        has_own_gradients = self._is_local and self.replicas.count > 1 and self.engine.may_differ
        return self.engine.explores or has_own_gradients

    def begin_steps(self) -> None:
        """Before the first optimizer step after an average."""
        self._agreement.look()
        if self._phase is not None:
            self._phase.check()
        self.parameters.on_cycle_start(self.engine.may_differ)
        if self.search is not None:
            self.search.before_first_step()

    def reset_losses(self) -> None:
        for meter in self.losses:
            meter.reset()
        self.measurements.reset()

    # -- where a call may stand --------------------------------------------------------------------

    def check_at_rest(self, name: str, takes_averages: bool = False) -> None:
        """Raises ValueError where a replica is in ``use``, explores, an arm of a trial or an
        average over time is in its place, or inside `rescheduling`. ``name``: of the Ensemble's
        method that was called. ``takes_averages``: may it be of averages over time?"""
        where = None
        if self.replicas.in_use:
            where = "`with replicas.use(k):`; it is of all replicas"
        elif self.fan_out.explored is not None:
            where = "`with ensemble.explore():`, where values are a replica's"
        elif getattr(self.optimizer, "is_averaged", False) and not takes_averages:
            where = "`with optimizer.averaged():`, where the parameters are an average over time"
        if where is not None:
            raise ValueError(f"ensemble.{name}() was called inside {where}: call it after")
        self.check_no_arm(name)
        self.schedule.check_at_rest()

    def check_no_arm(self, name: str) -> None:
        """Nor by a closure, which computes the losses of other weights than the run's."""
        if self.search is not None:
            self.search.in_place.check(f"ensemble.{name}()")

    # -- in sync -----------------------------------------------------------------------------------

    @property
    def in_sync(self) -> bool:
        """Are parameters and averaged buffers known to be equal on all replicas?"""
        return self._stay_equal or (
            not self.fan_out.moved
            and self.parameters.average.idle
            and self.parameters.tensors.unwritten(self._buffer_marks)
        )

    @property
    def has_begun(self) -> bool:
        """Was a step of the running cycle taken?"""
        return self.engine.position > 0 or self.fan_out.stepped

    def note_average(self, has_written: bool = True) -> None:
        """Replicas are equal. Buffers may differ after the next step even without a spread, each
        having seen its own data. ``has_written``: or were they equal before?"""
        self.fan_out.note_average(has_written)
        has_buffers = len(self.parameters.tensors.buffers) > 0
        # At a cycle's end the engine is at the next one, which may be of another kind.
        stays = self.parameters.average.idle and not self._can_replicas_differ() and not has_buffers
        self._stay_equal = self.replicas.count == 1 or stays
        self._buffer_marks = self.parameters.tensors.marks()

    def note_restore(self) -> None:
        """A search has put the first weights back, and what was measured since counts no more."""
        with self._guard("average"):
            self.parameters.note_restore()
        self.note_average()
        self.engine.level = None
        self.engine.restart()
        self.reset_losses()

    def note_load(self) -> None:
        """A state was loaded: nothing is known of the parameters."""
        self.trial = _NO_TRIAL
        self._stay_equal = self.replicas.count == 1
        self.parameters.note_load()
        self.begin()

    # -- an average --------------------------------------------------------------------------------

    def converge(self) -> None:
        """Average now and exactly; the cycle goes on."""
        if self.replicas.count > 1:
            stats = self._gather("converge()", [{}] * len(self.replicas.local), compare=True)
            finite = [r for r, good in enumerate(stats.finite) if good]
            if not finite:
                raise self._all_diverged("no replica has finite parameters left")
            is_plain = self.parameters.average.idle and not self.parameters.moments.are_averaged
            is_done = is_plain and stats.are_alike
            if not is_done:
                with self._guard("average"):
                    self.parameters.complete(finite)
            self.note_average(has_written=not is_done)
            for r in set(range(self.replicas.count)) - set(finite):
                note = f"replica {r} left out of the average: parameters not finite"
                warn(f"converge: {note}")
                self.notes.append(note)
        self.reset_losses()

    def _gather(self, purpose: str, measured: Sequence[Measured], *, compare: bool) -> CycleStats:
        """The stats of all replicas, which have what must be alike, or `ReplicaDisagreement` is
        raised on every rank."""
        marks: list[Any] = []
        if self.replicas.world_group is not None:
            marks = [self.schedule.mark(), *self.parameters.marks()]
        with self._guard("statistics"):
            stats = gather_stats(
                self.replicas, self.parameters.tensors, self.parameters.masters, self.losses,
                measured, purpose, compare=compare, marks=marks,
            )  # fmt: skip
        if marks:
            self.schedule.check_marks(stats.marks[0])
            self.parameters.check_marks(stats.marks[1 : len(marks)])
        return stats

    # -- end ---------------------------------------------------------------------------------------

    @ranged("hdet.cycle")
    def end(self) -> CycleRecord:
        """Measure, average, let the controller decide, begin the next cycle. Returns the record."""
        search = self.search
        is_searching = search is not None and not search.done
        self._check_explored()
        started = self._now()
        compare = self.replicas.count > 1 and not self.can_differ
        rows = self.measurements.rows(self._as_replica, len(self.replicas.local))
        probed = self._now()
        stats = self._gather("the end of a cycle", rows, compare=compare)
        measured = self.measurements.split(stats.measured)
        # What breaks in the first steps is put back by the search, if it moves anything.
        if search is not None and not (search.done or search.report_only):
            finite = [r for r, good in enumerate(stats.finite) if good]
            verdict = Verdict(finite or list(range(self.replicas.count)))
        else:
            verdict = judge(self._divergence, stats.finite, stats.raw_losses, self.engine.level)
        self.notes += verdict.notes
        self._average(verdict, are_equal=compare and stats.are_alike)
        averaged = self._now()
        bases = self.schedule.base_values()  # in this cycle's last step
        if verdict.roll_back:
            lower = self._divergence.lower  # rates, in the place of a decision
            self.notes.append(f"cycle rolled back; base values multiplied by {lower:g}")
            outcome = self.engine.roll_back(lower)
        else:
            outcome = self._decide(verdict, stats, measured)
        self.note_average()
        self.schedule.write()
        engine, schedule, decisions = self.engine, self.schedule, outcome.decisions
        by_knob, probe = schedule.by_knob, measured.get(PROBE)
        record = CycleRecord(
            event="cycle", cycle=outcome.cycle, step=engine.step,
            values=by_knob(schedule.base_values()),
            scheduled=by_knob([knob.scheduled_value() for knob in schedule.knobs]),
            corrections=by_knob(schedule.corrections()),
            slopes=by_knob([decision.slope for decision in decisions]),
            errors=by_knob([decision.error for decision in decisions]),
            t=by_knob([decision.t for decision in decisions]),
            multipliers=by_knob(outcome.multipliers), losses=stats.losses,
            tried=by_knob([
                [knob.scale.fanned(base, rho) for rho in row]
                for knob, base, row in zip(schedule.knobs, bases, outcome.multipliers, strict=True)
            ]),
            probe=None if probe is None else [_finite_mean(row) for row in probe],
            left_out=outcome.left_out, rolled_back=outcome.rolled_back, rollbacks=engine.rollbacks,
            diverged_total=engine.diverged_total, probe_ms=1e3 * (probed - started),
            converge_ms=1e3 * (averaged - probed), trial=self.trial[0], trial_steps=self.trial[1],
            trial_ms=self.trial[2], searching=is_searching,
            notes=[*self.notes, *outcome.notes], record=asdict(outcome),
        )  # fmt: skip
        self.notes, self.trial = [], _NO_TRIAL
        self.begin()
        return record

    def _check_explored(self) -> None:
        forward = [knob for knob in self.schedule.knobs if knob.meaning.acts == "forward"]
        if self.has_explored or not self.engine.explores:
            return
        if any(knob.grid.explores for knob in forward):
            note = (
                f"the replicas did not differ in {', '.join(knob.name for knob in forward)}: run "
                "forward, backward and clipping inside `with ensemble.explore():`"
            )
            warn(note)
            self.notes.append(note)

    @contextmanager
    def _as_replica(self, slot: int) -> Iterator[None]:
        """While it is scored: the local replica's own values of the knobs that affect an
        evaluation, base values of all others."""
        own = self.fan_out.exploring(slot, lambda knob: knob.meaning.affects_eval_loss)
        with self.replicas.use(self.replicas.local[slot]), own:
            yield

    @ranged("hdet.converge")
    def _average(self, verdict: Verdict, *, are_equal: bool) -> None:
        """Average the replicas, or restore the beginning of a cycle that is rolled back."""
        moves_equal = self._moves_equal and self.engine.may_differ
        with self._guard("average"):
            if verdict.roll_back:
                attempts = self.engine.rollbacks_in_row
                if attempts >= self._divergence.attempts:
                    raise self._all_diverged(
                        f"{attempts} cycles in a row were rolled back, and the next one diverged "
                        "too"
                    )
                self.parameters.roll_back(attempts)
            elif not verdict.healthy:
                raise self._all_diverged("no replica has finite parameters left")
            elif are_equal and self.parameters.average.idle and not moves_equal:
                pass  # N times x / N is not always x, and spread 0 is to be DDP bitwise
            elif not self.engine.may_differ:
                self.parameters.complete(verdict.healthy)
            else:
                self.notes += self.parameters.end_cycle(verdict.healthy)

    def _decide(
        self, verdict: Verdict, stats: CycleStats, measured: Mapping[str, list[list[float]]]
    ) -> CycleOutcome:
        """The controller's decisions."""
        engine, schedule = self.engine, self.schedule
        voting = {
            name: [row if vote else None for row, vote in zip(rows, stats.votes, strict=True)]
            for name, rows in measured.items()
        }
        schedule.write()  # the base values of the next step
        outcome = engine.close(
            stats.losses, voting, step=schedule.step, local=self._is_local,
            is_search_over=self.search is None or self.search.done,
        )  # fmt: skip
        engine.accept(verdict.level, self.replicas.count - len(verdict.healthy))
        return outcome

    def _all_diverged(self, why: str) -> ReplicasDiverged:
        return ReplicasDiverged(
            f"cycle {self.engine.cycle} (step {self.engine.step}): {why}. Look for NaN in the "
            "data; else resume from the last checkpoint with a lower rate or spread, or clip "
            "gradients"
        )

    def _now(self) -> float:
        """Seconds."""
        if self._times_device and self.parameters.device.type == "cuda":
            torch.cuda.synchronize(self.parameters.device)
        return time.perf_counter()


def _finite_mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
