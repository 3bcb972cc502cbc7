"""torchrun restarts killed workers; the run goes on from the last checkpoint, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from ..alive import wait_until_gone
from ..distributed import run_ranks
from ..limits import HANG_S
from . import elastic_worker
from .elastic_worker import KILL_AT, SAVE_EVERY, STEPS

ROOT = Path(__file__).parents[2]


def uninterrupted(rank: int, world: int, folder: str) -> list[float]:
    return elastic_worker.train(Path(folder), kill=False)


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    (interrupted / "pids").mkdir(parents=True)
    whole.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--max-restarts=5", "-m", elastic_worker.__name__, str(interrupted),
    ]  # fmt: skip
    own = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, timeout=HANG_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (interrupted / "killed").exists()
    started = len(list((interrupted / "pids").iterdir()))
    # two workers, started twice; again where gloo aborts as they connect, as on a crowded machine
    assert started in range(4, 13, 2)
    wait_until_gone(interrupted / "pids", started)
    reference = run_ranks(uninterrupted, 2, str(whole))
    last = KILL_AT // SAVE_EVERY * SAVE_EVERY
    # neither is the end of a cycle
    assert KILL_AT % elastic_worker.INTERVAL and last % elastic_worker.INTERVAL
    for rank in range(2):
        assert torch.load(interrupted / f"weights-{rank}.pt") == reference[rank]
        steps = [int(line) for line in (interrupted / f"steps-{rank}").read_text().split()]
        assert sorted(set(steps)) == list(range(1, STEPS + 1))
        # something was repeated, so it was interrupted
        assert sorted(steps)[last:] != list(range(last + 1, STEPS + 1))
        repeated = [step for step in set(steps) if steps.count(step) > 1]
        assert len(steps) - STEPS == len(repeated) <= KILL_AT - last and min(repeated) == last + 1
