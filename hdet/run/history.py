"""What is said of a cycle: one record of plain data, the same on every rank but for its own
times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..controllers.probe_rule import PROBE
from ..core.engine import CycleOutcome, Engine
from ..core.replay import record_of
from ..schedule import Schedule

__all__ = ["cycle_record"]


def cycle_record(
    engine: Engine,
    schedule: Schedule,
    outcome: CycleOutcome,
    *,
    scores: Mapping[str, Sequence[Sequence[float]]],
    notes: Sequence[str],
    **more: Any,
) -> dict[str, Any]:
    """After `Engine.close` or `Engine.roll_back`, and `Schedule.write`. docs/index.md has the keys;
    ``more``: those that the Ensemble knows (losses, trial, searching, converge_ms, probe_ms)."""
    columns: dict[str, Iterable[Any]] = {
        "values": schedule.base_values(),
        "scheduled": schedule.values(),
        "corrections": engine.corrections,
        "slopes": [decision.slope for decision in outcome.decisions],
        "errors": [decision.error for decision in outcome.decisions],
        "t": [decision.t for decision in outcome.decisions],
        "multipliers": outcome.multipliers,
    }
    names = [knob.name for knob in schedule.knobs]
    return {
        "event": "cycle",
        "cycle": outcome.cycle,
        "step": engine.step,
        **{key: dict(zip(names, column, strict=True)) for key, column in columns.items()},
        "probe": [_finite_mean(row) for row in scores[PROBE]] if PROBE in scores else None,
        "left_out": outcome.left_out,
        "rolled_back": outcome.rolled_back,
        "rollbacks": engine.rollbacks,
        "diverged_total": engine.diverged_total,
        **more,
        "notes": [*notes, *outcome.notes],
        "record": record_of(outcome),
    }


def _finite_mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
