"""What was recorded of a run, decided again offline: the same, to the bit, or a list of where it is not."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from .controller import Controller
from .engine import CycleOutcome, ask_and_tell
from .evidence import Evidence
from .plan import Ending, Moment, Plan, Question

__all__ = ["recorded", "replay"]


def recorded(moment: Moment, plan: Plan, outcome: CycleOutcome, restarted: Moment | None) -> dict[str, Any]:
    """Of a cycle, as plain data: all that its controller was asked and told, and what it said. ``restarted``: of one that was taken back, when
    the next one begins."""
    return {
        "moment": asdict(moment),
        "plan": _plain(plan),
        "restarted": None if restarted is None else asdict(restarted),
        "evidence": None if outcome.evidence is None else outcome.evidence.to_dict(),
        "answers": outcome.answers,
        "decisions": [asdict(decision) for decision in outcome.decisions],
        "end": _plain(outcome.end),
    }


def replay(controller: Controller, records: Iterable[Mapping[str, Any]], state: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Decide once more, offline, what was decided in a run; yields a sentence for each difference.

    Args:
        controller: made as the run's was, and started (`Controller.start`) with ``ensemble.run``. It touches no tensor.
        records: the history records of a run's cycles in their order, also read from JSON. Or
            ``record["record"]`` of each (`recorded`), which has nothing of an `AutoLR`'s trial.
        state: of the controller, where the run was resumed before the first of them.
    """
    if state is not None:
        controller.load_state_dict(state)
    for n, line in enumerate(records):
        record = line.get("record", line)
        moment = Moment(**record["moment"])
        if n == 0 and (state is not None or moment.step):
            controller.restart(moment)
        where = f"cycle {moment.cycle}"
        if line.get("trial") is not None and controller.search is not None:
            yield from _differs(f"{where}: what the trial says", *controller.search.decided_again(line["trial"]))
        yield from _differs(f"{where}: plan", _plain(controller.plan(moment)), record["plan"])
        if record["restarted"] is not None:
            controller.restart(Moment(**record["restarted"]))
        if record["evidence"] is None:
            continue
        answers = deque(record["answers"])
        try:
            said, asked = ask_and_tell(controller, Evidence(**record["evidence"]), partial(_next, answers))
        except _NotAskedError as other:
            yield f"{where}: {other.args[0]!r} was not asked when this run was recorded, which has no answer for it"
            return
        yield from _differs(f"{where}: decisions", [asdict(decision) for decision in said.decisions], record["decisions"])
        yield from _differs(f"{where}: end", _plain(said.end), record["end"])
        if len(asked) != len(record["answers"]):
            yield f"{where}: {len(asked)} questions, {len(record['answers'])} recorded"


class _NotAskedError(Exception):
    """A question beyond those that were recorded."""


def _next(answers: deque[Any], question: Question) -> Any:
    if not answers:
        raise _NotAskedError(question)
    return answers.popleft()


def _plain(value: Plan | Ending | None) -> Any:
    """A dict with the name of its kind."""
    if value is None:
        return None
    plain = asdict(value)
    if isinstance(value, Plan):
        plain["end"] = _plain(value.end)
    return {"kind": type(value).__name__, **plain}


def _differs(what: str, now: Any, then: Any) -> Iterator[str]:
    """As JSON has them: tuples are lists there, and floats are written to the bit."""
    one, two = (json.dumps(value, sort_keys=True) for value in (now, then))
    if one != two:
        yield f"{what} differ: {one} now, {two} recorded"
