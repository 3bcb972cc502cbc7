"""Which errors mean a lost replica, and what the roll call makes of them; no process group."""

from __future__ import annotations

import time
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from hdet.run import faults
from hdet.run.faults import Guard, ReplicaLost, RollCall, is_communication_error

from ..limits import HANG_S

join = Thread.join

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
OTHERS = [*map(RuntimeError, [
    f"[enforce fail at {GLOO[1:]}pair.cc:456] op.preamble.length <= op.nbytes. 40 vs 8",
    "DataLoader timed out after 5 seconds",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective ...",
]),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    dist.DistBackendError("NCCL error: unhandled cuda error, 'out of memory'"),
    dist.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected : rank 1 and rank 0 "
        "both on CUDA device 1000"),
    NotImplementedError("gloo/ timed out"),
    hdet.ReplicaDisagreement("seed differs between replicas; timed out waiting"),
]  # fmt: skip


@pytest.mark.parametrize("error", COMMUNICATION)
def test_broken_connections_and_timeouts_are_of_communication(error: RuntimeError) -> None:
    assert is_communication_error(error)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is rank 0 of a default group with this store, which is only said to exist.

    A roll call may take what it takes, so that a busy machine changes nothing.
    """
    store = dist.PrefixStore("test", dist.HashStore())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    be(monkeypatch, 0, store)
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    monkeypatch.setattr(RollCall, "join", lambda call, timeout: join(call))
    return store


@pytest.fixture
def limit(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not."""
    monkeypatch.setattr(faults, "PATIENCE_S", 1.0)
    monkeypatch.setattr(RollCall, "join", join)


def be(patch: pytest.MonkeyPatch, rank: int, store: Any) -> None:
    patch.setattr(dist, "get_rank", lambda: rank)
    patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)


def guard_of(*ranks: list[int]) -> Guard:
    """Of replicas of these ranks, in cycle 3, step 17."""
    replicas = hdet.Replicas(0, len(ranks), ranks=ranks)
    return Guard(replicas, SimpleNamespace(cycle=3, step=17))  # type: ignore[arg-type]


def lose(guard: Guard, phase: str = "average") -> ReplicaLost:
    """What becomes of a closed connection."""
    with pytest.raises(ReplicaLost) as raised, guard(phase):
        raise RuntimeError(CLOSED)
    assert str(raised.value.__cause__) == CLOSED
    return raised.value


def answer(store: Any, *ranks: int) -> None:
    for rank in ranks:
        store.set(f"hdet/roll/{rank}", "")


def test_says_who_when_and_where(store: Any) -> None:
    answer(store, 1, 6)
    guard = guard_of([0, 1], [2, 3], [4, 5], [6, 7])
    error = lose(guard)
    about = error.phase, error.cycle, error.step, error.lost
    assert about == ("average", 3, 17, (2, 3, 4, 5, 7))
    assert str(error).startswith(
        "average failed in cycle 3 (step 17): lost or late: ranks 2-5, 7 (replicas 1-3) "
        "(no answer within 0.2 s); this is rank 0 (replica 0). "
    )
    assert "start all ranks again from the last checkpoint" in str(error)
    with pytest.raises(RuntimeError, match="has lost a replica in cycle 3") as refused:
        guard.check_whole()
    assert refused.value.__cause__ is error


def test_an_answer_of_an_earlier_start_is_taken_back(store: Any, monkeypatch: Any) -> None:
    """torchrun's agent may keep one store over all restarts."""
    answer(store, 1)
    with monkeypatch.context() as patch:
        be(patch, 1, store)
        guard_of([0], [1])
    assert lose(guard_of([0], [1])).lost == (1,)


def test_where_everybody_answers_nobody_is_blamed(store: Any) -> None:
    answer(store, 1, 2)
    error = lose(guard_of([0], [1], [2]))
    assert error.lost == () and "every rank answers" in str(error)


class Frozen:
    """A store whose host neither answers nor closes the connection."""

    def set(self, *_: Any) -> None:
        time.sleep(HANG_S)


class Gone:
    def set(self, *_: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("kind", [Frozen, Gone])
@pytest.mark.parametrize("agent", [False, True], ids=["a rank's", "torchrun's"])
def test_a_store_that_is_gone_takes_bounded_time(kind, agent, limit, monkeypatch) -> None:
    guard = guard_of([0], [1], [2])
    be(monkeypatch, 1, kind())
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    began = time.monotonic()
    error = lose(guard)
    assert time.monotonic() - began < HANG_S / 10
    held = "lost rank 0 (replica 0), which usually holds it"
    assert ("who is lost is not known" if agent else held) in str(error)
    assert error.lost == (() if agent else (0,))


@pytest.mark.parametrize("error", [ValueError("y"), *OTHERS, KeyboardInterrupt()])
def test_everything_else_passes_unchanged(store: Any, error: BaseException) -> None:
    """Memory, misuse and other people's errors."""
    guard = guard_of([0], [1])
    with pytest.raises(type(error)) as raised, guard("average"):
        raise error
    assert raised.value is error and error.__cause__ is None and guard.lost is None


def test_a_nested_error_keeps_its_phase(store: Any) -> None:
    """Also where another Ensemble's guard is outside, which does not go on either."""
    outer, inner = guard_of([0], [1]), guard_of([0], [1])
    with pytest.raises(ReplicaLost) as raised, outer("training step"), inner("statistics"):
        raise RuntimeError(CLOSED)
    assert raised.value.phase == "statistics" and outer.lost is inner.lost is raised.value


def test_without_a_process_group_nothing_is_caught() -> None:
    with pytest.raises(RuntimeError) as raised, guard_of([0])("average"):
        raise RuntimeError(CLOSED)
    assert type(raised.value) is RuntimeError


class Counting:
    """A store that counts questions, and freezes after some."""

    def __init__(self, store: Any, most: float) -> None:
        self.store, self.most, self.asked = store, most, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if self.asked > self.most:
            time.sleep(HANG_S)
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize(("most", "lost"), [(100, {77, 3000}), (20, {77, 3000, 4000})])
def test_many_ranks_cost_few_messages(store, limit, monkeypatch, most: int, lost: set[int]) -> None:
    """The store is one process that all ranks ask: m of n missing are found by some m log n. Who
    was not found in time counts as missing."""
    answer(store, *(rank for rank in range(4096) if rank not in (77, 3000)))
    be(monkeypatch, 0, Counting(store, most))
    found = set(lose(guard_of(*([rank] for rank in range(4096)))).lost)
    assert found >= lost and (found == lost or most < 100)
