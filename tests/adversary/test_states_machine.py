"""Checkpoints whose contents are wrong although every checksum is right: refused in one line and
nothing has changed, or the run goes on.

States of an Ensemble by themselves are fuzzed in tests/ensemble, histories in tests/cli; here
several things are wrong at once, in a whole checkpoint of a whole run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet import checkpoint
from hdet.checkpoint import CheckpointError

from ..checkpoint.helpers import Run, fused_adamw, mlp
from ..harness import probe
from .common import bits, mutated, quiet, tree, trial

CONTROLLERS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "softmax": lambda net: hdet.SoftmaxController(decay=None),
    "probe": probe,
}


def two(controller: str) -> Run:
    """Replicas, so that every controller has something to compare."""
    return Run(mlp(), None, fused_adamw, 0, together=2, controller=CONTROLLERS[controller])


@pytest.mark.parametrize("controller", CONTROLLERS)
@trial(examples=4)
@given(data=st.data())
def test_a_wrong_state_in_a_whole_checkpoint(controller: str, data: st.DataObject) -> None:
    with quiet(), tempfile.TemporaryDirectory() as folder:
        saved = two(controller).steps(12)
        state = saved.ensemble.state_dict()
        theirs = {"scheduler": state.pop("scheduler")}  # what is in it is torch's
        state = data.draw(mutated(state)) | theirs
        with mock.patch.object(type(saved.ensemble), "state_dict", lambda self: state):
            checkpoint.save(folder, saved.state)
        fresh = two(controller).steps(2)
        goes_on_or_is_refused(Path(folder), fresh)


def goes_on_or_is_refused(folder: Path, run: Run) -> bool:
    """Has it been loaded?"""
    before, files = bits(run.facts()), tree(folder)
    try:
        checkpoint.load(folder, run.state)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 600 + 2 * len(str(folder))
        assert bits(run.facts()) == before and tree(folder) == files
        return False
    left = run.total - max(run.ensemble.engine.step, run.scheduler.last_epoch)
    try:
        run.steps(min(left, 11))
    except hdet.ensemble.ReplicasDiverged:
        pass  # a rate may be anything above 0
    with tempfile.TemporaryDirectory() as other:
        checkpoint.save(other, run.state)
    return True
