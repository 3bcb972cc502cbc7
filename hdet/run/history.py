"""What is said of a cycle: one record of plain data, the same on every rank but for its own times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.engine import CycleOutcome, Engine
from ..core.plan import Moment, Plan
from ..core.replay import recorded
from ..core.rules import PROBE
from ..schedule import Schedule

__all__ = ["cycle_record"]


def cycle_record(
    engine: Engine,
    schedule: Schedule,
    outcome: CycleOutcome,
    moment: Moment,
    plan: Plan,
    *,
    losses: Sequence[float | None],
    scores: Mapping[str, Sequence[Sequence[float]]],
    rolled_back: bool,
    notes: Sequence[str],
    probe_ms: float,
    converge_ms: float,
    trial: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """After `Engine.close` or `Engine.roll_back`, and `Schedule.write`. Keys:

    - event ("cycle"), cycle (from 0), step (optimizer steps);
    - by knob: values (base value in force from now on), scheduled (the untouched schedule's), corrections, slopes, errors (in the
      controller's own unit, nats per unit of ln rho under probe and line; None where none was found), t, multipliers ([N], of the cycle that ended);
    - by replica: losses (mean training loss, None if it must not count), probe (mean probe loss; None without one);
    - left_out (replicas without a vote); rolled_back (was the cycle taken back?), rollbacks and diverged_total (counts since step 0:
      cycles taken back, replicas left out of an average);
    - record: all that the controller was asked and told, and what it said (`hdet.core.replay.recorded`), from which `replay` decides again;
    - trial: what an `AutoLR` has measured in this cycle (`hdet.trial.rule.RateInterval.to_dict`); None: nothing;
    - converge_ms, probe_ms (milliseconds on this rank; a line search counts as a probe), notes (text).
    """

    def by_knob(values: Iterable[Any]) -> dict[str, Any]:
        return dict(zip((knob.name for knob in schedule.knobs), values, strict=True))

    scheduled = schedule.values()
    return {
        "event": "cycle",
        "cycle": outcome.cycle,
        "step": engine.step,
        "values": by_knob(schedule.base_values()),
        "scheduled": by_knob(scheduled),
        "corrections": by_knob(engine.corrections),
        "slopes": by_knob(d.slope for d in outcome.decisions),
        "errors": by_knob(d.error for d in outcome.decisions),
        "t": by_knob(d.t for d in outcome.decisions),
        "multipliers": by_knob(outcome.multipliers),
        "losses": list(losses),
        "probe": [_finite_mean(row) for row in scores[PROBE]] if PROBE in scores else None,
        "left_out": outcome.left_out,
        "rolled_back": rolled_back,
        "rollbacks": engine.rollbacks,
        "diverged_total": engine.diverged_total,
        "converge_ms": converge_ms,
        "probe_ms": probe_ms,
        "trial": trial,
        "notes": [*notes, *outcome.notes],
        "record": recorded(moment, plan, outcome, engine.moment if rolled_back else None),
    }


def _finite_mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
