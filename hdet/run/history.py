"""What is said of a run: the records of its cycles, and lines of text."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from ..logging import CycleRecord
from .setup import Setup

__all__ = ["Records"]

_LOG = logging.getLogger("hdet")


# generic from Python 3.11 on only
class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows lines on standard error where nobody has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # which may be another one by now
            super().emit(record)


_LOG.addHandler(_Console())
if _LOG.level == logging.NOTSET:
    _LOG.setLevel(logging.INFO)


class Records:
    """Gives each cycle's record to ``log``, and lines of text to ``tell``: notes, and what the
    controller reports, each sentence once.

    By default the first rank's notes are logged at the level INFO, everything else at DEBUG.
    """

    def __init__(self, run: Setup) -> None:
        self.engine, self.search, self.log = run.engine, run.search, run.log
        self.tell: Callable[[str], object] | None = None
        """A framework's log may stand here."""
        self.history = deque[CycleRecord](maxlen=1000)
        self._last_reports, self._told = dict[str, str](), set[str]()

    def add(self, record: CycleRecord) -> None:
        self.history.append({**record, "record": {}})
        for note in record["notes"]:
            if note not in self._told:
                self.tell_note(note)
        self._told.clear()
        self.tell_report()
        if self.log is not None:
            self.log(record, self.engine.step)

    def report(self) -> str:
        """See `hdet.Ensemble.report`."""
        controller = self.engine.controller
        reports = [one.report() for one in (self.search, controller) if one is not None]
        if said := "; then: ".join(filter(None, reports)):
            return said
        if controller is None:
            return "no controller: nothing moves the values of the schedule"
        moved = [f"{value.name} {value.correction:.4g}" for value in self.engine.values]
        return f"{controller.name}: corrections of the schedule: {', '.join(moved)}"

    def tell_note(self, note: str) -> None:
        """At once, what the next record will have among its notes."""
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        tell = self.tell or (_LOG.info if is_first else _LOG.debug)
        where = f", step {self.engine.step}" if self.engine.step else ""
        tell(f"hdet{where}: {note}")
        self._told.add(note)

    def tell_report(self) -> None:
        for one in (self.search, self.engine.controller):
            if one is None:
                continue
            report, before = one.report(), self._last_reports.get(one.name)
            if report not in ("", before):
                # Whoever shows no INFO would wait for one that does nothing from the start on.
                is_idle = self.engine.step == 0 and one.idle
                tell = _LOG.warning if is_idle else self.tell or _LOG.debug
                tell(f"hdet, {one.name}: {report}")
            self._last_reports[one.name] = report
