"""The parts of an Ensemble, made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..controllers.measurement import Watched
from ..converge.sync import Sync
from ..core.clock import Clock
from ..core.controller import Controller
from ..core.divergence import Divergence
from ..core.engine import Engine
from ..core.evidence import Run
from ..core.validate import refuse, warn, whole
from ..knobs import BoundKnob, Knob, LearningRate, bind_all, check_disjoint
from ..logging import CycleRecord
from ..optim.snapshot import masters_of
from ..replicas import Replicas
from ..replicas.refusals import check_sharding
from ..schedule import Schedule, Scheduler
from ..trial.auto import AutoLR
from ..trial.searched import Searched
from .compatibility import (
    Setup,
    averaged_tensors,
    check_arguments,
    check_averaged,
    choose_design,
    doubts,
    wrong_for_controller,
    wrong_settings,
)
from .cycles import Cycles
from .fan_out import FanOut
from .faults import Guard
from .history import Records
from .measurements import Panel
from .mistakes import find_lost_state, refuse_join, warn_of_lost_state
from .replica_parameters import ReplicaWeights, check_tied
from .same_run import Agreement

__all__ = ["Parts"]


class Parts:
    """Makes and checks all parts of a run; arguments as for `hdet.Ensemble`, which has them.

    The optimizer is touched by `attach` alone, and by ways of averaging that keep a second set of
    parameters in it, which are therefore made last.

    Raises:
        TypeError, ValueError: what cannot be used, before anything is changed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Scheduler | None,
        knobs: Sequence[Knob] | None,
        search: AutoLR | None,
        controller: Controller | None,
        replicas: Replicas | None,
        sync: Sync | None,
        divergence: Divergence | None,
        design: str | None,
        warmup_steps: int,
        total_steps: int | None,
        seed: int,
        log: Callable[[CycleRecord, int], object] | None,
    ) -> None:
        knobs = [LearningRate()] if knobs is None else knobs
        self.sync, self.divergence = sync or Sync(), divergence or Divergence()
        given: dict[str, Any] = {
            "optimizer": optimizer, "scheduler": scheduler, "knobs": knobs, "search": search,
            "controller": controller, "replicas": replicas, "sync": self.sync,
            "divergence": self.divergence, "design": design, "total_steps": total_steps,
            "seed": seed, "log": log,
        }  # fmt: skip
        self.setup = Setup(**given)
        check_arguments(self.setup)
        self.optimizer, self.search, self.controller = optimizer, search, controller
        self.tensors = averaged_tensors(optimizer, self.sync.buffers)
        check_tied(self.sync.tied, self.tensors)
        self.replicas = self._replicas(replicas)
        if self.replicas.count > 1:
            check_averaged(self.tensors)
        self.knobs: list[BoundKnob] = bind_all(knobs, optimizer)
        self.setup = replace(self.setup, knobs=self.knobs, replicas=self.replicas)
        refuse(wrong_settings(self.setup))
        self.design = choose_design(self.setup)
        if total_steps is not None:
            whole(total_steps, "total_steps", of="steps")
        self.schedule = Schedule(scheduler, self.knobs, total_steps)
        if self._moves_values and scheduler is not None:
            self.schedule.simulate(optimizer, [(scheduler, 1)])
        length = self.schedule.total_steps
        if sync is None and length and search is not None and controller is None:
            # Where a cycle ends, nothing happens but a record: often enough for a curve.
            self.sync = Sync(min(self.sync.every, max(20, length // 50)))
        self.setup = replace(self.setup, schedule=self.schedule, sync=self.sync)
        self.lost_state = find_lost_state(optimizer, scheduler, search is not None)
        self.schedule.doubt = self.lost_state
        """Told in the first step, unless the Ensemble's state is loaded before."""
        self._make_engine(warmup_steps, seed)
        self._make_cycles()
        self.records = Records(self.engine, search, log)
        self.cycles.times_device = log is not None

    def _make_cycles(self) -> None:
        engine, sync, optimizer = self.engine, self.sync, self.optimizer
        self.during = Guard(self.replicas, engine)
        self.panel = Panel(engine, self.during)
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        first, is_local = self.replicas.local[0], sync.gradients == "local"
        self.fan_out = FanOut(
            optimizer, self.schedule, first, self._on_cycle_start, is_local, self.replicas.count > 1
        )
        self._watch()
        models = self._models()
        self.weights = ReplicaWeights(
            self.tensors, optimizer, self.replicas, sync, self.divergence, models
        )
        self.agreement = Agreement(
            engine, self.search, self.tensors, optimizer, self.schedule, self.replicas, models,
            sync, self.divergence, any(knob.meaning.on_gradients for knob in self.knobs),
        )  # fmt: skip
        self.cycles = Cycles(
            engine, self.schedule, self.fan_out, self.weights, self.panel, self.divergence,
            self.during, self.search, is_local,
        )  # fmt: skip

    def attach(self) -> None:
        """Let the optimizer's step be the run's."""
        self.fan_out.attach()
        self.replicas.attach(self.optimizer)

    def detach(self) -> None:
        """The end of `attach`, and of what looks at the run."""
        self.panel.release()
        if self.search is not None:
            self.search.close()
        self.fan_out.close()
        self.weights.average.close()
        self.replicas.detach()

    # -- once, in the first step -------------------------------------------------------------------

    def agree(self) -> None:
        """Before anything of the run is averaged, and again after a load."""
        if self.replicas.world_group is not None:
            refuse_join(self.trained)
        with self.during("agreement"):
            self.agreement.check(self.weights.device)
        self.weights.moments.check()
        if self.lost_state:
            warn_of_lost_state(self.lost_state)
            self.lost_state = ""
        self.records.tell_report()  # not earlier: the state and `tell` may change

    def check_gradients(self) -> None:
        """Are they shared, or local, as was said?"""
        with self.during("agreement"):
            self.agreement.check_gradients(self.fan_out.gradient_norm, self.weights.device)
        self.agreement.knows_gradients = True

    @property
    def _moves_values(self) -> bool:
        return self.search is not None or self.controller is not None

    # -- checked -----------------------------------------------------------------------------------

    def _replicas(self, given: Replicas | None) -> Replicas:
        replicas = Replicas.of_shards(self.tensors) if given is None else given
        decides = self._moves_values or self.divergence.rollback is not None
        gradients = self.sync.gradients
        check_sharding(self.optimizer, self.tensors, replicas, gradients, decides=decides)
        return Replicas.default() if replicas is None else replicas

    def _make_engine(self, warmup_steps: int, seed: int) -> None:
        count, length = self.replicas.count, self.schedule.total_steps
        clock = Clock(self.sync.every, warmup_steps, length)
        engine = Engine(
            self.knobs,
            count,
            clock,
            self.controller,
            seed,
            self.design,
            searches=self.search is not None,
        )
        self.engine = engine
        self.engine.step = max(0, int(self.schedule.step or 0))
        is_local = self.sync.gradients == "local"
        floors, searches = self.schedule.floors(), self.search is not None
        self.run = Run(clock, engine.knobs, count, floors, local=is_local, searches=searches)
        if self.search is not None:
            self.search.start(self.run)
        if self.controller is not None:
            self.controller.start(self.run)
        refuse(wrong_for_controller(self.setup))
        for message in doubts(self.setup):
            warn(message)
        check_disjoint(self.knobs, tensors=self._moves_values or self.engine.explores)
        if self.engine.step:
            self.engine.restart()

    # -- what looks at the run ---------------------------------------------------------------------

    def _watch(self) -> None:
        """Measurements and a search are given the run, and may refuse it.

        They belong to the controller, which the engine has: they are not given what holds that."""
        sets = self.replicas.sets(self.trained)
        masters = [masters_of(self.optimizer, self.trained, place) for place in range(len(sets))]
        self.panel.watch(Watched(self.optimizer, sets, masters, self.engine.clock))
        if self.search is None:
            return
        if len(self.replicas.local) > 1:
            raise ValueError(
                "AutoLR trains copies of the run, for which several replicas in one process are of "
                "no use: leave replicas out"
            )
        shares, refreshes = self.sync.gradients == "shared", self.sync.refresh is not None
        self.search.attach(
            Searched(
                self.search.model, self.optimizer, self.replicas, self.schedule.peak_rates, shares,
                self.fan_out.aside, refreshes, self.schedule.find_doubt,
            )
        )  # fmt: skip
        self.search.done = self.search.done or self.engine.step > 0  # the first steps are over

    def _models(self) -> list[nn.Module]:
        """Those that are known to hold the parameters."""
        searched = [] if self.search is None else [self.search.model]
        buffers = [self.sync.buffers] if isinstance(self.sync.buffers, nn.Module) else []
        return [*self.panel.modules, *searched, *buffers]

    def _on_cycle_start(self) -> None:
        """Before the first optimizer step after an average."""
        self.agreement.look()
        self.weights.on_cycle_start()
        if self.search is not None:
            self.search.before_first_step()
