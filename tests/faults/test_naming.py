"""Which errors mean a lost replica, and what the roll call makes of them; no process group, no processes but two that end at once."""

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
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1714. This is typically "
    "caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
)


class Own(RuntimeError):
    """A subclass from elsewhere: its author has said already what it is."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:12192: Connection reset by peer"
        ),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
        ),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        RuntimeError(
            "NCCL error in: NCCLUtils.hpp:100, remote process exited or there was a network error, NCCL version 2.27"
        ),
        RuntimeError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran for 600000 ms"
        ),
        RuntimeError("Socket Timeout"),
        RuntimeError("Broken pipe"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        dist.DistStoreError("wait timeout after 300000ms, keys: /a"),
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
    ],
    ids=lambda error: str(error)[-40:],
)
def test_broken_connections_and_timeouts_are_of_communication(error: Exception) -> None:
    assert is_communication_error(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        dist.DistBackendError("NCCL error: unhandled cuda error, 'out of memory'"),
        dist.DistBackendError(
            "NCCL error: invalid usage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
        ),
        RuntimeError(
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 40 vs 8"
        ),
        RuntimeError("DataLoader timed out after 5 seconds"),
        RuntimeError("DataLoader worker (pid 123) is killed by signal: Killed."),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError(
            "Detected mismatch between collectives on ranks. Rank 0 is running collective ..."
        ),
        Own("Connection reset by peer"),
        ValueError("Connection reset by peer"),
        ConnectionResetError("Connection reset by peer"),
        TimeoutError("timed out"),
        NotImplementedError("gloo/ timed out"),
        hdet.ReplicasDiverged("no replica has finite parameters left"),
        hdet.ReplicaDisagreement("seed differs between replicas; timed out waiting"),
        ReplicaLost("Connection closed by peer"),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:30]}",
)
def test_memory_misuse_and_other_peoples_errors_are_not(error: Exception) -> None:
    assert not is_communication_error(error)


# -- the context, with a process group that is only said to exist ------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process is rank 0 of a default group with this store."""
    store = dist.PrefixStore("test", dist.HashStore())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    yield store


def replicas(*ranks: list[int]) -> hdet.Replicas:
    return hdet.Replicas(0, len(ranks), ranks=ranks)


def lost(who: hdet.Replicas, phase: str = "average") -> ReplicaLost:
    """What becomes of a closed connection in cycle 3, step 17."""
    with pytest.raises(ReplicaLost) as raised, during(phase, who, lambda: (3, 17)):
        raise RuntimeError(CLOSED)
    assert str(raised.value.__cause__) == CLOSED
    return raised.value


def answer(store: Any, *ranks: int, at: float | None = None) -> None:
    for rank in ranks:
        store.set(f"hdet/roll/{rank}", repr(time.time() if at is None else at))


def test_says_who_when_and_where(store: Any) -> None:
    answer(store, 1, 4, 5)
    error = lost(replicas([0, 1], [2, 3], [4, 5]))
    assert (error.phase, error.cycle, error.step, error.lost, error.late) == (
        "average",
        3,
        17,
        (2, 3),
        (),
    )
    begin = "cycle 3 (step 17), while averaging: replica 1 (ranks 2-3) is gone or late (no answer within 0.2 s); this is replica 0 (rank 0). "
    assert str(error).startswith(begin)
    assert "start all ranks again from the last checkpoint" in str(error)


def test_several_replicas_and_ranks_of_none(store: Any) -> None:
    answer(store, 2)
    assert "in a training step: replica 1 (rank 1) is gone or late" in str(
        lost(replicas([0], [1], [2]), "training step")
    )
    text = str(lost(replicas([0], [7], [8, 9]), "statistics"))
    assert (
        "while gathering the losses: replica 1 (rank 7) and replica 2 (ranks 8-9) are gone or late"
        in text
    )


def test_an_answer_of_an_earlier_start_is_taken_back(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(store, 1)
    assert lost(replicas([0], [1])).late == ()
    with (
        monkeypatch.context() as patch
    ):  # rank 1 starts anew, finds the same store, and does not answer this time
        again = dist.PrefixStore("test", store.underlying_store)
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: again)
        patch.setattr(dist, "get_rank", lambda: 1)
        with during("average", replicas([0], [1]), lambda: (0, 0)):
            pass
    assert lost(replicas([0], [1])).late == (1,)


def test_survivors_find_each_other_whatever_they_were_doing(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In different cycles, phases and Ensembles; and torchrun's agents count restarts each for themselves."""
    who = replicas([0], [1], [2])
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda: 1)
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        with pytest.raises(ReplicaLost), during("statistics", who, lambda: (400, 401)):
            raise RuntimeError(CLOSED)
    assert lost(who).lost == (2,)


def here(store: Any) -> list[Any]:
    """This process, as it announces itself: [host, pid, when it began]."""
    with during("average", replicas([0], [1]), lambda: (0, 0)):
        pass
    return json.loads(store.get("hdet/here/0"))


def test_a_process_of_this_host_is_looked_at(store: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host, running, began = here(store)
    assert running == os.getpid()
    for rank, pid, start in ((1, ended.pid, 5), (2, running, began), (3, running, 5)):
        store.set(f"hdet/here/{rank}", json.dumps([host, pid, start]))
    store.set("hdet/here/4", json.dumps([["another host", "another space"], ended.pid, 5]))
    error = lost(replicas([0], [1], [2], [3], [4]))
    assert error.lost == (1, 3, 4) and error.late == (
        2,
    )  # the number of 3 belongs to a younger process by now
    assert (
        f"replica 1 (rank 1) and replica 3 (rank 3) are gone (ended: pid {ended.pid}, {running})"
        in str(error)
    )
    assert (
        f"replica 2 (rank 2) is late, or still waiting in the collective (still running: pid {running})"
        in str(error)
    )
    assert "replica 4 (rank 4) is gone or late" in str(error)
    error = lost(replicas([0], [2]))
    assert (
        error.lost == ()
        and error.late == (2,)
        and "replica 1 (rank 2) is late (still running" in str(error)
    )


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
    error = lost(replicas([0], [1]))
    assert (
        error.lost == ()
        and error.late == (1,)
        and "replica 1 (rank 1) came late, but within 0.2 s" in str(error)
    )


def test_the_late_one_knows_it(store: Any) -> None:
    answer(store, 1, 2, at=time.time() - 4)
    error = lost(replicas([0], [1], [2]))
    assert error.lost == error.late == ()
    assert re.search(
        r"the other ranks had given up [45]\.\d s before this one came: it was late", str(error)
    )
    answer(store, 1, 2)
    assert "every rank still answers" in str(lost(replicas([0], [1], [2])))


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
def test_a_store_that_is_gone_takes_bounded_time(
    kind: Any, says: str, agent: bool, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, began = kind(), time.monotonic()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: gone)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with (
        pytest.raises(ReplicaLost) as raised,
        during("average", replicas([0], [1], [2]), lambda: (3, 17)),
    ):
        gone.away = True
        raise RuntimeError(CLOSED)
    error = raised.value
    assert time.monotonic() - began < HANG_S / 10
    if agent:
        assert error.lost == () and "who is lost is not known" in str(error)
    else:
        says = f"replica 0 (rank 0) is gone: the rendezvous store at node3:29500, which it holds, {says}"
        assert error.lost == (0,) and says in str(error)


def test_nothing_of_the_roll_call_hides_the_error(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise KeyError("no store")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", broken)
    with (
        pytest.raises(ReplicaLost, match="the roll could not be called") as raised,
        during("average", replicas([0], [1]), broken),
    ):
        raise RuntimeError(CLOSED)
    assert raised.value.lost == ()


def test_everything_else_passes_unchanged(store: Any) -> None:
    who = replicas([0], [1])
    for error in (
        torch.OutOfMemoryError("x"),
        ValueError("y"),
        hdet.ReplicasDiverged("z"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as raised, during("average", who, lambda: (0, 0)):
            raise error
        assert raised.value is error and error.__cause__ is None


def test_a_nested_error_keeps_its_phase(store: Any) -> None:
    who = replicas([0], [1])
    with (
        pytest.raises(ReplicaLost) as raised,
        during("training step", who, lambda: (9, 9)),
        during("statistics", who, lambda: (3, 17)),
    ):
        raise RuntimeError(CLOSED)
    assert (raised.value.phase, raised.value.cycle) == ("statistics", 3)
    with (
        pytest.raises(ReplicaLost, match="in a training step") as raised,
        during("training step", who, lambda: (9, 99)),
    ):
        raise RuntimeError(CLOSED)
    assert raised.value.phase == "training step"


def test_without_a_process_group_nothing_is_caught() -> None:
    with (
        pytest.raises(RuntimeError) as raised,
        during("average", hdet.Replicas.single(), lambda: (0, 0)),
    ):
        raise RuntimeError(CLOSED)
    assert type(raised.value) is RuntimeError


def test_ranks_announce_themselves_once(store: Any) -> None:
    here(store)
    store.delete_key("hdet/here/0")
    with during("average", replicas([0], [1]), lambda: (0, 0)):
        pass
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
    """The store is one process that all ranks ask: with m of n missing, some multiple of m log n questions each."""
    counting = Counting(store)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: counting)
    answer(store, *(rank for rank in range(4096) if rank not in (77, 3000)))
    assert lost(replicas(*([rank] for rank in range(4096)))).lost == (77, 3000)
    assert counting.asked < 100


def test_many_missing_are_counted_not_listed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who is slow to ask after gives up in time."""
    error = lost(replicas(*([2 * r, 2 * r + 1] for r in range(1000))))
    assert len(error.lost) == 1999 and len(str(error)) < 800
    assert "replica 7 (ranks 14-15) and 992 more replicas are gone or late" in str(error)

    slow, began = Counting(store, 0.02), time.monotonic()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: slow)
    error = lost(replicas(*([rank] for rank in range(5000, 5512))))
    assert len(error.lost) == 512 and time.monotonic() - began < 10, (
        "without giving up it would ask for 40 s"
    )


def test_it_pickles() -> None:
    error = pickle.loads(pickle.dumps(ReplicaLost("text", "statistics", 3, 17, [1], [2])))
    assert (str(error), error.phase, error.cycle, error.step, error.lost, error.late) == (
        "text",
        "statistics",
        3,
        17,
        (1,),
        (2,),
    )
