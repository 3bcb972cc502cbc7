"""Runs a scenario in processes that may be killed, hang or fail, and says what became of each.

Unlike `tests.distributed.run_ranks`, whose workers are kept, every call starts its own and ends with none of them left. They come from
the same fork server, so that torch is imported once.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ..limits import HANG_S

PATIENCE_S = 0.6
"""of the roll call"""


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    exitcode: int | None
    kind: str = ""
    """Name of the error's class; empty if there was none."""
    text: str = ""
    phase: str = ""
    cycle: int = -1
    step: int = -1
    lost: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    afterwards: str = ""
    """What the Ensemble said to the next step and to state_dict."""
    seconds: float = 0.0
    """From the fault, as the scenario marks it by writing the file "fault", to this rank's error."""
    traceback: str = ""


def check_left(one: Outcome, phase: str, cycle: int, step: int) -> None:
    """A rank that is left after replica 1 - that is rank 1, or 0 where this is it - was killed: one error of the right name, in time."""
    dead = 0 if one.rank == 1 else 1
    assert (one.exitcode, one.kind) == (0, "ReplicaLost"), one
    assert (one.phase, one.cycle, one.step, one.lost) == (phase, cycle, step, (dead,)), one.text
    assert (
        f"cycle {cycle} (step {step})" in one.text
        and f"replica {dead} (rank {dead}) is gone (ended: pid " in one.text
    )
    assert f"this is replica {one.rank} (rank {one.rank})" in one.text
    assert one.seconds < HANG_S / 2, "long before the collectives' timeout"
    for said in one.afterwards.split(" | "):
        assert "has lost a replica" in said and "from the last checkpoint" in said


def refusals(ensemble: Any) -> str:
    """What a broken Ensemble says to whoever goes on regardless."""
    said = []
    for attempt in (ensemble.step, ensemble.state_dict, ensemble.converge):
        try:
            attempt()
            said.append("goes on")
        except RuntimeError as error:
            said.append(str(error))
    return " | ".join(said)


def run_faulty(
    scenario: Callable[..., Any],
    world_size: int,
    folder: Path,
    *,
    timeout: float = HANG_S,
    store: str = "file",
    **settings: Any,
) -> list[Outcome]:
    """`scenario(world, **settings)` on ranks of a gloo group; ``timeout``: of its collectives, in seconds; ``store``: "file" or "tcp".

    Fails if a process is still there after `HANG_S`; no process is left in any case.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch._dynamo"]
    )  # as tests.distributed does
    folder.mkdir(parents=True, exist_ok=True)
    workers = []
    for rank in range(world_size):
        world = World(rank, world_size, folder, timeout, store)
        workers.append(context.Process(target=_main, args=(world, scenario, settings), daemon=True))
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + HANG_S
    left = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    while left and time.monotonic() < deadline:
        for sentinel in connection.wait(list(left), max(0.0, deadline - time.monotonic())):
            left.pop(sentinel)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()
    assert not left, f"ranks {sorted(left.values())} still ran after {HANG_S} s"
    return [
        _read(folder / f"outcome-{rank}.json", rank, worker.exitcode)
        for rank, worker in enumerate(workers)
    ]


def _read(file: Path, rank: int, exitcode: int | None) -> Outcome:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return Outcome(
        rank,
        exitcode,
        **{key: tuple(value) if key in ("lost", "late") else value for key, value in found.items()},
    )


@dataclass
class World:
    """What a scenario is given."""

    rank: int
    size: int
    folder: Path
    timeout: float
    store: str
    afterwards: Callable[[], str] = str
    """Asked after an error, before the process ends."""

    def fault(self) -> None:
        """Now something goes wrong in this process."""
        (self.folder / "fault").write_text(repr(time.time()))

    def wait_for_the_others(self) -> None:
        """Until each has said what became of it."""
        while not all(
            (self.folder / f"outcome-{rank}.json").is_file()
            for rank in range(self.size)
            if rank != self.rank
        ):
            time.sleep(0.05)

    def die(self) -> None:
        self.fault()
        os.kill(os.getpid(), 9)

    def meet(self) -> None:
        import torch.distributed as dist

        limit = datetime.timedelta(seconds=HANG_S)
        if self.store == "file":
            store: Any = dist.FileStore(str(self.folder / "store"), self.size)
        else:
            place = self.folder / "port"
            if self.rank == 0:
                store = dist.TCPStore(
                    "127.0.0.1", 0, self.size, True, timeout=limit, wait_for_workers=False
                )
                place.with_suffix(".new").write_text(str(store.port))
                place.with_suffix(".new").rename(place)
            else:
                while not place.is_file():
                    time.sleep(0.01)
                store = dist.TCPStore(
                    "127.0.0.1", int(place.read_text()), self.size, False, timeout=limit
                )
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit
        )
        # Connecting may take its time on a loaded machine; only what comes after is to be impatient.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=self.timeout))


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
        found: dict[str, Any] = {}
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        found = _about(error)
        mark = world.folder / "fault"
        found["seconds"] = time.time() - float(mark.read_text()) if mark.is_file() else 0.0
        found["afterwards"] = world.afterwards()
    (world.folder / f"outcome-{world.rank}.json").write_text(json.dumps(found))


def _about(error: Exception) -> dict[str, Any]:
    found = {"kind": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
    return found | {
        name: getattr(error, name)
        for name in ("phase", "cycle", "step", "lost", "late")
        if hasattr(error, name)
    }
