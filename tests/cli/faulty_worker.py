"""A worker that does what HDET_TEST_FAULT says after a step of the run, once its files are written.

``kill-parent@8``, ``interrupt@8`` (Ctrl-C in the terminal: the whole process group): by rank 0.
``raise@8``, ``die@8``: by rank 1.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hdet.cli.job import training, worker

from ..limits import HANG_S


def _happen(fault: str, rank: int) -> None:
    if rank == 1 and fault == "raise":
        raise ArithmeticError("the fault of replica 1")
    if rank == 1 and fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and fault == "kill-parent":
        os.kill(os.getppid(), signal.SIGKILL)
    if rank == 0 and fault == "interrupt":
        os.killpg(os.getpgrp(), signal.SIGINT)
    if fault in ("kill-parent", "interrupt"):
        time.sleep(10 * HANG_S)  # only the watch over the parent, or the parent itself, ends this


def main() -> None:
    if os.environ["HDET_TEST_PIDS"]:
        Path(os.environ["HDET_TEST_PIDS"], str(os.getpid())).touch()
    fault, _, step = os.environ["HDET_TEST_FAULT"].partition("@")
    between_cycles = training.Run.between_cycles

    def then_fail(run: training.Run) -> None:
        between_cycles(run)
        if run.step == int(step):
            _happen(fault, run.place.rank)

    training.Run.between_cycles = then_fail  # type: ignore[method-assign]
    worker.main()


if __name__ == "__main__":
    sys.exit(main())
