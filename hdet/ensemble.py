"""The engine on real tensors: fan out, observe, converge, control (docs/method.md)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from .converge.sync import Sync
from .core.controller import Controller
from .core.divergence import Divergence
from .knobs import Knob, LearningRate
from .replicas import Replicas
from .run.compatibility import check_arguments, warn_of_no_controller
from .run.cycles import ReplicasDiverged
from .run.history import Records
from .run.parts import Parts
from .schedule import Scheduler
from .trial.searched import Closure

__all__ = ["Ensemble", "ReplicasDiverged"]


class Ensemble:
    """Drives the replicas: call ``ensemble.step(loss)`` where ``scheduler.step()`` was, after
    ``optimizer.step()``.

    Each process holds one of N, or one process all of them (`CoresidentReplicas`): then every
    replica's loss is observed inside its ``with replicas.use(k)``, and ``ensemble.step()`` follows
    the one optimizer step.

    Args:
        optimizer: any torch optimizer with all its groups; its parameters are averaged.
            Co-resident replicas need one of hdet's fused ones.
        scheduler: a torch scheduler of this optimizer, which the Ensemble steps and nobody else.
            None: constant values, or a schedule that you step yourself inside `rescheduling`.
        knobs: what to explore, of `hdet.knobs`; default ``[LearningRate(spread=1/9)]``
            (docs/knobs.md).
        controller: None, `AutoLR`, `ProbeController`, or any `hdet.Controller` (docs/choosing.md).
        replicas: who takes part; default the world if torch.distributed is initialised, else a
            single replica; or a `CoresidentReplicas`. Parameters sharded over a mesh of one
            dimension that is the world (plain FSDP2): by default all ranks are one replica.
        sync: when and how replicas are averaged: `Sync`.
        divergence: when a replica is left out of an average, or a cycle taken back: `Divergence`.
        design: how multipliers are assigned to replicas: ``"permutation"``, each knob's grid by
            itself, as published; or ``"orthogonal"``, two levels for all knobs together, which
            tells their effects apart best. Default: orthogonal for 2 to N - 1 knobs.
        warmup_steps: S_warm, steps before the controller may act; spread and averages run from the
            start.
        total_steps: length of the run; default the scheduler's ``total_steps`` if it has one. The
            last step ends a cycle.
        seed: key of the assignments of multipliers; must be equal on all ranks.
        log: called as ``log(record, step)`` once per cycle, with plain data; give it on the rank
            that writes.

    Guarantees: between steps param_groups, and whatever else a knob moves, hold base values, the
    same on all ranks. A value that somebody else writes there is refused before it is used
    (`rescheduling`, `set_value`). Only the end of a cycle communicates (one collective of a few
    numbers per replica, then the average) and waits for the device; some kinds of `Sync.converge`
    communicate earlier. Replicas that cannot differ and are bitwise equal are not touched: spread 0
    is bitwise data-parallel training. A collective that fails raises `ReplicaLost` on every rank
    that is left; after it this object refuses to go on.
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
        knobs = [LearningRate()] if knobs is None else knobs
        sync, divergence = sync or Sync(), divergence or Divergence()
        check_arguments(
            optimizer, scheduler, knobs, seed=seed, log=log, replicas=replicas,
            controller=controller, sync=sync, divergence=divergence,
        )  # fmt: skip
        # Everything is validated before the optimizer is touched, which `Parts.attach` does.
        parts = Parts(
            optimizer, scheduler, knobs, controller, replicas, sync, divergence, design,
            warmup_steps, total_steps, seed,
        )  # fmt: skip
        self.optimizer, self.sync, self.divergence = optimizer, sync, divergence
        self.parameters, self.replicas, self.knobs = parts.tensors, parts.replicas, parts.knobs
        self.schedule, self.engine, self.run = parts.schedule, parts.engine, parts.run
        self.during, self.weights = parts.during, parts.weights
        self.records = Records(self.engine, log)
        self._fan_out, self._panel, self._search = parts.fan_out, parts.panel, parts.search
        self._agreement, self._cycles = parts.agreement, parts.cycles
        self._cycles.times_device = log is not None
        # Is the kind of gradients known? Knobs that act on gradients change them.
        self._knows_gradients = any(knob.on_gradients for knob in self.knobs)
        parts.attach()
        self._cycles.begin()

    # -- the loop ----------------------------------------------------------------------------------

    def observe(
        self,
        loss: torch.Tensor | float,
        weight: torch.Tensor | float = 1.0,
        replica: int | None = None,
    ) -> None:
        """Add a loss of this replica to the running cycle. Never synchronises.

        Args:
            loss: of a micro-batch, a scalar.
            weight: of it, such as its tokens, >= 0.
            replica: whose it is; None: this process's, or that of the co-resident one in ``use``.

        Raises:
            ValueError: not a scalar, or a negative weight; or nothing says which replica's it is.
        """
        self.weights.local[self.replicas.place(replica)].loss_meter.add(loss, weight)

    def step(
        self, loss: torch.Tensor | float | None = None, closure: Closure | None = None
    ) -> None:
        """After ``optimizer.step()``: step the scheduler and count; at the end of a cycle average
        the replicas and let the controller act.

        Several calls for one optimizer step (accelerate steps a prepared scheduler once per
        process) advance the schedule, as in torch, but count one step of the cycle; a call without
        an optimizer step counts none. The end of the schedule always ends the last cycle. With
        local gradients each call counts, also where a GradScaler skips the step of one replica: all
        must count alike.

        Args:
            loss: as for `observe`.
            closure: computes the current batch's losses again, with a graph, for the trial of an
                `AutoLR`.

        Raises:
            ReplicasDiverged: at the end of a cycle no replica has finite parameters, and there is
                no snapshot to go back to.
            ReplicaLost: a collective failed or timed out.
            ValueError: somebody else has written a value (see `rescheduling` and `set_value`).
        """
        cycles, schedule = self._cycles, self.schedule
        if self.replicas.in_use or self._fan_out.explored is not None or self._search is not None:
            self.check_at_rest("step")
        if self.during.lost is not None:
            self.during.check_whole()
        schedule.check_unwritten()
        if loss is not None:
            self.weights.local[self.replicas.place(None)].loss_meter.add(loss)
        if not self._agreement.reached:
            self._agree()
        stepped, ends = self._fan_out.take_stepped(), False
        if stepped and not self._knows_gradients:
            self._check_gradients()
        try:
            if stepped and self._search is not None:
                note = cycles.search_rate(self._search, closure)
                if note is not None:
                    self.records.tell_note(note)
            is_over = schedule.advance()
            if stepped:
                ends = self.engine.tick()
                if cycles.has_samples:
                    self._panel.sample()
            ends = ends or (is_over and self.engine.position > 0)
            if ends:
                record = cycles.end(self._search is not None and not self._search.done)
            elif stepped and (cycles.can_part or not self.weights.average.idle):
                cycles.act_within()
        finally:  # also when the schedule is past its end: at rest there is the base value
            if not schedule.is_neutral:
                schedule.write(self.engine)
        if ends:
            self.records.add(record)

    def converge(self) -> None:
        """Average the replicas now, e.g. before saving or evaluating; every rank must call it. The
        cycle goes on, its loss meters restart.

        Always exact, whatever `Sync.converge` is: an average under way is completed. A replica that
        is left out because its parameters are not finite is noted in the next record and warned of.
        """
        self.check_at_rest("converge")
        self.during.check_whole()
        self._agree()
        self._cycles.converge()

    @contextmanager
    def explore(self) -> Iterator[None]:
        """Around forward, backward and clipping: inside, dropout, smoothing, temperatures and the
        like have this replica's values (of co-resident replicas, that of the one in ``use``).
        Outside, also after an error, base values: evaluate and save there.

        Knobs that act inside ``optimizer.step()`` (rates, decay, betas, eps) do not need it.

        Raises:
            ValueError: co-resident replicas, none of which is in ``use``; or inside the
                ``explore()`` of another one.
        """
        if len(self.replicas.local) > 1 and not self.replicas.in_use:
            raise ValueError(
                "which replica explores? Call explore() inside `with replicas.use(k):`"
            )
        self.schedule.check_unwritten()
        with self._fan_out.exploring(self.replicas.place(None), lambda knob: True):
            self._cycles.has_explored = True
            yield

    @contextmanager
    def rescheduling(self) -> Iterator[None]:
        """Around a schedule that you step yourself (timm's, ReduceLROnPlateau, a formula in the
        loop): inside, param_groups and what else a knob moves hold the schedule's own values,
        without corrections. What stands there at the end becomes the schedule's next values. Build
        such a scheduler before the Ensemble, or inside.

        Raises:
            ValueError: inside itself; or somebody has written a value outside.
        """
        self._check_no_arm("rescheduling")
        with self.schedule.rescheduling(self.engine):
            yield

    def set_value(self, name: str, value: float) -> None:
        """Set the base value of the knob ``name``, on all ranks alike: its schedule goes on from
        here, corrected so that it is ``value`` now. Where a knob moves several groups, ``value`` is
        the first one's, and the others move with it.

        Example::

            ensemble.set_value("lr", 0.5 * ensemble.value("lr"))

        Raises:
            ValueError: there is no such knob; inside `explore` or `rescheduling`; or no correction
                leads from the schedule's value to this one (0, or a rate where the schedule is at 0
                now).
        """
        self.check_at_rest("set_value")
        k = self._number_of(name)
        self.engine.set_value(k, float(value), self.knobs[k].uncorrected_value())
        self.schedule.write(self.engine)

    def guard(self) -> AbstractContextManager[None]:
        """Around a training loop: a collective of the loop's own that fails (DDP's, in a backward
        pass) becomes a `ReplicaLost` too."""
        return self.during("training step")

    # -- what is known -----------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        """Cycles completed."""
        return self.engine.cycle

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of this process's cycles, as ``log`` gets them, but for what `hdet.replay`
        reads (``record``). The last one is ``history[-1]``."""
        return self.records.history

    @property
    def in_sync(self) -> bool:
        """Are the replicas' parameters and averaged buffers known to be equal now, with no average
        under way? Does not compare them."""
        return self._cycles.in_sync

    def value(self, name: str) -> float:
        """The value of the knob ``name`` now: a replica's inside `explore`, else the base value.
        Raises ValueError where there is no such knob."""
        self.schedule.check_unwritten()
        return self.knobs[self._number_of(name)].value()

    def values(self) -> dict[str, float]:
        """Corrected base value by knob: what param_groups hold at rest."""
        self.schedule.check_unwritten()
        return self._by_knob(self.schedule.base_values())

    @property
    def corrections(self) -> dict[str, float]:
        return self._by_knob(self.engine.corrections)

    @property
    def multipliers(self) -> dict[str, float]:
        """rho of this replica (of co-resident ones the one in ``use``) in the running cycle, by
        knob."""
        place = self.replicas.local.index(self.replicas.index)
        return self._by_knob(self._fan_out.multipliers[place])

    def report(self) -> str:
        """What the controller is going to do, or what it has measured: some short lines."""
        controller = self.engine.controller
        if controller is None:
            return "no controller: nothing moves the values of the schedule"
        moved = ", ".join(f"{name} {by:.4g}" for name, by in self.corrections.items())
        return controller.report() or f"{controller.name}: corrections of the schedule: {moved}"

    def mean(self) -> list[torch.Tensor] | None:
        """The mean of the replicas' `parameters` at this very step, without communication, where
        this rank has it: converged, or with ``converge=ExactLocal()``; else None. Not to be written
        to."""
        return list(self.parameters) if self.in_sync else self.weights.average.mean()

    def reset_loss_meters(self) -> None:
        """The losses of the running cycle so far count no more."""
        self._cycles.reset_losses()

    def _by_knob(self, numbers: Sequence[float]) -> dict[str, float]:
        return {knob.name: number for knob, number in zip(self.knobs, numbers, strict=True)}

    def _number_of(self, name: str) -> int:
        names = [knob.name for knob in self.knobs]
        if name not in names:
            raise ValueError(f"there is no knob {name!r}, only {names}")
        return names.index(name)

    # -- parts of a step ---------------------------------------------------------------------------

    def _agree(self) -> None:
        """Once, before anything of the run is averaged."""
        if not self._agreement.reached:
            with self.during("agreement"):
                self._agreement.check(self.weights.device)
            self.weights.moments.check()
            self.records.tell_report()  # not earlier: the state and `tell` may change

    def _check_gradients(self) -> None:
        with self.during("agreement"):
            self._agreement.check_gradients(self._fan_out.gradient_norm, self.weights.device)
        self._knows_gradients = True

    def check_at_rest(self, name: str) -> None:
        """Raises ValueError where a replica is in ``use``, explores, an arm of a trial is in its
        place, or inside `rescheduling`. ``name``: of the method that is not to be called there."""
        where = None
        if self.replicas.in_use:
            where = "`with replicas.use(k):`; it is of all replicas"
        elif self._fan_out.explored is not None:
            where = "`with ensemble.explore():`, where values are a replica's"
        if where is not None:
            raise ValueError(f"ensemble.{name}() was called inside {where}: call it after")
        self._check_no_arm(name)
        self.schedule.check_at_rest()

    def _check_no_arm(self, name: str) -> None:
        """Nor by a closure, which computes the losses of other weights than the run's."""
        if self._search is not None:
            self._search.check_in_place(f"ensemble.{name}()")

    # -- checkpoint --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        raise TypeError(
            "an Ensemble cannot be copied: the copy's steps would count nothing. Copy the model "
            "and the optimizer, make another Ensemble of the copies, and give it "
            "ensemble.state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; no communication; the same on every rank; loads
        with another N.

        Save when `in_sync`; else it warns. In the middle of a cycle each replica has its own
        parameters. The losses of the running cycle are not part of the state.
        """
        self.during.check_whole()
        self.check_at_rest("state_dict")
        self.schedule.check_unwritten()
        has_parted = self._cycles.can_part and (self.engine.position or self._fan_out.stepped)
        if has_parted and not self.in_sync:
            warnings.warn(
                "saving in the middle of a cycle: this replica's parameters are not the average; "
                "call converge() on all ranks first",
                stacklevel=2,
            )
        return {**self.engine.state_dict(), **self.schedule.state_dict()}

    def check_state(self, state: Any) -> None:
        """Raise ValueError for a state that `load_state_dict` refuses; nothing is changed in any
        case."""
        self.check_at_rest("load_state_dict")
        self.schedule.check_state(state)
        self.engine.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run, on all ranks alike. Load parameters, buffers and optimizer too, in any
        order; N may differ from the saved run's. A trial that was under way is lost.

        Without a controller the state of any is taken: its corrections stay in force, and nothing
        is searched any more. It warns of that.

        Raises:
            ValueError: another version, missing or damaged values, other knobs, another controller
                or scheduler; nothing is changed then.
        """
        self.check_at_rest("load_state_dict")
        with self.schedule.taken_over(state):
            self.engine.load_state_dict(state)
        self.engine.restart()
        self.schedule.write(self.engine)
        self._agreement.reset()
        self._fan_out.note_load(rewrite=lambda: self.schedule.write(self.engine))
        self._cycles.note_load()
        if self.engine.controller is None and state["controller"] is not None:
            warn_of_no_controller(self.engine, state["controller"])

    def close(self) -> None:
        """Take the multiplier off the optimizer for good. Parameters stay as they are: converge()
        first. A second call does nothing."""
        if getattr(self.optimizer, "_hdet_fan_out", None) is not self._fan_out:  # another's by now
            return
        self._check_no_arm("close")
        self._panel.release()
        if self._search is not None:
            self._search.close()
        self._fan_out.close()
        self.weights.average.close()
        self.replicas.detach()
