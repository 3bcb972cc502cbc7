"""A run's description, checked and completed before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..converge.sync import Sync
from ..core.clock import Clock, QuadraticPeriod
from ..core.divergence import Divergence
from ..core.engine import Engine
from ..core.evidence import Run
from ..core.validate import refuse, warn, whole
from ..knobs import LearningRate, bind_all, check_disjoint
from ..replicas import Replicas
from ..replicas.refusals import wrong_sharding
from ..schedule import Schedule
from . import compatibility as rules
from .mistakes import find_lost_state
from .replica_parameters import check_tied
from .setup import Setup

__all__ = ["prepare"]


def prepare(given: Setup) -> Setup:
    """Checks it, and makes what belongs to it. The optimizer is only read.

    Raises:
        TypeError, ValueError: what cannot be used.
    """
    optimizer, knobs = given.optimizer, [LearningRate()] if given.knobs is None else given.knobs
    sync, divergence = given.sync or Sync(), given.divergence or Divergence()
    run = replace(given, knobs=knobs, sync=sync, divergence=divergence)
    rules.check_arguments(run)
    tensors = rules.averaged_tensors(run)
    check_tied(sync.tied, tensors)
    replicas = Replicas.of_shards(tensors) if given.replicas is None else given.replicas
    decides = run.moves_values or divergence.rollback is not None
    refuse(wrong_sharding(optimizer, tensors, replicas, sync.gradients, decides=decides))
    replicas = Replicas.default() if replicas is None else replicas
    if replicas.count > 1 or sync.converge.moves_equal:
        rules.check_averaged(tensors)
    run = replace(run, tensors=tensors, replicas=replicas, knobs=bind_all(knobs, optimizer))
    refuse(rules.wrong_settings(run))
    if run.total_steps is not None:
        whole(run.total_steps, "total_steps", of="steps")
    schedule = Schedule(run.scheduler, run.knobs, run.total_steps)
    grows = isinstance(sync.every, QuadraticPeriod)
    needs_peaks = run.moves_values or grows or any(knob.grid.values for knob in run.knobs)
    if needs_peaks and run.scheduler is not None:
        schedule.simulate(optimizer, [(run.scheduler, 1)])
    refuse(rules.wrong_grids(run))
    schedule.doubt = find_lost_state(optimizer, run.scheduler, run.search is not None)
    length = schedule.total_steps
    if given.sync is None and length and run.search is not None and run.controller is None:
        # Where a cycle ends, nothing happens but a record: often enough for a curve.
        run = replace(run, sync=Sync(min(sync.shortest, max(20, length // 50))))
    return _with_engine(replace(run, schedule=schedule))


def _with_engine(run: Setup) -> Setup:
    """Search and controller have started."""
    count, searches = run.replicas.count, run.search is not None
    every, total = run.sync.every, run.schedule.total_steps
    period = every if isinstance(every, QuadraticPeriod) else None
    if period is not None and total is None:
        raise ValueError(f"every is {every!r}, whose cycles may outlast the run: pass total_steps")
    clock = Clock(run.sync.shortest, run.warmup_steps, total, period, _begin_of(run))
    engine = Engine(
        run.knobs, count, clock, run.controller, run.seed, rules.choose_design(run), searches,
        partial(run.schedule.coming_rate, run.optimizer),
    )  # fmt: skip
    engine.step = max(0, int(run.schedule.step or 0))
    floors = [knob.floor() for knob in run.knobs]
    facts = Run(clock, engine.knobs, count, floors, run.is_local, searches, run.seed)
    for one in (run.search, run.controller):
        if one is not None:
            one.start(facts)
    refuse(rules.wrong_for_controller(run))
    for message in rules.doubts(run):
        warn(message)
    check_disjoint(run.knobs, tensors=run.moves_values or engine.explores)
    engine.is_searching = searches and engine.step == 0  # else the first steps are over
    if engine.step:
        engine.restart()
    engine.multipliers()  # refuses a plan of another run
    return replace(run, engine=engine, facts=facts)


def _begin_of(run: Setup) -> int:
    """`Sync.begin`, in steps. Raises ValueError for one that is not within the run."""
    begin, total = run.sync.begin, run.schedule.total_steps
    if isinstance(begin, float):
        if total is None:
            raise ValueError(f"begin={begin} is a part of the run: pass total_steps, or a step")
        begin = max(1, round(begin * total))
    if total is not None and begin >= total:
        raise ValueError(
            f"begin is step {begin} of {total}, so gradients would never be local: begin earlier"
        )
    return begin
