"""A resumed run is the same run, bit for bit, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hdet import checkpoint

from ..distributed import run_ranks
from . import helpers

Make = Callable[..., Any]


def interrupted(rank: int, world: int, build: Make, make: Make, root: str, at: int) -> Any:
    """What a run comes to that goes on after a save, and one that begins from it."""
    run = build(rank, world, make).steps(at)
    checkpoint.save(root, run.state, at)
    straight = run.steps(6).facts()
    run.ensemble.close()
    return straight, build(rank, world, make).resume(root).steps(6).facts()


H, ADAMW, FUSED = helpers, helpers.torch_adamw, helpers.fused_adamw
CASES = [
    (H.ddp, ADAMW, 2, 0), (H.ddp, FUSED, 2, 5), (H.ddp, H.torch_sgd, 2, 7),
    (H.ddp, H.fused_split, 2, 7), (H.ddp, H.fused_fp32, 2, 7),
    (H.shards, ADAMW, 4, 7), (H.groups, ADAMW, 4, 7), (H.hsdp, ADAMW, 4, 7),
    (H.hsdp, H.FusedEightBit, 4, 5), (H.hsdp_bf16, ADAMW, 4, 5), (H.compressed, ADAMW, 2, 13),
    (H.exact_local, H.fused_base_fp32, 2, 7), (H.local, FUSED, 2, 5),
    *((partial(H.local, moments=of), ADAMW, 2, 7) for of in ("keep", "average", "reset")),
    (H.local_fsdp, ADAMW, 4, 7), (H.outer, ADAMW, 2, 5), (H.outer_fsdp, ADAMW, 4, 5),
    (H.drop_in, ADAMW, 2, 7),
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(tmp_path, build, make, world, at) -> None:
    """Saved at the end of a cycle, in its middle, and before the first step."""
    for straight, resumed in run_ranks(interrupted, world, build, make, str(tmp_path), at):
        assert straight == resumed
