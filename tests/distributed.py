"""Run a function on several gloo ranks: `run_ranks(function, world_size, *args)`.

The worker processes are started once and kept (importing torch costs seconds); every call gives
them a fresh process group of exactly `world_size` ranks, so a test sees what a training script
sees: rank 0 .. world_size - 1 of the default group. A worker that died, hung or failed takes the
whole pool with it: the next call starts a new one. The workers end with the process that started
them.
"""

import atexit
import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.limits import HANG_S

_GRACE_S = 2.0  # after the first failure: how long the other ranks get to report theirs
# What the fork server imports once for all workers, and optimizers import late.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "hdet", "tests.harness"]


class RankError(AssertionError):
    """One or more ranks failed; the message holds their tracebacks."""


class _NotConnected(RankError):
    """Ranks failed to connect, and none came as far as an error or a result of the function."""


_CONNECTING = "while connecting: "
_WAITING = "was still waiting when another rank had failed"


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = HANG_S
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` ranks, after
    init_process_group("gloo"); return their results by rank.

    `function` must be importable at the top level of a module; arguments and results must pickle.
    One thread per process, torch's seed 0. `timeout` is in seconds, for the whole call. Raises
    RankError with the traceback of every rank that failed.
    """
    for attempt in range(3):
        try:
            return _pool(world_size).run(function, world_size, args, timeout)
        except _NotConnected as error:
            # Nothing of the test has said anything yet. Seen twice in some thousand calls, on a
            # loaded machine.
            if attempt == 2:
                raise
            print(f"run_ranks: connecting again after {error}", file=sys.stderr)
    raise AssertionError("unreachable")


def torchrun(function: Callable[..., Any], count: int, *args: Any, restarts: int = 0) -> None:
    """`function(*args)` in ``count`` workers that torchrun's agent starts, all of them again where
    one has ended badly. They come from the fork server, which has imported torch already."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    config = LaunchConfig(
        1, 1, count, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=restarts, start_method="forkserver",
    )  # fmt: skip
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        elastic_launch(config, _started)(function, *args)
    finally:  # the agent's own handlers stay behind it
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _started(function: Callable[..., Any], *args: Any) -> None:
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    function(*args)


# -- the workers -----------------------------------------------------------------------------------


def _worker(conn: connection.Connection, parent: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # set_num_threads is for the thread that calls it; frameworks and autograd have others
    )
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            message = conn.recv_bytes()
        except EOFError:
            return
        conn.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    try:
        return pickle.dumps((True, _call(*pickle.loads(message))))
    except BaseException:  # noqa: BLE001 - whatever it was, the test should see it
        return pickle.dumps((False, traceback.format_exc()))


def _call(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    args: tuple[Any, ...],
) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    meeting = dist.FileStore(store, world_size)
    limit = datetime.timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("group", meeting),
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
    except RuntimeError as error:
        raise RuntimeError(_CONNECTING + str(error)) from error
    try:
        result = function(rank, world_size, *args)
        _leave_together(meeting, world_size, timeout)
        return result
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """torch.distributed.tensor keeps what it has derived for a mesh, and would use it for an equal
    mesh of the next call: with the groups of this one, which are gone. A training script has one
    set of groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def _leave_together(meeting: Any, world_size: int, patience_s: float) -> None:
    """A rank that is done at once must not close its connections while others are still connecting,
    or reading its last message."""
    meeting.add("done", 1)
    end, pause_s = time.monotonic() + patience_s, 0.001
    while meeting.add("done", 0) < world_size and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)  # each look reads the store's file


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


# -- the pool --------------------------------------------------------------------------------------


class _Pool:
    def __init__(self, size: int) -> None:
        # Unlike plain fork, a fork server never copies the threads of the test process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.workers, self.conns = [], []
        for _ in range(size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_entry, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.conns.append(ours)

    def alive(self) -> bool:
        return bool(self.workers) and all(worker.is_alive() for worker in self.workers)

    def close(self) -> None:
        for worker, conn in zip(self.workers, self.conns, strict=True):
            worker.kill()
            worker.join()
            conn.close()
        self.workers, self.conns = [], []

    def run(
        self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank in range(world_size):
                    call = (function, rank, world_size, str(Path(folder, "store")), timeout, args)
                    self.conns[rank].send_bytes(pickle.dumps(call))
                results, errors = self._collect(world_size, time.monotonic() + timeout)
            except BaseException:
                self.close()
                raise
        if errors:
            self.close()
            before_the_call = (
                all(_CONNECTING in error or _WAITING in error for error in errors.values())
                and not results
            )
            kind = (
                _NotConnected
                if before_the_call and any(_CONNECTING in error for error in errors.values())
                else RankError
            )
            raise kind("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
        return [results[rank] for rank in range(world_size)]

    def _collect(self, world_size: int, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        ranks = {conn: rank for rank, conn in enumerate(self.conns[:world_size])}
        while ranks:
            ready = connection.wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = _WAITING if errors else "did not finish in time"
                return results, errors | {rank: late for rank in ranks.values()}
            for conn in ready:
                rank = ranks.pop(conn)
                try:
                    succeeded, value = pickle.loads(conn.recv_bytes())
                except (EOFError, ConnectionResetError):
                    succeeded, value = (
                        False,
                        f"the process ended (exit code {self.workers[rank].exitcode})",
                    )
                (results if succeeded else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        return results, errors


def _entry(conn: connection.Connection) -> None:
    _worker(conn, os.getppid())  # the fork server: it ends when the test process does


_current: _Pool | None = None


def _pool(size: int) -> _Pool:
    global _current
    if _current is None or not _current.alive() or len(_current.workers) < size:
        if _current is not None:
            _current.close()
        _current = _Pool(max(size, 4))
    return _current


@atexit.register
def _close() -> None:
    if _current is not None:
        _current.close()
