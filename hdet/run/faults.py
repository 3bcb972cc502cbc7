"""Lost replicas: an error of communication becomes one error that names replica, cycle and phase
(docs/faults.md).

A collective that fails says which connection broke, not who is missing, and every survivor says
something else. `during` catches it and calls the roll through the default store, which needs no
collective.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..replicas import Replicas
from ..replicas.layout import brief

__all__ = ["PATIENCE_S", "Guard", "ReplicaLost", "during", "is_communication_error"]

PATIENCE_S = 3.0
"""seconds for which a rank waits for the others in a roll call; it is over at most one second
later, whatever the store does"""

_MOST = 8
"""ranks and replicas named one by one"""
_WHILE = {
    "agreement": "while the ranks' settings were compared",
    "average": "while averaging",
    "checkpoint": "while saving a checkpoint",
    "probe": "during the probe",
    "statistics": "while gathering the losses",
    "training step": "in a training step",
}
_REMEDY = (
    "This process group cannot be used any more, and parameters may be half averaged: "
    "end this process and start all ranks again from the last checkpoint (torchrun --max-restarts "
    "does that)"
)


class ReplicaLost(RuntimeError):
    """A collective failed or timed out because ranks are gone or late.

    Raised from the backend's own error.

    Attributes:
        phase: what was under way, e.g. "average", "statistics", "training step", "checkpoint".
        cycle, step: of this rank when it failed.
        lost: ranks of the default group that are gone, ascending: those whose processes have ended,
            and those on other hosts that did not answer the roll call. Empty if there are none:
            then a rank was late, or a connection between two broke.
        late: ranks known to run that answered late or not at all; among them may be some that still
            wait in the collective.

    Afterwards the process group must not be used: other ranks have left the collective at other
    places. An `Ensemble` refuses to.
    """

    def __init__(
        self,
        message: str,
        phase: str = "",
        cycle: int = 0,
        step: int = 0,
        lost: Sequence[int] = (),
        late: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.phase, self.cycle, self.step, self.lost, self.late = (
            phase,
            cycle,
            step,
            tuple(lost),
            tuple(late),
        )


@contextmanager
def during(phase: str, replicas: Replicas, where: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Turn an error of communication inside into `ReplicaLost`; every other error passes unchanged,
    a nested `ReplicaLost` too.

    Args:
        phase: what is done inside, for the message.
        replicas: who takes part. Where torch.distributed is not initialised nothing is caught.
        where: gives (cycle, step), asked when something has failed.

    Guarantees: without an error the only cost is one small ``store.set`` per process group. With
    one, `ReplicaLost` is raised after at most `PATIENCE_S` + 1 seconds, and nothing else: a store
    that is gone or does not answer is named in it.
    """
    _announce(replicas)
    try:
        yield
    except RuntimeError as error:
        if not (_distributed() and is_communication_error(error)):
            raise
        raise _lost(phase, replicas, where) from error


class Guard:
    """`during` for one Ensemble, which refuses to go on after a `ReplicaLost`: ``with
    guard("average"): ...``."""

    def __init__(self, replicas: Replicas, where: Callable[[], tuple[int, int]]) -> None:
        self._replicas, self._where = replicas, where
        self.lost: ReplicaLost | None = None

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
        try:
            with during(phase, self._replicas, self._where):
                yield
        except ReplicaLost as lost:
            self.lost = lost
            raise


# -- which errors ----------------------------------------------------------------------------------

_BROKEN = re.compile(
    r"gloo/.*(timed? ?out|connection|read error|write error|broken pipe|socket|closed|unreachable)"
    r"|NCCL communicator (was|encountered)|NCCL error.*(remote|network|system)|Watchdog caught "
    r"collective operation timeout"
    r"|connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|socket timeout"
    r"|(collective|store|barrier|allreduce|allgather|broadcast).{0,80}(timed out|timeout)|wait "
    r"timeout after|monitoredBarrier"
    r"|pair closure|Connectivity to remote rank",
    re.IGNORECASE | re.DOTALL,
)
_NOT_LOST = re.compile(
    r"out of memory|invalid usage|invalid argument|duplicate gpu|mismatch", re.IGNORECASE
)


def is_communication_error(error: BaseException) -> bool:
    """Does this error say that another rank cannot be reached?

    True for torch's ``DistError`` family, and for a plain RuntimeError whose text is gloo's, NCCL's
    or a socket's complaint of a broken connection or a timeout. False for memory, misuse
    (mismatched sizes, invalid arguments), subclasses of RuntimeError from elsewhere, hdet's own
    errors, and OSError, which data loading raises and torch's collectives do not.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _NOT_LOST.search(text):
        return False
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and bool(_BROKEN.search(text))


# -- the error -------------------------------------------------------------------------------------


def _lost(phase: str, replicas: Replicas, where: Callable[[], tuple[int, int]]) -> ReplicaLost:
    cycle, step = -1, -1
    found: _Found = "the roll could not be called, so who is lost is not known", [], []
    with suppress(Exception):  # whatever goes wrong here must not hide what has happened
        cycle, step = where()
    with suppress(Exception):
        found = _call_roll(replicas, PATIENCE_S)
    text, lost, late = found
    doing = _WHILE.get(phase, f"in the phase {phase!r}")
    text = (
        f"cycle {cycle} (step {step}), {doing}: {text}; this is "
        f"{_named([dist.get_rank()], replicas)}. {_REMEDY}"
    )
    return ReplicaLost(text, phase, cycle, step, lost, late)


_Found = tuple[str, list[int], list[int]]
"""What a roll call says: text for people, and the `ReplicaLost`'s ``lost`` and ``late``."""


def _call_roll(replicas: Replicas, patience: float) -> _Found:
    store = dist.distributed_c10d._get_default_store()
    ranks = [rank for members in replicas.ranks for rank in members] or list(
        range(dist.get_world_size())
    )
    call = RollCall(store, dist.get_rank(), ranks, patience)
    thread = threading.Thread(
        target=call.run, daemon=True
    )  # a store whose host is frozen blocks for minutes: not us
    thread.start()
    thread.join(patience + 1.0)
    if thread.is_alive():
        return _without_store(store, replicas, f"does not answer within {patience + 1:g} s")
    if call.error is not None:
        return _without_store(store, replicas, "is gone")
    ended, running, unknown = (
        [one for one in call.absent if one.fate == fate] for fate in ("ended", "running", "unknown")
    )
    sentences = [
        _sentence(ended, replicas, "gone", "ended: pid {}"),
        _sentence(unknown, replicas, "gone or late", f"no answer within {patience:g} s"),
        _sentence(
            running,
            replicas,
            "late, or still waiting in the collective" if ended or unknown else "late",
            "still running: pid {}",
        ),
    ]
    if call.tardy:
        sentences.append(
            f"{_named(call.tardy, replicas)} came late, but within {patience:g} s after this rank"
        )
    if call.behind > max(1.0, patience / 2):
        sentences.append(
            f"the other ranks had given up {call.behind:.1f} s before this one came: it was late"
        )
    text = (
        ", ".join(filter(None, sentences))
        or "every rank still answers: one was late, or a connection between two of them broke"
    )
    return (
        text,
        sorted(one.rank for one in ended + unknown),
        sorted([one.rank for one in running] + call.tardy),
    )


def _sentence(absent: Sequence[_Absent], replicas: Replicas, state: str, reason: str) -> str:
    if not absent:
        return ""
    pids = ", ".join(str(one.pid) for one in absent[:_MOST])
    named = _named([one.rank for one in absent], replicas)
    return f"{named} {'are' if ' and ' in named else 'is'} {state} ({reason.format(pids)})"


def _without_store(store: Any, replicas: Replicas, how: str) -> _Found:
    """Nothing can be asked.

    By torch's convention rank 0 holds a TCP store, unless torchrun's agent does.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    place = f" at {store.host}:{store.port}" if hasattr(store, "host") else ""
    if (
        not place
        or dist.get_rank() == 0
        or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        return f"the rendezvous store{place} {how}, so who is lost is not known", [], []
    text = f"{_named([0], replicas)} is gone: the rendezvous store{place}, which it holds, {how}; "
    return (
        text + "it may have ended because of an earlier loss, which its own message names then",
        [0],
        [],
    )


def _named(ranks: Iterable[int], replicas: Replicas) -> str:
    """``replica 1 (ranks 4-5) and replica 3 (rank 12)``; of many the first."""
    owner = {rank: r for r, members in enumerate(replicas.ranks) for rank in members}
    found: dict[int | None, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(owner.get(rank), []).append(rank)
    names = []
    for replica, members in list(found.items())[:_MOST]:
        listed = f"rank{'s' * (len(members) > 1)} {brief(members)}"
        names.append(listed if replica is None else f"replica {replica} ({listed})")
    return " and ".join(names) + (
        f" and {len(found) - _MOST} more replicas" if len(found) > _MOST else ""
    )


# -- the roll call ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Absent:
    """A rank that has not answered.

    ``fate``: "ended", "running", or "unknown" where its process cannot be looked at from here.
    """

    rank: int
    fate: str = "unknown"
    pid: int = 0


class RollCall:
    """Each rank that has noticed writes a key and looks who else does.

    Runs in a thread of its own; attributes are the result.

    Attributes:
        absent: ranks that did not answer in time.
        tardy: ranks that answered only in the second half of it.
        behind: seconds for which all others had waited when this rank came, by the hosts' clocks; 0
            if they had not.
        error: what the store raised, if anything.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], patience: float) -> None:
        self.store, self.rank, self.ranks, self.patience = store, rank, ranks, patience
        self.absent: list[_Absent] = []
        self.tardy: list[int] = []
        self.behind = 0.0
        self.error: Exception | None = None
        self._last_question = 0.0

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - it is reported, not raised: this is a thread
            self.error = error

    def _run(self) -> None:
        others = [rank for rank in self.ranks if rank != self.rank]
        if others and self.store.check(list(map(_answer, others))):
            self.behind = time.time() - max(
                float(self.store.get(_answer(rank))) for rank in others[:_MOST]
            )
        self.store.set(_answer(self.rank), repr(time.time()))
        slow = self.wait(others, self.patience / 2)
        missing = self.wait(slow, self.patience / 2)
        self.tardy = [rank for rank in slow if rank not in missing]
        self.absent = [_fate(self.store, rank) for rank in missing[:_MOST]] + [
            _Absent(rank) for rank in missing[_MOST:]
        ]

    def wait(self, ranks: list[int], seconds: float) -> list[int]:
        """Those of ``ranks`` that have not answered after at most so long."""
        end, pause = time.monotonic() + seconds, 0.01
        self._last_question = end + 0.25
        while ranks and not self.store.check(
            list(map(_answer, ranks))
        ):  # one message, however many they are
            if time.monotonic() >= end:
                return self._missing(ranks)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, 0.2)
        return []

    def _missing(self, ranks: list[int]) -> list[int]:
        """By halves: with m of n missing about m log n messages; where that takes too long, whoever
        has not been asked for."""
        if time.monotonic() > self._last_question:
            return ranks
        if self.store.check(list(map(_answer, ranks))):
            return []
        if len(ranks) == 1:
            return ranks
        middle = len(ranks) // 2
        return self._missing(ranks[:middle]) + self._missing(ranks[middle:])


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


# -- processes of this host ------------------------------------------------------------------------

_announced: weakref.WeakSet[Any] = weakref.WeakSet()


def _announce(replicas: Replicas) -> None:
    """Leave in the store where this rank's process is, so that others on this host can see later
    whether it still runs."""
    if not (replicas.ranks and _distributed()):
        return
    with suppress(Exception):  # an extra, never a reason to fail
        store = dist.distributed_c10d._get_default_store()
        if store not in _announced:
            _announced.add(store)
            store.set(
                _here(dist.get_rank()), json.dumps([_host(), os.getpid(), _started(os.getpid())])
            )
            store.delete_key(
                _answer(dist.get_rank())
            )  # a restart of the workers may find the same store


def _here(rank: int) -> str:
    return f"hdet/here/{rank}"


def _answer(rank: int) -> str:
    """Nothing else is in the key: survivors may be a cycle apart, or in different Ensembles, and
    torchrun's agents count restarts each for themselves."""
    return f"hdet/roll/{rank}"


def _fate(store: Any, rank: int) -> _Absent:
    with suppress(Exception):
        if store.check([_here(rank)]):
            host, pid, started = json.loads(store.get(_here(rank)))
            if host == _host() and started is not None:
                return _Absent(rank, "running" if _started(pid) == started else "ended", pid)
    return _Absent(rank)


def _host() -> list[str]:
    """Two processes with equal values see each other's process ids: one kernel, one namespace of
    ids."""
    with suppress(OSError):
        return [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return [socket.gethostname(), str(os.getpid())]  # nobody's but its own


def _started(pid: int) -> int | None:
    """When the process began, in ticks of the kernel's clock; None if there is no such process, or
    only its exit status."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None
