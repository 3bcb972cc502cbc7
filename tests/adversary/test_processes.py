"""Two and three processes under random orders of steps, averages, saves and loads, with a replica
that breaks and one that is slow.

Replicas that have just been averaged are bitwise equal, and base values are equal at all times; a
save is what is loaded.
"""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hdet
from hdet import checkpoint

from ..distributed import run_ranks
from ..harness import Run
from .common import LONGER, bits

OTHERS = ["converge", "save", "load", "broken loss", "broken weights", "slow", "state"]
ACTIONS = ["step"] * 4 + OTHERS
SEQUENCES = 4


def equal(value: Any) -> bool:
    """On all ranks?"""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value)
    return all(row == rows[0] for row in rows)


Sequence = tuple[list[tuple[str, int]], float, bool]


def play(rank: int, world: int, root: str, sequences: list[Sequence]) -> None:
    # of replicas that are left out, and of states in the middle of a cycle
    warnings.simplefilter("ignore")
    for number, (actions, spread, softmax) in enumerate(sequences):
        folder = Path(root, str(number))
        controller = hdet.SoftmaxController(decay=None, step_size=0.5 if softmax else 0.1)
        run = Run(rank, spread=spread, total=200, every=3, controller=controller)
        saved: Any = None
        for place, (action, chosen) in enumerate(actions):
            mine, what = chosen % world == rank, (number, place, action)
            cycle = run.ensemble.cycle
            if action == "step":
                run.step()
            elif action == "broken loss":
                run.step(report=float("nan") if mine else None)
            elif action == "slow":
                time.sleep(0.05 * mine)
                run.step()
            elif action == "broken weights":  # after the step, or DDP's gradients would break all
                if mine:
                    with torch.no_grad():
                        next(run.net.parameters())[0] = float("nan")
                run.ensemble.converge()
            elif action == "converge":
                run.ensemble.converge()
            elif action == "save":
                path = checkpoint.save(folder, state_of(run), place)
                saved = path, facts(run), run.index
            elif action == "load" and saved is not None:
                checkpoint.load(saved[0], state_of(run))
                assert facts(run) == saved[1], what
                run.index = saved[2]
            elif action == "state":
                state = copy.deepcopy(run.ensemble.state_dict())
                assert equal(state), what
                run.ensemble.load_state_dict(state)
            averages = action in ("converge", "save", "broken weights")
            averaged = run.ensemble.cycle > cycle or averages
            assert run.ensemble.in_sync or not averaged, what
            if run.ensemble.in_sync:
                assert equal(bits(run.weights())), what
            assert torch.isfinite(run.weights()).all(), what
            assert equal((rates(run), run.ensemble.values(), run.ensemble.corrections)), what
        run.ensemble.close()


def state_of(run: Run) -> checkpoint.RunState:
    return checkpoint.RunState(run.net, run.ensemble)


def rates(run: Run) -> list[float]:
    return [group["lr"] for group in run.optimizer.param_groups]


def facts(run: Run) -> Any:
    moments = run.optimizer.state_dict()["state"]
    return bits([run.weights(), moments, rates(run), run.ensemble.state_dict()])


def sequence(seed: int) -> Sequence:
    """Actions, each with a rank that is meant; the spread; and which controller."""
    random = Random(seed)
    actions = [(random.choice(ACTIONS), random.randrange(6)) for _ in range(random.randint(8, 24))]
    return actions, random.choice([0.0, 0.3, 0.3]), random.random() < 0.5


@pytest.mark.parametrize("world", [2, 3])
def test_random_sequences(world: int, tmp_path: Path) -> None:
    """Hypothesis would play each of them again and again; processes are too slow for that.

    An error names sequence, place and action.
    """
    sequences = [sequence(100 * world + i) for i in range(SEQUENCES * LONGER)]
    run_ranks(play, world, str(tmp_path), sequences, timeout=120 * LONGER)
