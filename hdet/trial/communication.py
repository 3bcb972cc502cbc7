"""Does the code of a loop communicate with other replicas? Where it does not, each may train arms
of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..replicas import Replicas

__all__ = ["Communication"]

UNCOUNTED = (
    *((dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")),
    (torch.cuda.CUDAGraph, "replay"),
)
"""Messages from rank to rank, which NCCL does not count, and what may hold any."""


class Communication:
    """Notices what this process sends to, or receives from, ranks outside of its replica.

    Backends count their collectives, whoever starts them: Python, C++, an autograd thread. A
    backend that does not count, and a replayed CUDA graph, which may hold any, pass for
    communication. Not seen is what goes past torch.distributed's process groups: a store, RPC,
    symmetric memory, another library.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, self._is_seen = replicas, False
        self._own = set(replicas.ranks[replicas.index] if replicas.ranks else [dist.get_rank()])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """What happens inside is noticed."""
        before = self._counts()
        with ExitStack() as stack:
            for owner, name in UNCOUNTED:
                # What getattr gives of a C++ class would not be a method when it is put back.
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, self._noticing(getattr(owner, name)))
            yield
        self._is_seen |= self._counts() != before

    def was_seen(self) -> bool:
        """So far, on any rank: one collective."""
        row = torch.tensor([float(self._is_seen)], dtype=torch.float64)
        return bool(self._replicas.sum_rows(row, purpose="communication of arms").sum())

    def _noticing(self, original: Any) -> Any:
        def noticing(owner: Any, *args: Any, **named: Any) -> Any:
            self._is_seen |= not isinstance(owner, dist.ProcessGroup) or self._leaves(owner)
            return original(owner, *args, **named)

        return noticing

    def _leaves(self, group: dist.ProcessGroup) -> bool:
        """Has it ranks outside of the replica?"""
        return not self._own.issuperset(dist.get_process_group_ranks(group))

    def _counts(self) -> dict[Any, float]:
        """Of collectives, by group and device; where nobody counts, a number that equals none."""
        counts = dict[Any, float]()
        for group in filter(self._leaves, dist.distributed_c10d._world.pg_map):
            for device in group._device_types:
                backend: Any = group._get_backend(device)
                try:
                    count = backend._get_sequence_number_for_group()
                except RuntimeError:
                    count = float("nan")
                counts[group.group_name, device.type] = count
        return counts
