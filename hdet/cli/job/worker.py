"""``python -m hdet.cli.job.worker``: the process of one replica, or of all, started by `hdet.cli.job.processes`.

The first line of its standard input is the job. Nothing follows, and the end of the input says that the parent has ended: the
operating system closes the pipe even of a parent that was killed. Then this process ends too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from hdet.cli.job.config import TrainConfig
from hdet.cli.job.place import Place, join
from hdet.cli.job.run_files import encode
from hdet.cli.job.training import RunSpec, train_all


def main() -> None:
    # Ctrl-C reaches the whole foreground group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    events = _take_stdout()
    job = json.loads(sys.stdin.readline())
    scratch, rank = Path(job["scratch"]), job["rank"]
    threading.Thread(target=_leave_with_parent, args=(scratch,), daemon=True).start()
    try:
        work(job, events)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        report = {"time": time.time(), "text": traceback.format_exc()}
        # Written before the connections close: the peers' complaints about that come later and are told apart by the time.
        (scratch / f"error.{rank}").write_text(json.dumps(report), encoding="utf-8")
        os._exit(1)  # without waiting for the peers' threads
    events.close()
    # Not through the interpreter's shutdown: it aborts once in a while when torch's threads are still on their way out.
    os._exit(0)


def work(job: dict[str, Any], events: TextIO) -> None:
    """Join the other replicas and train."""
    place = Place(job["rank"], job["world_size"], job["device"])
    specs = [RunSpec(TrainConfig.from_dict(run["config"]), Path(run["folder"]), run["resume"]) for run in job["runs"]]

    def emit(event: dict[str, Any]) -> None:
        if place.is_first:
            events.write(encode(event) + "\n")
            events.flush()

    with join(place, Path(scratch_store(job["scratch"])).as_uri()):
        train_all(specs, place, emit)


def scratch_store(scratch: str) -> str:
    """The file through which the processes find each other: no port to be taken."""
    return os.path.join(os.path.abspath(scratch), "store")


def _take_stdout() -> TextIO:
    """Keep standard output for events; whatever a library prints goes to the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _leave_with_parent(scratch: Path) -> None:
    try:
        while os.read(sys.stdin.fileno(), 1024):
            pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # nobody else is left to remove it
        os._exit(1)


if __name__ == "__main__":
    main()
