"""How many functions and files of hdet three everyday things go through: `python -m tests.calls`.

A step: one optimizer step and one ``ensemble.step`` in which nothing is to be done. A decision: the
end of a cycle of two replicas whose probe losses move the rate. A checkpoint: saved, and loaded.
Calls are counted by ``sys.setprofile``, of functions whose code lies in hdet; a generator counts
each time that it goes on, and so does each comprehension before Python 3.12.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hdet

from .harness import Run

ROOT = str(Path(hdet.__file__).parent)


def calls_of(what: Callable[[], object]) -> list[str]:
    """ "file:function" of each call, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found.append(f"{code.co_filename[len(ROOT) + 1 :]}:{code.co_name}")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return found


def of_a_step() -> list[str]:
    """In the middle of a cycle, without a controller."""
    run = Run(every=100).steps(3)
    loss = run.backward()

    def step() -> None:
        run.optimizer.step()
        run.ensemble.step(loss)

    return calls_of(step)


def of_a_decision() -> list[str]:
    """The last ``ensemble.step`` of a cycle, after which a probe has decided."""
    run = Run(together=2, controller="probe", every=5).steps(9)
    run.backward()
    run.optimizer.step()
    calls = calls_of(run.ensemble.step)
    assert run.ensemble.cycle == 2
    return calls


def of_a_checkpoint() -> tuple[list[str], list[str]]:
    """Saved, and loaded into a run that has just begun."""
    run, other = Run(every=100).steps(3), Run(every=100)
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = (hdet.checkpoint.RunState(one.net, one.ensemble) for one in (run, other))
        save = lambda: hdet.checkpoint.save(folder, mine)
        return calls_of(save), calls_of(lambda: hdet.checkpoint.load(folder, theirs))


if __name__ == "__main__":
    saved, loaded = of_a_checkpoint()
    flows = {"step": of_a_step(), "decision": of_a_decision(), "saved": saved, "loaded": loaded}
    for name, calls in flows.items():
        print(f"{name}: {len(calls)} calls, {len({call.split(':')[0] for call in calls})} files")
