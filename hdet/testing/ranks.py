"""Two processes with a group, for contracts of what communicates."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_on_ranks"]


def run_on_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` in new processes with a gloo group; results by rank. All of
    it must pickle: a function at the top of a module."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, spawn) as pool:
        store = str(Path(folder, "store"))
        calls = [pool.submit(_on_rank, store, function, r, world, args) for r in range(world)]
        return [call.result() for call in calls]


def _on_rank(store: str, function: Callable[..., Any], rank: int, world: int, args: Any) -> Any:
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    try:
        result = function(rank, world, *args)
        dist.barrier()  # nobody leaves while others still read
        return result
    finally:
        dist.destroy_process_group()
