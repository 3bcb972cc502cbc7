"""A loop as docs/faults.md has it for torchrun's restarts; rank 1 kills itself once, in a cycle."""

from __future__ import annotations

import datetime
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet import checkpoint

from ..limits import HANG_S

STEPS, INTERVAL, SAVE_EVERY, KILL_AT = 24, 4, 6, 21


def train(folder: Path, kill: bool) -> list[float]:
    """All parameters after `STEPS` steps, continued from ``folder``, where each step is noted."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    ensemble = hdet.Ensemble(
        optimizer, scheduler, sync=hdet.Sync(INTERVAL), warmup_steps=4,
        controller=hdet.SoftmaxController(),
    )  # fmt: skip
    state = checkpoint.RunState(model, ensemble)
    step = checkpoint.load(folder, state, missing=0)
    with ensemble.guard(), open(folder / f"steps-{rank}", "a") as done:
        while step < STEPS:
            if kill and rank == 1 and step == KILL_AT and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            # a function of the step: data resumes too
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (wrapped(x) - x.sum(1, keepdim=True).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ensemble.step(loss.detach())
            step += 1
            print(step, file=done, flush=True)
            if step % SAVE_EVERY == 0:
                checkpoint.save(folder, state)
    return [x for p in model.parameters() for x in p.detach().flatten().tolist()]


def meet() -> None:
    """As ``init_process_group``, but each start has a part of torchrun's store to itself."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(host, port, is_master=False)
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", agents)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=HANG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def main(folder: Path) -> None:
    (folder / "pids" / str(os.getpid())).touch()
    meet()
    weights = train(folder, kill=True)
    torch.save(weights, folder / f"weights-{dist.get_rank()}.pt")
    dist.destroy_process_group()
