"""Start one process per replica (or one for all), pass on what rank 0 reports, and leave no process behind whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hdet.cli.job.training import RunSpec
from hdet.owned_folder import remove_leftovers

__all__ = ["WorkerError", "Workers"]

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
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Workers:  # noqa: PYI034 - Self needs Python 3.11
        self._scratch = tempfile.TemporaryDirectory(prefix="hdet-", ignore_cleanup_errors=True)
        try:
            count = self._specs[0].config.processes
            for rank in range(count):
                self._processes.append(self._start(rank, count))
        except BaseException:
            self._end()
            raise
        self._reader = threading.Thread(target=self._read, args=(self._processes[0],), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _start(self, rank: int, count: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if count > 1:
            environment["OMP_NUM_THREADS"] = "1"  # they share the cores
        else:
            # All cores. Threads that spin while they wait would make the whole run several times slower beside other programs.
            environment.setdefault("OMP_WAIT_POLICY", "passive")
        if self._device == "cpu" and os.path.exists("/sys/class/net/lo"):
            # One machine only: a host name that does not resolve, a VPN or a firewall must not matter.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with open(self._log(rank), "wb") as log:
            output = subprocess.PIPE if rank == 0 else log
            process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=output, stderr=log, env=environment, pass_fds=self._locks)
        job = {
            "rank": rank,
            "world_size": count,
            "device": self._device if self._device == "cpu" else f"{self._device}:{rank}",
            "scratch": self._scratch.name,
            "runs": [{"config": spec.config.to_dict(), "folder": str(spec.folder), "resume": spec.resume} for spec in self._specs],
        }
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()  # and left open: its end is the sign that this process is gone
        except BrokenPipeError:
            pass  # it died at once; events() says why
        return process

    def _log(self, rank: int) -> Path:
        return Path(self._scratch.name, f"log.{rank}")

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    # -- while they run ----------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[dict[str, Any]]:
        """What rank 0 reports, until all processes have ended well.

        Raises:
            WorkerError: one failed. The others are ended on leaving the context.
        """
        reading, checked = True, 0.0
        while True:
            try:
                line = self._lines.get(timeout=0.1) if reading else None
            except queue.Empty:
                pass
            else:
                reading = line is not None
                if line is not None:
                    yield json.loads(line)
            if not reading or time.monotonic() - checked > 0.2:
                checked = time.monotonic()
                codes = [process.poll() for process in self._processes]
                if any(codes):
                    raise WorkerError(self._explain())
                if not reading:
                    if None not in codes:
                        return
                    time.sleep(0.02)

    def _explain(self) -> str:
        """The error of the process that failed first: the others only complain that it is gone."""
        time.sleep(GRACE_SECONDS)
        reports = {}
        for rank in range(len(self._processes)):
            try:
                reports[rank] = json.loads(Path(self._scratch.name, f"error.{rank}").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code and rank not in reports:  # no time to say anything: killed, or it could not even start
                why = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                log = self._log(rank).read_text(encoding="utf-8", errors="replace").strip()
                return f"{self._process_of(rank)} {why}\n{log}".rstrip()
        first = min(reports, key=lambda rank: reports[rank]["time"])
        return f"{self._process_of(first)} failed:\n{reports[first]['text'].rstrip()}"

    def _process_of(self, rank: int) -> str:
        return f"the process of replica {rank}" if len(self._processes) > 1 else "the process of all replicas"

    def _end(self) -> None:
        """No process survives this. Their files are whole or absent, so there is nothing to wait for."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        if self._reader is not None:
            self._reader.join(timeout=1)  # its pipe has ended
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for spec in self._specs:
            remove_leftovers(spec.folder)
        self._scratch.cleanup()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
