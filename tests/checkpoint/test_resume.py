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


CASES = [
    (helpers.ddp, helpers.torch_adamw, 2, 10), (helpers.ddp, helpers.torch_adamw, 2, 12),
    (helpers.ddp, helpers.torch_adamw, 2, 0), (helpers.ddp, helpers.torch_sgd, 2, 0),
    (helpers.ddp, helpers.torch_sgd, 2, 7), (helpers.ddp, helpers.plain_sgd, 2, 7),
    (helpers.ddp, helpers.fused_adamw, 2, 10), (helpers.ddp, helpers.fused_adamw, 2, 0),
    (helpers.ddp, helpers.fused_split, 2, 12), (helpers.ddp, helpers.fused_fp32, 2, 12),
    (helpers.shards, helpers.torch_adamw, 4, 12), (helpers.shards, helpers.fused_adamw, 4, 10),
    (helpers.groups, helpers.torch_adamw, 4, 12), (helpers.hsdp, helpers.torch_adamw, 4, 12),
    (helpers.hsdp, helpers.fused_adamw, 4, 10), (helpers.hsdp, helpers.FusedEightBit, 4, 10),
    (helpers.hsdp_bf16, helpers.torch_adamw, 4, 10),
    (helpers.streaming, helpers.torch_adamw, 2, 10),
    (helpers.streaming, helpers.torch_adamw, 2, 12),
    (helpers.overlapped, helpers.torch_adamw, 2, 11),
    (helpers.compressed, helpers.torch_adamw, 2, 10),
    (helpers.compressed, helpers.torch_adamw, 2, 13),
    (helpers.exact_local, helpers.fused_base, 2, 10),
    (helpers.exact_local, helpers.fused_base_fp32, 2, 12),
    (helpers.local, helpers.torch_adamw, 2, 10), (helpers.local, helpers.fused_adamw, 2, 12),
    (partial(helpers.local, moments="average"), helpers.torch_adamw, 2, 12),
    (partial(helpers.local, moments="reset"), helpers.torch_adamw, 2, 10),
    (partial(helpers.local, moments="reset"), helpers.torch_adamw, 2, 12),
    (helpers.local_fsdp, helpers.torch_adamw, 4, 12),
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(
    tmp_path: Path, build: Make, make: Make, world: int, at: int
) -> None:
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
