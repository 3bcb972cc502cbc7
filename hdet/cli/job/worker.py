"""``python -m hdet.cli.job.worker HANDLE``: the process of one replica, or of all, started by `hdet.cli.job.processes`.

The handle is of a connection. It brings the job, and takes what rank 0 reports; or why this process fails, and when. Nothing else comes in,
and its end says that the parent has ended: the operating system closes the connection even of a parent that was killed. Then this process
ends too.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hdet.cli.job.place import join
from hdet.cli.job.training import train_all


def main() -> None:
    # Ctrl-C reaches the whole foreground group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    place, specs, scratch = connection.recv()
    threading.Thread(target=_leave_with_parent, args=(connection, scratch), daemon=True).start()

    def emit(event: dict[str, Any]) -> None:
        if place.is_first:
            connection.send(event)

    try:
        # They find each other through a file: no port to be taken.
        with join(place, (scratch / "store").as_uri()):
            train_all(specs, place, emit)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        # Sent before the connections to the peers close: their complaints about that come later and are told apart by the time.
        connection.send((time.time(), traceback.format_exc()))
        os._exit(1)  # without waiting for the peers' threads
    # Not through the interpreter's shutdown: it aborts once in a while when torch's threads are still on their way out.
    os._exit(0)


def _leave_with_parent(connection: Connection, scratch: Path) -> None:
    try:
        connection.recv()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # nobody else is left to remove it
        os._exit(1)


if __name__ == "__main__":
    main()
