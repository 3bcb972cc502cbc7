"""What was recorded of a run, decided again offline: bitwise the same, or a list of differences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from .controller import Controller
from .engine import CycleOutcome
from .evidence import Evidence

__all__ = ["record_of", "replay"]


def record_of(outcome: CycleOutcome) -> dict[str, Any]:
    """All that the controller was given in a cycle, and what it said, as plain data."""
    return {
        "cycle": outcome.cycle,
        "begin": outcome.begin,
        "plan": asdict(outcome.plan),
        "rolled_back": outcome.rolled_back,
        "observed": outcome.observed,
        "evidence": None if outcome.evidence is None else asdict(outcome.evidence),
        "decisions": [asdict(decision) for decision in outcome.decisions],
    }


def replay(controller: Controller, records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Decide once more, offline, what was decided in a run; yields a sentence for each difference.

    Args:
        controller: made as the run's was, started (`Controller.start`) with ``ensemble.run``, and
            with its state loaded where the run was resumed before the first record.
        records: the history records of a run's cycles in their order, also read from JSON.

    Example::

        records, controller = [], hdet.SoftmaxController(decay=None)
        ensemble = hdet.Ensemble(
            optimizer,
            scheduler,
            controller=controller,
            log=lambda record, step: records.append(record),
        )
        ...  # train
        again = hdet.SoftmaxController(decay=None)
        again.start(ensemble.run)
        for difference in hdet.replay(again, records):
            print(difference)
    """
    for n, line in enumerate(records):
        record = line["record"]
        if n == 0 and record["begin"]:
            controller.restart()
        where = f"cycle {record['cycle']}"
        evidence = record["evidence"] and Evidence(**record["evidence"])
        if not record["observed"]:
            yield from _difference(f"{where}: plan", asdict(controller.plan()), record["plan"])
        if record["rolled_back"]:
            controller.restart()
        if evidence is None:
            continue
        if record["observed"]:
            controller.observe(evidence)
            continue
        decisions = [asdict(one) for one in controller.learn(evidence)]
        yield from _difference(f"{where}: decisions", decisions, record["decisions"])


def _difference(what: str, now: Any, then: Any) -> Iterator[str]:
    """As JSON has them: tuples are lists there, and floats are exact."""
    one, two = (json.dumps(value, sort_keys=True) for value in (now, then))
    if one != two:
        yield f"{what} differ: {one} now, {two} recorded"
