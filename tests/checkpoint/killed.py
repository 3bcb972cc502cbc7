"""A run whose second save is killed in the middle of a file, half of which is on disk (a scenario for tests.faults.harness)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hdet import checkpoint

from ..faults.harness import World
from .helpers import Run, ddp

KILLED_RANK = {"data": 1, "before the rename": 0}


def killed_in_a_save(world: World, where: str) -> None:
    run = ddp(world.rank, world.size).steps(5)
    checkpoint.save(Path(world.folder, "run"), run.state)
    Path(world.folder, f"weights-{world.rank}.json").write_text(json.dumps(weights(run)))
    run.steps(2)
    if KILLED_RANK[where] == world.rank:
        die_in(world, where)
    world.afterwards = lambda: " | ".join(map(_said, (run.ensemble.step, run.ensemble.converge, run.ensemble.state_dict)))
    checkpoint.save(Path(world.folder, "run"), run.state)


def restarted(rank: int, world: int, folder: str, step: int) -> tuple[list[float], list[str]]:
    """What another start of two ranks finds after that, and what its own next save leaves there."""
    run = ddp(rank, world)
    assert checkpoint.load(Path(folder, "run"), run.state, missing=0) == step
    run.index, found = step, weights(run)
    checkpoint.save(Path(folder, "run"), run.steps(7 - step).state)
    return found, sorted(os.listdir(Path(folder, "run")))


def weights(run: Run) -> list[float]:
    return [x for p in run.net.parameters() for x in p.detach().flatten().tolist()]


def die_in(world: World, where: str) -> None:
    if where == "data":
        from torch.distributed.checkpoint import filesystem

        write_item = filesystem._write_item

        def half(transforms: Any, stream: Any, data: Any, *args: Any) -> Any:
            write_item(transforms, stream, data, *args)
            stream.flush()
            os.truncate(stream.name, os.path.getsize(stream.name) // 2)
            world.die()

        filesystem._write_item = half
    else:
        rename = os.rename

        def last(source: Any, target: Any) -> None:
            world.die() if Path(target).name.startswith("step-") else rename(source, target)

        os.rename = last


def _said(function: Any) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""
