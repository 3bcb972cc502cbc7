"""One rank of a run whose second save is killed: ``python -m tests.checkpoint.killed root rank where``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hdet import ReplicaLost, checkpoint

from .helpers import ddp

KILLED_RANK = {"data": 1, "manifest": 0, "before the rename": 0}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(where: str) -> None:
    """In the middle of a file: half of it is on disk."""
    if where == "data":
        from torch.distributed.checkpoint import filesystem

        write_item = filesystem._write_item

        def half(transforms: Any, stream: Any, data: Any, *args: Any) -> Any:
            write_item(transforms, stream, data, *args)
            stream.flush()
            os.truncate(stream.name, os.path.getsize(stream.name) // 2)
            die()

        filesystem._write_item = half
    elif where == "manifest":

        def dump(value: Any, file: Any, **_: Any) -> None:
            file.write(json.dumps(value)[:100])
            file.flush()
            die()

        json.dump = dump
    else:
        os.rename = lambda *_: die()


def main(root: str, rank: int, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/store", 2), rank=rank, world_size=2)
    run = ddp(rank, 2).steps(5)
    checkpoint.save(Path(root, "run"), run.state, 5)
    run.steps(2)
    if KILLED_RANK[where] == rank:
        die_in(where)
    try:
        checkpoint.save(Path(root, "run"), run.state, 7)
    except ReplicaLost as lost:
        print(lost, flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
