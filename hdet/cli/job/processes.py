"""Start one process per replica (or one for all), pass on what rank 0 reports, and leave no process behind whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from hdet.cli.job.place import Place
from hdet.cli.job.training import RunSpec
from hdet.owned_folder import remove_leftovers

WORKER = (sys.executable, "-m", "hdet.cli.job.worker")
GRACE_SECONDS = 0.5
"""how long after a failure the other processes may still report an earlier one"""


class WorkerError(RuntimeError):
    """A process failed; the message is its error in full."""


class Workers:
    """The processes of one job, as a context: inside it iterate over `events`, outside of it none is alive.

    Args:
        specs: runs, trained one after the other by the same processes; all with the same number of processes.
        device: ``cpu`` or ``cuda``, as `choose_device` found.
        locks: handles of the folders' locks: should this process be killed, they end with the last process that writes there.
    """

    def __init__(self, specs: Sequence[RunSpec], device: str, locks: Sequence[int] = ()) -> None:
        self._specs, self._device, self._locks = list(specs), device, list(locks)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[Connection, int] = {}
        """by connection to its process; without those that have ended"""
        self._failures: dict[int, tuple[float, str]] = {}
        """time and text, by rank"""

    def __enter__(self) -> Workers:  # noqa: PYI034 - Self needs Python 3.11
        self._scratch = tempfile.TemporaryDirectory(prefix="hdet-", ignore_cleanup_errors=True)
        try:
            count = self._specs[0].config.processes
            for rank in range(count):
                self._start(rank, count)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self, rank: int, count: int) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if count > 1:
            environment["OMP_NUM_THREADS"] = "1"  # they share the cores
        else:
            # All cores. Threads that spin while they wait would make the whole run several times slower beside other programs.
            environment.setdefault("OMP_WAIT_POLICY", "passive")
        if self._device == "cpu" and os.path.exists("/sys/class/net/lo"):
            # One machine only: a host name that does not resolve, a VPN or a firewall must not matter.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ours, theirs = Pipe()
        self._ranks[ours] = rank
        with theirs, open(self._log(rank), "wb") as log:
            command, handles = [*WORKER, str(theirs.fileno())], [*self._locks, theirs.fileno()]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, pass_fds=handles
            )
        self._processes.append(process)
        place = Place(rank, count, self._device if self._device == "cpu" else f"{self._device}:{rank}")
        with suppress(OSError):  # it died at once; events() says why
            ours.send((place, self._specs, Path(self._scratch.name).absolute()))

    def _log(self, rank: int) -> Path:
        return Path(self._scratch.name, f"log.{rank}")

    # -- while they run ----------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[dict[str, Any]]:
        """What rank 0 reports, until all processes have ended well. Raises WorkerError if one fails; the others end with the context."""
        for rank, message in self._messages():
            if isinstance(message, dict):
                yield message
            elif message is not None:
                self._failures[rank] = message
            elif self._processes[rank].wait():
                raise WorkerError(self._explain())

    def _messages(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """(rank, what its process has sent), None at its end; until all have ended, or nothing has come for ``timeout`` seconds."""
        while self._ranks and (ready := wait(self._ranks, timeout)):
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    yield self._ranks[connection], connection.recv()
                except (EOFError, OSError):
                    yield self._ranks.pop(connection), None

    def _explain(self) -> str:
        """The error of the process that failed first: the others only complain that it is gone."""
        time.sleep(GRACE_SECONDS)
        self._failures |= {rank: message for rank, message in self._messages(timeout=0) if isinstance(message, tuple)}
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code and rank not in self._failures:  # no time to say anything: killed, or it could not even start
                why = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                log = self._log(rank).read_text(encoding="utf-8", errors="replace").strip()
                return f"{self._process_of(rank)} {why}\n{log}".rstrip()
        first = min(self._failures, key=lambda rank: self._failures[rank])
        return f"{self._process_of(first)} failed:\n{self._failures[first][1].rstrip()}"

    def _process_of(self, rank: int) -> str:
        return f"the process of replica {rank}" if len(self._processes) > 1 else "the process of all replicas"

    def _end(self) -> None:
        """No process survives this. Their files are whole or absent, so there is nothing to wait for."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._ranks.clear()
        for spec in self._specs:
            remove_leftovers(spec.folder)
        self._scratch.cleanup()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
