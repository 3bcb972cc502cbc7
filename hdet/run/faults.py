"""Lost replicas: a collective that fails becomes one `ReplicaLost` on every rank that is left.

A backend only says which connection broke. So each survivor writes a key to the default store,
which needs no collective, and looks for the others' keys (docs/faults.md).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ..core.engine import Engine
from ..replicas import Replicas
from ..replicas.layout import brief

__all__ = ["PATIENCE_S", "Guard", "ReplicaLost", "is_communication_error"]

PATIENCE_S = 3.0
"""Seconds for which a rank looks for the others' keys. It raises at most one second later."""


class ReplicaLost(RuntimeError):
    """A collective failed or timed out because ranks are gone or late.

    Raised from the backend's own error. Afterwards the process group must not be used: other ranks
    have left the collective at other places. An `Ensemble` refuses to.

    Attributes:
        phase: what was under way, e.g. "average", "statistics", "training step", "checkpoint".
        cycle, step: of this rank when it failed.
        lost: ranks of the default group that did not answer, ascending: they have ended, are late,
            or still wait in the collective. If there are none, one was late, or a connection broke.
    """

    def __init__(
        self, message: str, phase: str = "", cycle: int = 0, step: int = 0, lost: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.phase, self.cycle, self.step, self.lost = phase, cycle, step, tuple(lost)


class Guard:
    """Turns errors of communication into `ReplicaLost`: ``with guard("average"): ...``.

    Every other error passes unchanged. After a `ReplicaLost` its Ensemble refuses to go on.
    """

    def __init__(self, replicas: Replicas, engine: Engine) -> None:
        self._replicas, self._engine = replicas, engine
        self.lost: ReplicaLost | None = None
        if _is_distributed():
            with suppress(Exception):  # restarted workers may find the same store
                dist.distributed_c10d._get_default_store().delete_key(_answer(dist.get_rank()))

    def check_whole(self) -> None:
        """Raises RuntimeError if a replica was lost."""
        if self.lost is not None:
            raise RuntimeError(
                f"this Ensemble has lost a replica in cycle {self.lost.cycle} (step "
                f"{self.lost.step}); its parameters may be half averaged: "
                "start all ranks again from the last checkpoint"
            ) from self.lost

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.check_whole()
        self._replicas.check_group()
        self._replicas.moment = f"step {self._engine.step}"
        try:
            if phase in ("agreement", "checkpoint"):
                self._replicas.meet(phase)
            yield
        except ReplicaLost as lost:  # of a guard inside
            self.lost = lost
            raise
        except RuntimeError as error:
            if not (_is_distributed() and is_communication_error(error)):
                raise
            self.lost = self._name_missing(phase)
            raise self.lost from error

    def _name_missing(self, phase: str) -> ReplicaLost:
        cycle, step = self._engine.cycle, self._engine.step
        ranks = [rank for members in self._replicas.ranks for rank in members]
        call = RollCall(ranks or range(dist.get_world_size()))
        call.start()
        call.join(PATIENCE_S + 1)
        what, lost = self._read_call(call)
        asked = f", in {self._replicas.purpose}" if self._replicas.purpose else ""
        message = (
            f"{phase} failed in cycle {cycle} (step {step}){asked}: {what}; this is "
            f"{self._named([call.own])}. If no process was killed: does every rank have as many "
            "batches, and call step(), its closure and converge() alike? Parameters may be half "
            "averaged: end this process and start all ranks again from the last checkpoint "
            "(torchrun --max-restarts does that)"
        )
        return ReplicaLost(message, phase, cycle, step, lost)

    def _read_call(self, call: RollCall) -> tuple[str, list[int]]:
        """Words, and the `ReplicaLost`'s ``lost``."""
        if not call.has_store:
            silent = "the rendezvous store does not answer"
            if call.own == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return f"{silent}, so who is lost is not known", []
            holder = f"lost {self._named([0])}, which usually holds it, maybe after another loss"
            return f"{silent}: {holder}", [0]
        lost = sorted(set(call.ranks) - call.present)
        if not lost:
            return "every rank answers: one, maybe this one, was late, or a connection broke", []
        return f"lost or late: {self._named(lost)} (no answer within {PATIENCE_S:g} s)", lost

    def _named(self, ranks: Sequence[int]) -> str:
        """``ranks 4-5, 12 (replicas 1, 3)``"""
        members = enumerate(self._replicas.ranks)
        owners = [replica for replica, theirs in members if not set(ranks).isdisjoint(theirs)]
        text = f"rank{'s' * (len(ranks) > 1)} {brief(ranks)}"
        return f"{text} (replica{'s' * (len(owners) > 1)} {brief(owners)})" if owners else text


# -- which errors ----------------------------------------------------------------------------------

_BROKEN = re.compile(
    r"""gloo/.*(timed?\ ?out|connection|read\ error|write\ error|broken\ pipe|socket|closed)
    |NCCL\ communicator\ (was|encountered) |NCCL\ error.*(remote|network|system)
    |connection\ (was\ )?(closed|reset|refused|aborted|lost) |broken\ pipe |socket\ timeout
    |(collective|store|barrier|allreduce|allgather|broadcast).{0,80}(timed\ out|timeout)
    |wait\ timeout\ after |monitoredBarrier |pair\ closure |Connectivity\ to\ remote\ rank""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
_MISUSE = re.compile(
    r"out of memory|invalid usage|invalid argument|duplicate gpu|mismatch", re.IGNORECASE
)


def is_communication_error(error: RuntimeError) -> bool:
    """Does this error say that another rank cannot be reached?

    True for torch's ``DistError`` family, and for a plain RuntimeError whose text is gloo's, NCCL's
    or a socket's complaint of a broken connection or a timeout. False for memory and misuse, and
    for subclasses of RuntimeError, whose authors have said already what it is.
    """
    text = str(error)
    if _MISUSE.search(text):
        return False
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and _BROKEN.search(text) is not None
    )


# -- the roll call ---------------------------------------------------------------------------------


class RollCall(threading.Thread):
    """Writes this rank's key and looks for those of ``ranks``, for `PATIENCE_S`.

    A store whose host is frozen blocks for minutes, so whoever has waited long enough reads the
    attributes while the thread is still asking.

    Attributes:
        has_store: does the store answer?
        present: ranks that have answered, and this one.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.ranks, self.own = ranks, dist.get_rank()
        self.has_store = False
        self.present = {self.own}

    def run(self) -> None:
        others = [rank for rank in self.ranks if rank != self.own]
        answers = list(map(_answer, others))
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(_answer(self.own), "")
            self.has_store = True
            deadline = time.monotonic() + PATIENCE_S
            while not store.check(answers) and time.monotonic() < deadline:
                time.sleep(PATIENCE_S / 10)
            self._find_present(store, others)
        except Exception:  # noqa: BLE001 - whatever it is must not hide what has happened
            self.has_store = False

    def _find_present(self, store: Any, ranks: list[int]) -> None:
        """By halves: with m of n missing about m log n messages, for the store has one process."""
        if store.check(list(map(_answer, ranks))):
            self.present.update(ranks)
        elif len(ranks) > 1:
            middle = len(ranks) // 2
            self._find_present(store, ranks[:middle])
            self._find_present(store, ranks[middle:])


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _answer(rank: int) -> str:
    """Says no more: survivors may be a cycle apart, and torchrun's agents count restarts alone."""
    return f"hdet/roll/{rank}"
