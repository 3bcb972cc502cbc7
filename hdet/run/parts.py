"""The parts of an Ensemble, made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..controllers.measurement import Watched
from ..converge.sync import Sync
from ..core.clock import Clock
from ..core.controller import Controller
from ..core.divergence import Divergence
from ..core.engine import Engine, KnobSpec
from ..core.evidence import Run
from ..knobs import Bound, Knob, bind_all, check_disjoint
from ..optim.snapshot import masters_of
from ..replicas import Replicas
from ..replicas.refusals import check_sharding
from ..schedule import Schedule, Scheduler
from ..trial.searched import Searched
from .compatibility import (
    averaged_tensors,
    check_controller,
    checked_design,
    warn_of_idle_run,
)
from .cycles import Cycles
from .fan_out import FanOut
from .faults import Guard
from .measurements import Panel
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
        knobs: Sequence[Knob],
        controller: Controller | None,
        replicas: Replicas | None,
        sync: Sync,
        divergence: Divergence,
        design: str | None,
        warmup_steps: int,
        total_steps: int | None,
        seed: int,
    ) -> None:
        self.optimizer, self.sync, self.divergence = optimizer, sync, divergence
        self.controller = controller
        self.tensors = averaged_tensors(optimizer, sync.buffers)
        check_tied(sync.tied, self.tensors)
        self.replicas = self._replicas(replicas)
        self.knobs: list[Bound] = bind_all(knobs, optimizer)
        self.design = checked_design(design, self.knobs, optimizer, self.replicas, controller, sync)
        self.schedule = Schedule(scheduler, self.knobs, total_steps)
        warn_of_idle_run(optimizer, self.schedule, total_steps)
        self._make_engine(warmup_steps, seed)
        self.during = Guard(self.replicas, self.engine)
        self.panel = Panel(self.engine, self.during)
        self.search: Any = None if controller is None else controller.search
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        first, is_local = self.replicas.local[0], sync.gradients == "local"
        self.fan_out = FanOut(optimizer, self.schedule, first, self._on_cycle_start, is_local)
        self._watch()
        models = self._models()
        self.weights = ReplicaWeights(
            self.tensors, optimizer, self.replicas, sync, divergence, models
        )
        self.agreement = Agreement(
            self.engine, self.tensors, optimizer, self.schedule, self.replicas, models, sync,
            divergence,
        )  # fmt: skip
        self.cycles = Cycles(
            self.engine, self.schedule, self.fan_out, self.weights, self.panel, divergence,
            self.during, is_local,
        )  # fmt: skip

    def attach(self) -> None:
        """Let the optimizer's step be the run's."""
        self.fan_out.attach()
        self.replicas.attach(self.optimizer)

    # -- checked -----------------------------------------------------------------------------------

    def _replicas(self, given: Replicas | None) -> Replicas:
        replicas = Replicas.of_shards(self.tensors) if given is None else given
        decides = self.controller is not None or self.divergence.rollback is not None
        gradients = self.sync.gradients
        check_sharding(self.optimizer, self.tensors, replicas, gradients, decides=decides)
        return Replicas.default() if replicas is None else replicas

    def _make_engine(self, warmup_steps: int, seed: int) -> None:
        specs = [
            KnobSpec(knob.name, knob.spread, knob.scale, rate=knob.key == "lr")
            for knob in self.knobs
        ]
        clock, count = (
            Clock(self.sync.every, warmup_steps, self.schedule.total_steps),
            self.replicas.count,
        )
        self.engine = Engine(specs, count, clock, self.controller, seed, self.design)
        self.engine.step = max(0, int(self.schedule.step or 0))
        is_local = self.sync.gradients == "local"
        self.run = Run(clock, specs, count, self.schedule.floors(), local=is_local)
        if self.controller is not None:
            self.controller.start(self.run)
            check_controller(self.controller, self.run)
        moves = self.controller is not None or self.engine.explores
        check_disjoint(self.knobs, tensors=moves)
        if self.engine.step:
            self.engine.restart()

    # -- what looks at the run ---------------------------------------------------------------------

    def _watch(self) -> None:
        """Measurements and a search are given the run, and may refuse it."""
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
                self.search.model, self.optimizer, self.replicas, self._peak_rates, shares,
                self.fan_out.aside, refreshes,
            )
        )  # fmt: skip
        self.search.done = self.search.done or self.engine.step > 0  # the first steps are over

    def _peak_rates(self) -> list[tuple[int, float]]:
        """(parameter group, its schedule's peak with the correction that was decided)."""
        peaks = zip(self.knobs, self.schedule.peaks(), self.engine.corrections, strict=True)
        return [
            (index, knob.scale.corrected(peak, correction))
            for knob, own, correction in peaks
            if knob.key == "lr"
            for index, peak in zip(knob.indices, own, strict=True)
        ]

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
