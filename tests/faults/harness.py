"""Runs a scenario in processes that may be killed, hang or fail, and says what became of each.

Unlike the workers of `tests.distributed.run_ranks`, all of them end with the call. They come from
the same fork server, so that torch is imported once.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..distributed import PRELOADED
from ..limits import HANG_S

PATIENCE_S = 0.6
"""of the roll call"""


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    exitcode: int | None
    error: Any = None
    seconds: float = 0.0  # from the fault, as the scenario marks it, to this rank's error
    refusals: list[str] = field(default_factory=list)  # what the Ensemble says from then on

    @property
    def where(self) -> tuple[Any, ...]:
        error = self.error
        return type(error).__name__, error.phase, error.cycle, error.step, error.lost


def check_left(one: Outcome, phase: str, cycle: int, step: int) -> None:
    """A rank that is left after rank 1 (or 0 where this is it) was killed: one error, in time."""
    dead = 0 if one.rank == 1 else 1
    assert one.exitcode == 0 and one.where[:4] == ("ReplicaLost", phase, cycle, step), one
    assert dead in one.error.lost
    for says in (
        f"{phase} failed in cycle {cycle} (step {step})", "lost or late: rank",
        f"this is rank {one.rank} (replica {one.rank})",
    ):  # fmt: skip
        assert says in str(one.error)
    assert one.seconds < HANG_S / 2, "long before the collectives' timeout"
    assert len(one.refusals) == 3
    for said in one.refusals:
        assert "has lost a replica" in said and "from the last checkpoint" in said


def run_faulty(
    scenario: Any, size: int, folder: Path, *, timeout: float = HANG_S, tcp: bool = False,
    **settings: Any,
) -> list[Outcome]:  # fmt: skip
    """`scenario(world, **settings)` on ranks of a gloo group; ``timeout``: of its collectives, in
    seconds; ``tcp``: rank 0 holds the store. Fails if one still runs after `HANG_S`; none is left.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = f"tcp://127.0.0.1:{port}" if tcp else f"file://{folder / 'store'}"
    worlds = [World(rank, size, folder, timeout, meeting) for rank in range(size)]
    workers = [
        context.Process(target=_main, args=(world, scenario, settings), daemon=True)
        for world in worlds
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + HANG_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    running = [worker for worker in workers if worker.is_alive()]
    for worker in running:
        worker.kill()
        worker.join()
    assert not running, f"{len(running)} ranks still ran after {HANG_S} s"
    return [
        Outcome(world.rank, worker.exitcode, *world.read_outcome())
        for world, worker in zip(worlds, workers, strict=True)
    ]


@dataclass
class World:
    """What a scenario is given."""

    rank: int
    size: int
    folder: Path
    timeout: float
    meeting: str
    ensemble: Any = None
    """Tried after an error, before the process ends."""

    def mark_fault(self) -> None:
        """Now something goes wrong in this process."""
        (self.folder / "fault").write_text(repr(time.time()))

    def die(self) -> None:
        self.mark_fault()
        os.kill(os.getpid(), 9)

    def wait_for_the_others(self) -> None:
        """Until each has said what became of it."""
        others = set(range(self.size)) - {self.rank}
        while not all(self._outcome(rank).is_file() for rank in others):
            time.sleep(0.05)

    def meet(self) -> None:
        import torch.distributed as dist

        ranks = {"rank": self.rank, "world_size": self.size}
        limit = datetime.timedelta(seconds=HANG_S)
        dist.init_process_group("gloo", init_method=self.meeting, **ranks, timeout=limit)
        # Connecting may take its time on a loaded machine; only what comes after is impatient.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=self.timeout))

    def write_outcome(self, error: Exception | None = None) -> None:
        outcome: tuple[Any, ...] = ()
        if error is not None:
            began = float((self.folder / "fault").read_text())
            outcome = error, time.time() - began, self._refusals()
        partial = self.folder / f"outcome-{self.rank}.new"
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(self._outcome(self.rank))

    def read_outcome(self) -> tuple[Any, ...]:
        file = self._outcome(self.rank)
        return pickle.loads(file.read_bytes()) if file.is_file() else ()

    def _refusals(self) -> list[str]:
        """What a broken Ensemble says to whoever goes on regardless."""
        said = []
        for attempt in (self.ensemble.step, self.ensemble.state_dict, self.ensemble.converge):
            try:
                attempt()
            except RuntimeError as error:
                said.append(str(error))
        return said

    def _outcome(self, rank: int) -> Path:
        return self.folder / f"outcome-{rank}"


def _main(world: World, scenario: Callable[..., Any], settings: dict[str, Any]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    from hdet.run import faults

    torch.set_num_threads(1)
    torch.manual_seed(0)
    faults.PATIENCE_S = PATIENCE_S
    world.meet()
    try:
        scenario(world, **settings)
        world.write_outcome()
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        traceback.print_exc()
        world.write_outcome(error)
