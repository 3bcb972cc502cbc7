"""A resumed run is the same run, bit for bit, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet import checkpoint

from ..distributed import run_ranks
from . import helpers

Make = Callable[..., Any]


def interrupted(rank: int, world: int, build: Make, make: Make, root: str, at: int) -> Any:
    """What a run comes to that goes on after a save, and one that begins from it."""
    run = build(rank, world, make).steps(at)
    checkpoint.save(root, run.state, at)
    straight = run.steps(8).facts()
    run.ensemble.close()
    return straight, build(rank, world, make).resume(root).steps(8).facts()


H, ADAMW, FUSED = helpers, helpers.torch_adamw, helpers.fused_adamw
CASES = [
    *((H.ddp, ADAMW, 2, at) for at in (0, 10, 12)), *((H.ddp, H.torch_sgd, 2, at) for at in (0, 7)),
    (H.ddp, H.plain_sgd, 2, 7), (H.ddp, FUSED, 2, 10), (H.ddp, FUSED, 2, 0),
    (H.ddp, H.fused_split, 2, 12), (H.ddp, H.fused_fp32, 2, 12),
    (H.shards, ADAMW, 4, 12), (H.shards, FUSED, 4, 10), (H.groups, ADAMW, 4, 12),
    (H.hsdp, ADAMW, 4, 12), (H.hsdp, FUSED, 4, 10), (H.hsdp, H.FusedEightBit, 4, 10),
    (H.hsdp_bf16, ADAMW, 4, 10), (H.streaming, ADAMW, 2, 10), (H.streaming, ADAMW, 2, 12),
    (H.overlapped, ADAMW, 2, 11), (H.compressed, ADAMW, 2, 10), (H.compressed, ADAMW, 2, 13),
    (H.exact_local, H.fused_base, 2, 10), (H.exact_local, H.fused_base_fp32, 2, 12),
    (H.local, ADAMW, 2, 10), (H.local, FUSED, 2, 12),
    (partial(H.local, moments="average"), ADAMW, 2, 12),
    *((partial(H.local, moments="reset"), ADAMW, 2, at) for at in (10, 12)),
    (H.local_fsdp, ADAMW, 4, 12), (H.outer, ADAMW, 2, 10), (H.outer_fsdp, ADAMW, 4, 10),
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(tmp_path, build, make, world, at) -> None:
    """Saved at the end of a cycle, in its middle, and before the first step."""
    for straight, resumed in run_ranks(interrupted, world, build, make, str(tmp_path), at):
        assert straight == resumed


def one_cycle_facts(continues: Path | None, steps: int, root: Path | None = None) -> list[Any]:
    """A run of the drop-in scheduler: rates and parameters after each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = hdet.OneCycleAutoLR(
        optimizer, max_lr=1e-2, total_steps=12, auto_lr_warmup_steps=0, model_sync_interval=3,
        enable_auto_lr=False,
    )  # fmt: skip
    state = checkpoint.RunState(model, scheduler.ensemble)
    at = 0 if continues is None else checkpoint.load(continues, state, missing=0)
    found = []
    for step in range(at, at + steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        weights = [p.detach().tolist() for p in model.parameters()]
        found.append([scheduler.get_last_lr(), scheduler.last_epoch, *weights])
    if root is not None:
        checkpoint.save(root, state)
    return found


@pytest.mark.filterwarnings("ignore:.*one replica")
def test_the_drop_in_scheduler_goes_on(tmp_path: Path) -> None:
    whole = one_cycle_facts(None, 10)
    assert one_cycle_facts(None, 6, tmp_path) + one_cycle_facts(tmp_path, 4) == whole
