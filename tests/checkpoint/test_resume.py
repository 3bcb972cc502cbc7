"""A resumed run is the same run, bit for bit, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hdet import checkpoint

from ..distributed import run_ranks
from . import helpers
from .helpers import Run


def save_and_go_on(rank: int, world: int, build: Callable[..., Run], make: Callable[..., Any], root: str, at: int, more: int) -> Any:
    run = build(rank, world, make).steps(at)
    checkpoint.save(root, run.state, at)
    return run.steps(more).facts()


def load_and_go_on(rank: int, world: int, build: Callable[..., Run], make: Callable[..., Any], root: str, more: int) -> Any:
    return build(rank, world, make).resume(root).steps(more).facts()


CASES = [
    (helpers.ddp, helpers.torch_adamw, 2, 10),
    (helpers.ddp, helpers.torch_adamw, 2, 12),
    (helpers.ddp, helpers.torch_adamw, 2, 0),
    (helpers.ddp, helpers.torch_sgd, 2, 0),
    (helpers.ddp, helpers.torch_sgd, 2, 7),
    (helpers.ddp, helpers.plain_sgd, 2, 7),
    (helpers.ddp, helpers.fused_adamw, 2, 10),
    (helpers.ddp, helpers.fused_adamw, 2, 0),
    (helpers.ddp, helpers.fused_split, 2, 12),
    (helpers.ddp, helpers.fused_fp32, 2, 12),
    (helpers.shards, helpers.torch_adamw, 4, 12),
    (helpers.shards, helpers.fused_adamw, 4, 10),
    (helpers.groups, helpers.torch_adamw, 4, 12),
    (helpers.hsdp, helpers.torch_adamw, 4, 12),
    (helpers.hsdp, helpers.fused_adamw, 4, 10),
    (helpers.hsdp_bf16, helpers.torch_adamw, 4, 10),
    (helpers.streaming, helpers.torch_adamw, 2, 10),
    (helpers.streaming, helpers.torch_adamw, 2, 12),
    (helpers.overlapped, helpers.torch_adamw, 2, 11),
    (helpers.compressed, helpers.torch_adamw, 2, 10),
    (helpers.compressed, helpers.torch_adamw, 2, 13),
    (helpers.exact_local, helpers.fused_base, 2, 10),
    (helpers.exact_local, helpers.fused_base_fp32, 2, 12),
    (helpers.local_keep, helpers.torch_adamw, 2, 10),
    (helpers.local_keep, helpers.fused_adamw, 2, 12),
    (helpers.local_average, helpers.torch_adamw, 2, 12),
    (helpers.local_reset, helpers.torch_adamw, 2, 10),
    (helpers.local_reset, helpers.torch_adamw, 2, 12),
    (helpers.local_fsdp, helpers.torch_adamw, 4, 12),
]


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(tmp_path: Path, build: Callable[..., Run], make: Callable[..., Any], world: int, at: int) -> None:
    """Saved at the end of a cycle, in its middle, and before the first step."""
    straight = run_ranks(save_and_go_on, world, build, make, str(tmp_path), at, 8)
    resumed = run_ranks(load_and_go_on, world, build, make, str(tmp_path), 8)
    assert straight == resumed
