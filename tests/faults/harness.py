"""Runs a scenario in processes that may be killed, hang or fail, and says what became of each.

Unlike the workers of `tests.distributed.run_ranks`, all of them end with the call. They come from
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
    """From the fault, as the scenario marks it, to this rank's error."""
    traceback: str = ""

    @property
    def where(self) -> tuple[Any, ...]:
        return self.kind, self.phase, self.cycle, self.step, self.lost


def check_left(one: Outcome, phase: str, cycle: int, step: int) -> None:
    """A rank that is left after rank 1 (or 0 where this is it) was killed: one error, in time."""
    dead = 0 if one.rank == 1 else 1
    assert one.exitcode == 0 and one.where == ("ReplicaLost", phase, cycle, step, (dead,)), one
    for says in (
        f"cycle {cycle} (step {step})", f"replica {dead} (rank {dead}) is gone (ended: pid ",
        f"this is replica {one.rank} (rank {one.rank})",
    ):  # fmt: skip
        assert says in one.text
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
    scenario: Any, size: int, folder: Path, *, timeout: float = HANG_S, store: str = "file",
    **settings: Any,
) -> list[Outcome]:  # fmt: skip
    """`scenario(world, **settings)` on ranks of a gloo group; ``timeout``: of its collectives, in
    seconds; ``store``: "file" or "tcp". Fails if one still runs after `HANG_S`; none is left."""
    context = multiprocessing.get_context("forkserver")
    # as tests.distributed does
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    folder.mkdir(parents=True, exist_ok=True)
    workers = []
    for rank in range(size):
        world = World(rank, size, folder, timeout, store)
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
    files = [folder / f"outcome-{rank}.json" for rank in range(size)]
    found = [json.loads(file.read_text()) if file.is_file() else {} for file in files]
    for one in found:
        one.update({key: tuple(one[key]) for key in ("lost", "late") if key in one})
    ends = zip(workers, found, strict=True)
    return [Outcome(rank, worker.exitcode, **one) for rank, (worker, one) in enumerate(ends)]


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
        others = set(range(self.size)) - {self.rank}
        while not all((self.folder / f"outcome-{rank}.json").is_file() for rank in others):
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
                where = ("127.0.0.1", 0, self.size, True)
                store = dist.TCPStore(*where, timeout=limit, wait_for_workers=False)
                place.with_suffix(".new").write_text(str(store.port))
                place.with_suffix(".new").rename(place)
            else:
                while not place.is_file():
                    time.sleep(0.01)
                port = int(place.read_text())
                store = dist.TCPStore("127.0.0.1", port, self.size, False, timeout=limit)
        ranks = {"rank": self.rank, "world_size": self.size}
        dist.init_process_group("gloo", store=store, **ranks, timeout=limit)
        # Connecting may take its time on a loaded machine; only what comes after is impatient.
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
    known = ("phase", "cycle", "step", "lost", "late")
    found = {name: getattr(error, name) for name in known if hasattr(error, name)}
    said = {"text": str(error), "traceback": traceback.format_exc()}
    return {**found, **said, "kind": type(error).__name__}
