"""Which errors mean a lost replica, and what the roll call makes of them; no process group."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from hdet.run import faults
from hdet.run.faults import ReplicaLost, during, is_communication_error

from ..limits import HANG_S

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:1714. This is typically caused by a remote worker crashing. Check the logs "
    "of the remote worker before reporting an error."
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
COMMUNICATION = [*map(RuntimeError, [
    CLOSED,
    f"{GLOO}pair.cc:537] Read error [127.0.0.1]:12192: Connection reset by peer",
    f"{GLOO}unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
    "NCCL communicator was aborted on rank 1.",
    ("NCCL error in: NCCLUtils.hpp:100, remote process exited or there was a network error, "
        "NCCL version 2.27"),
    ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
        "OpType=ALLREDUCE) ran for 600000 ms"),
    "Socket Timeout", "Broken pipe",
]),
    dist.DistNetworkError("failed to recv, got 0 bytes"),
    dist.DistStoreError("wait timeout after 300000ms, keys: /a"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0."),
]  # fmt: skip


class Own(RuntimeError):
    """A subclass from elsewhere: its author has said already what it is."""


RESET = "Connection reset by peer"
OTHERS = [*map(RuntimeError, [
    f"[enforce fail at {GLOO[1:]}pair.cc:456] op.preamble.length <= op.nbytes. 40 vs 8",
    "DataLoader timed out after 5 seconds",
    "DataLoader worker (pid 123) is killed by signal: Killed.",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective ...",
]),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    dist.DistBackendError("NCCL error: unhandled cuda error, 'out of memory'"),
    dist.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected : rank 1 and rank 0 "
        "both on CUDA device 1000"),
    Own(RESET), ValueError(RESET), ConnectionResetError(RESET), TimeoutError("timed out"),
    NotImplementedError("gloo/ timed out"),
    hdet.ReplicasDiverged("no replica has finite parameters left"),
    hdet.ReplicaDisagreement("seed differs between replicas; timed out waiting"),
    ReplicaLost("Connection closed by peer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"), [(e, True) for e in COMMUNICATION] + [(e, False) for e in OTHERS]
)
def test_broken_connections_and_timeouts_are_of_communication(error, expected: bool) -> None:
    """Memory, misuse and other people's errors are not."""
    assert is_communication_error(error) is expected


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process is rank 0 of a default group with this store, which is only said to exist."""
    store = dist.PrefixStore("test", dist.HashStore())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    be(monkeypatch, 0, store)
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    yield store


def be(patch: pytest.MonkeyPatch, rank: int, store: Any = None) -> None:
    patch.setattr(dist, "get_rank", lambda: rank)
    if store is not None:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)


def replicas(*ranks: list[int]) -> hdet.Replicas:
    return hdet.Replicas(0, len(ranks), ranks=ranks)


def ones(ranks: Any) -> hdet.Replicas:
    """Of one rank each."""
    return replicas(*([rank] for rank in ranks))


def lost(
    who: hdet.Replicas, phase: str = "average", then: Any = str, at: Any = None
) -> ReplicaLost:
    """What becomes of a closed connection in cycle 3, step 17; ``then`` happens just before it."""
    with pytest.raises(ReplicaLost) as raised, during(phase, who, at or (lambda: (3, 17))):
        then()
        raise RuntimeError(CLOSED)
    assert str(raised.value.__cause__) == CLOSED
    return raised.value


def answer(store: Any, *ranks: int, at: float | None = None) -> None:
    for rank in ranks:
        store.set(f"hdet/roll/{rank}", repr(time.time() if at is None else at))


def test_says_who_when_and_where(store: Any) -> None:
    answer(store, 1, 4, 5)
    error = lost(replicas([0, 1], [2, 3], [4, 5]))
    about = error.phase, error.cycle, error.step, error.lost, error.late
    assert about == ("average", 3, 17, (2, 3), ())
    assert str(error).startswith(
        "cycle 3 (step 17), while averaging: replica 1 (ranks 2-3) is gone or late "
        "(no answer within 0.2 s); this is replica 0 (rank 0). "
    )
    assert "start all ranks again from the last checkpoint" in str(error)


def test_several_replicas_and_ranks_of_none(store: Any) -> None:
    answer(store, 2)
    text = str(lost(ones(range(3)), "training step"))
    assert "in a training step: replica 1 (rank 1) is gone or late" in text
    text = str(lost(replicas([0], [7], [8, 9]), "statistics"))
    several = "replica 1 (rank 7) and replica 2 (ranks 8-9) are gone or late"
    assert f"while gathering the losses: {several}" in text


def test_an_answer_of_an_earlier_start_is_taken_back(store: Any, monkeypatch: Any) -> None:
    answer(store, 1)
    assert lost(ones(range(2))).late == ()
    with monkeypatch.context() as patch:
        # rank 1 starts anew, finds the same store, and does not answer this time
        be(patch, 1, dist.PrefixStore("test", store.underlying_store))
        pass_by()
    assert lost(ones(range(2))).late == (1,)


def test_survivors_find_each_other_whatever_they_were_doing(store: Any, monkeypatch: Any) -> None:
    """In different cycles and phases; and torchrun's agents count restarts each for themselves."""
    with monkeypatch.context() as patch:
        be(patch, 1)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        lost(ones(range(3)), "statistics", at=lambda: (400, 401))
    assert lost(ones(range(3))).lost == (2,)


def pass_by() -> None:
    with during("average", ones(range(2)), lambda: (0, 0)):
        pass


def here(store: Any) -> list[Any]:
    """This process, as it announces itself: [host, pid, when it began]."""
    pass_by()
    return json.loads(store.get("hdet/here/0"))


def test_a_process_of_this_host_is_looked_at(store: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host, running, began = here(store)
    assert running == os.getpid()
    for rank, pid, start in ((1, ended.pid, 5), (2, running, began), (3, running, 5)):
        store.set(f"hdet/here/{rank}", json.dumps([host, pid, start]))
    store.set("hdet/here/4", json.dumps([["another host", "another space"], ended.pid, 5]))
    error, still = lost(ones(range(5))), f"still running: pid {running}"
    # the number of 3 belongs to a younger process by now
    assert error.lost == (1, 3, 4) and error.late == (2,)
    for says in (
        f"replica 1 (rank 1) and replica 3 (rank 3) are gone (ended: pid {ended.pid}, {running})",
        f"replica 2 (rank 2) is late, or still waiting in the collective ({still})",
        "replica 4 (rank 4) is gone or late",
    ):
        assert says in str(error)
    error = lost(ones((0, 2)))
    assert error.lost == () and error.late == (2,)
    assert "replica 1 (rank 2) is late (still running" in str(error)


def test_an_exit_status_nobody_has_fetched_is_no_process(store: Any) -> None:
    host, _, _ = here(store)
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        deadline = time.monotonic() + HANG_S
        while (state := status_of(child.pid))[0] != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)
        store.set("hdet/here/1", json.dumps([host, child.pid, int(state[19])]))
        error = lost(replicas([0], [1]))
    assert error.lost == (1,) and f"(ended: pid {child.pid})" in str(error)


def status_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_a_late_rank_is_told_apart(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, seen = faults.RollCall.wait, []

    def second_half(call: Any, ranks: list[int], seconds: float) -> list[int]:
        seen.append(ranks)
        if len(seen) == 2:
            answer(store, 1)
        return wait(call, ranks, seconds)

    monkeypatch.setattr(faults.RollCall, "wait", second_half)
    error = lost(ones(range(2)))
    assert error.lost == () and error.late == (1,)
    assert "replica 1 (rank 1) came late, but within 0.2 s" in str(error)


def test_the_late_one_knows_it(store: Any) -> None:
    answer(store, 1, 2, at=time.time() - 4)
    error = lost(ones(range(3)))
    assert error.lost == error.late == ()
    says = r"the other ranks had given up [45]\.\d s before this one came: it was late"
    assert re.search(says, str(error))
    answer(store, 1, 2)
    assert "every rank still answers" in str(lost(ones(range(3))))


class Frozen:
    """A store whose host neither answers nor closes the connection, once it is ``away``."""

    host, port, away = "node3", 29500, False

    def check(self, *_: Any) -> bool:
        if self.away:
            self.fail()
        return False

    set = check

    def fail(self) -> None:
        time.sleep(HANG_S)


class Gone(Frozen):
    def fail(self) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize(("kind", "says"), [(Frozen, "does not answer within"), (Gone, "is gone")])
@pytest.mark.parametrize("agent", [False, True], ids=["a rank's", "torchrun's"])
def test_a_store_that_is_gone_takes_bounded_time(kind, says, agent, store, monkeypatch) -> None:
    gone, began = kind(), time.monotonic()
    be(monkeypatch, 1, gone)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    error = lost(ones(range(3)), then=lambda: vars(gone).update(away=True))
    assert time.monotonic() - began < HANG_S / 10
    held = "replica 0 (rank 0) is gone: the rendezvous store at node3:29500, which it holds,"
    assert ("who is lost is not known" if agent else f"{held} {says}") in str(error)
    assert error.lost == (() if agent else (0,))


def test_nothing_of_the_roll_call_hides_the_error(store: Any, monkeypatch: Any) -> None:
    def broken() -> Any:
        raise KeyError("no store")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", broken)
    error = lost(ones(range(2)), at=broken)
    assert error.lost == () and "the roll could not be called" in str(error)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("x"), ValueError("y"), hdet.ReplicasDiverged("z"), KeyboardInterrupt(),
])  # fmt: skip
def test_everything_else_passes_unchanged(store: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, during("average", ones(range(2)), lambda: (0, 0)):
        raise error
    assert raised.value is error and error.__cause__ is None


def test_a_nested_error_keeps_its_phase(store: Any) -> None:
    who = ones(range(2))

    def inside() -> None:
        with during("statistics", who, lambda: (3, 17)):
            raise RuntimeError(CLOSED)

    error = lost(who, "training step", then=inside, at=lambda: (9, 9))
    assert (error.phase, error.cycle) == ("statistics", 3)
    error = lost(who, "training step", at=lambda: (9, 99))
    assert error.phase == "training step" and "in a training step" in str(error)


def test_without_a_process_group_nothing_is_caught() -> None:
    single = hdet.Replicas.single()
    with pytest.raises(RuntimeError) as raised, during("average", single, lambda: (0, 0)):
        raise RuntimeError(CLOSED)
    assert type(raised.value) is RuntimeError


def test_ranks_announce_themselves_once(store: Any) -> None:
    here(store)
    store.delete_key("hdet/here/0")
    pass_by()
    assert not store.check(["hdet/here/0"])


class Counting:
    """A store that counts questions, and takes its time."""

    def __init__(self, store: Any, takes_s: float = 0.0) -> None:
        self.store, self.takes_s, self.asked = store, takes_s, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        time.sleep(self.takes_s)
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_many_ranks_cost_few_messages(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is one process that all ranks ask: m of n missing are found by some m log n."""
    counting = Counting(store)
    be(monkeypatch, 0, counting)
    answer(store, *(rank for rank in range(4096) if rank not in (77, 3000)))
    assert lost(ones(range(4096))).lost == (77, 3000)
    assert counting.asked < 100


def test_many_missing_are_counted_not_listed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who is slow to ask after gives up in time."""
    error = lost(replicas(*([2 * r, 2 * r + 1] for r in range(1000))))
    assert len(error.lost) == 1999 and len(str(error)) < 800
    assert "replica 7 (ranks 14-15) and 992 more replicas are gone or late" in str(error)
    be(monkeypatch, 0, Counting(store, 0.02))
    began = time.monotonic()
    error = lost(ones(range(5000, 5512)))
    # without giving up it would ask for 40 s
    assert len(error.lost) == 512 and time.monotonic() - began < 10


def test_it_pickles() -> None:
    error = ReplicaLost("text", "statistics", 3, 17, [1], [2])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "text" and vars(again) == vars(error)
    assert (again.phase, again.cycle, again.lost, again.late) == ("statistics", 3, (1,), (2,))
