"""Where a process stands among the replicas, and how it joins and leaves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import hdet
from hdet.cli.job.config import TrainConfig


@dataclass(frozen=True)
class Place:
    """One process: its replica's index, how many there are, and the device it computes on."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        """Rank 0 alone writes files and speaks."""
        return self.rank == 0


def choose_device(device: str, processes: int, *, least: int = 2) -> str:
    """``cpu`` or ``cuda`` for ``processes`` on this machine: NCCL wants a GPU for each. ``least``: replicas with which the run makes sense.
    Raises ValueError if ``cuda`` is asked for, and there are fewer GPUs than processes; or hdet's native module is missing or stale."""
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if hdet.kernels.native.missing is not None:
        raise ValueError(f"the kernels cannot be used: {hdet.kernels.native.missing}")
    if device == "cuda" and gpus < processes:
        fewer = [f"--replicas {gpus}"] if gpus >= least else []
        what = f"{processes} replicas need {processes} GPUs" if processes > 1 else "one GPU is needed"
        ways = [*fewer, *(["--coresident"] if least > 1 else [])] if gpus else []
        raise ValueError(f"device is 'cuda': {what} and {gpus} can be used; pass {' or '.join([*ways, '--device cpu'])}")
    return "cuda" if gpus >= processes and device != "cpu" else "cpu"


def launched_by_torchrun() -> bool:
    """Has another launcher already started one process per replica?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun_place(config: TrainConfig) -> Place:
    """This process under torchrun; raises ValueError as `choose_device` does, or if the run needs another number of processes."""
    world_size = int(os.environ["WORLD_SIZE"])
    kind = choose_device(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if config.coresident and world_size > 1:
        raise ValueError(f"coresident is one process, but {world_size} were started: start it without torchrun")
    if world_size != config.processes:
        raise ValueError(f"replicas is {config.replicas}, but {world_size} processes were started: leave --replicas out under torchrun")
    return Place(int(os.environ["RANK"]), world_size, kind if kind == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")


@contextmanager
def join(place: Place, init_method: str = "env://") -> Iterator[None]:
    """Be a member of the default process group: gloo on CPUs, NCCL on GPUs. One process alone needs no group."""
    if place.device != "cpu":
        torch.cuda.set_device(place.device)
    elif place.world_size > 1:
        torch.set_num_threads(1)  # the processes share the cores; more threads than cores only wait for each other
    if place.world_size == 1:
        yield
        return
    backend = "gloo" if place.device == "cpu" else "nccl"
    gpu = None if place.device == "cpu" else torch.device(place.device)
    dist.init_process_group(backend, init_method=init_method, rank=place.rank, world_size=place.world_size, device_id=gpu)
    yield
    # Only after success: a member that failed must not wait for peers that never come.
    dist.barrier()
    dist.destroy_process_group()
