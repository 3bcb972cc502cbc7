"""A folder of checkpoints that others write to as well, and saves that end at any system call.

`latest` is always one of the saved states, bit for bit, and foreign things stay as they are.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file

from hdet import checkpoint
from hdet.checkpoint import CheckpointError
from hdet.checkpoint.folder import LOCK

from ..checkpoint.helpers import alone, plain_sgd, torch_adamw
from .common import bits, quiet, tree, trial

HARMLESS = ["notes.txt", "other/", ".x.partial", "stepping-00000001/"]
FOREIGN = ["step-00000002/", "step-00000004", "step-00000006/"]
LINKS = ["step-00000003"]
CALLS = ["rename", "replace", "fsync", "mkdir", "rmdir", "unlink", "open", "scandir", "listdir"]


class Killed(BaseException):
    """In the place of a SIGKILL: nothing that the process does after it reaches the disk."""


class CheckpointMachine(RuleBasedStateMachine):
    @initialize(adamw=st.booleans())
    def begin(self, adamw: bool) -> None:
        self.stack = ExitStack()
        self.work = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.root, self.outside = self.work / "run", self.work / "outside"
        self.outside.mkdir()
        (self.outside / "weights").write_bytes(b"of somebody")
        self.stack.enter_context(quiet())
        self.make = torch_adamw if adamw else plain_sgd
        self.run = alone(self.make)
        self.saved: dict[int, Any] = {}
        self.foreign: dict[str, Any] = {}
        self.exported: Any = None

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    @invariant()
    def foreign_things_are_untouched(self) -> None:
        if hasattr(self, "foreign"):
            assert {name: tree(self.root / name) for name in self.foreign} == self.foreign
            assert tree(self.outside) == {"weights": b"of somebody"}

    @invariant()
    def the_latest_is_a_saved_state(self) -> None:
        if not hasattr(self, "saved"):
            return
        latest = checkpoint.latest(self.root)
        if latest is not None and latest.name in self.foreign:
            # It may be meant for a checkpoint: said aloud, never passed over silently.
            self.refused(self.root)
        elif latest is None:
            assert not self.saved
        else:
            assert self.loaded(latest) == (max(self.saved), self.saved[max(self.saved)])

    def loaded(self, folder: Path) -> tuple[int, Any]:
        fresh = alone(self.make)
        step = checkpoint.load(folder, fresh.state)
        return step, bits(fresh.facts())

    def refused(self, folder: Path) -> None:
        """In one line; run and folder stay as they are."""
        before, run = tree(self.root), alone(self.make).steps(1)
        facts = bits(run.facts())
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, run.state)
        assert "\n" not in str(caught.value)
        assert bits(run.facts()) == facts and tree(self.root) == before

    # -- what a run does ---------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        if self.run.index + count < 40:
            self.run.steps(count)

    @rule(keep=st.integers(1, 3))
    def save(self, keep: int) -> None:
        step = self.run.index
        before = tree(self.root)
        try:
            folder = checkpoint.save(self.root, self.run.state, step, keep=keep)
        except CheckpointError:
            assert f"step-{step:08d}" in self.foreign and tree(self.root) == before
            return
        assert f"step-{step:08d}" not in self.foreign and folder == self.root / f"step-{step:08d}"
        self.saved[step] = bits(self.run.facts())
        for old in sorted(s for s in self.saved if s <= step)[:-keep]:
            del self.saved[old]
        mine = {entry.name for entry in self.root.iterdir()} - {LOCK, *self.foreign}
        # No rubbish, and nothing kept too long.
        assert mine == {f"step-{s:08d}" for s in self.saved}

    @rule(call=st.integers(0, 60), kill=st.booleans(), keep=st.integers(1, 2))
    def save_that_ends_early(self, call: int, kill: bool, keep: int) -> None:
        """At a system call, by an error (a full disk) or for good: the state is there or not."""
        if f"step-{self.run.index:08d}" not in self.foreign:
            self.attempt(call, kill, keep)

    def attempt(self, call: int, kill: bool, keep: int) -> bool:
        """Was the save over before that call?"""
        step = self.run.index
        allowed = {s: [facts] for s, facts in self.saved.items()}
        allowed.setdefault(step, []).append(bits(self.run.facts()))
        try:
            with failing(call, kill) as left:
                checkpoint.save(self.root, self.run.state, step, keep=keep)
            ended = True
        except (CheckpointError, OSError, Killed):
            ended = False
        self.saved = self.found(allowed)
        if ended:
            assert step in self.saved and self.saved[step] == allowed[step][-1]
        elif allowed.keys() - {step}:
            assert self.saved  # what was there before is not lost
        return left[0] >= 0

    def found(self, allowed: dict[int, list[Any]]) -> dict[int, Any]:
        """What can be loaded now; each must be one of the states that were saved for its step."""
        entries = self.root.iterdir() if self.root.is_dir() else ()
        names = {entry.name for entry in entries} - self.foreign.keys()
        states: dict[int, Any] = {}
        for name in sorted(names):
            final = name.removeprefix(".hdet-").removesuffix(".replaced")
            is_one = final.startswith("step-") and not final.endswith(".partial")
            if is_one and (name == final or final not in names):
                step, facts = self.loaded(self.root / name)
                assert step == int(final[5:]) and facts in allowed[step], name
                states[step] = facts
        return states

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """To any of them, by name."""
        step = data.draw(st.sampled_from(sorted(self.saved)))
        if (self.root / f"step-{step:08d}").is_dir():
            self.run = alone(self.make).resume(self.root / f"step-{step:08d}")
            assert bits(self.run.facts()) == self.saved[step]

    # -- what others do ----------------------------------------------------------------------------

    @rule(name=st.sampled_from(HARMLESS + FOREIGN + LINKS))
    def somebody_writes(self, name: str) -> None:
        """Something of their own, perhaps under a name that looks like one of ours."""
        path = self.root / name.rstrip("/")
        if os.path.lexists(path):
            return
        self.root.mkdir(exist_ok=True)
        if name in LINKS:
            path.symlink_to(self.outside, target_is_directory=True)
        elif name.endswith("/"):
            path.mkdir()
            (path / "weights.bin").write_bytes(b"of somebody else")
        else:
            path.write_bytes(b"of somebody else")
        self.foreign[path.name] = tree(path)

    @rule(call=st.integers(0, 12), kill=st.booleans(), whole=st.booleans(), link=st.booleans())
    def export(self, call: int, kill: bool, whole: bool, link: bool) -> None:
        """The file is the old one or the new one, and what links lead to is not written."""
        path = self.work / "model.safetensors"
        trap = self.work / ".model.safetensors.partial"
        if link and not os.path.lexists(trap):
            trap.symlink_to(self.outside / "weights")
        allowed = [self.exported, bits(self.run.net.state_dict())]
        try:
            with failing(10**9 if whole else call, kill):
                assert checkpoint.export_safetensors(path, self.run.net, self.run.ensemble) == path
            allowed = allowed[1:]
        except (CheckpointError, OSError, Killed):
            assert not whole
        self.exported = bits(load_file(path)) if path.exists() else None
        assert self.exported in allowed


@contextmanager
def failing(call: int, kill: bool) -> Iterator[list[int]]:
    """The ``call``-th call that looks at the disk or changes it raises; after a kill all do."""
    left = [call]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1 and not kill:
                raise OSError(28, "No space left on device")
            if left[0] < 0 and kill:
                raise Killed
            return function(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, wrap(getattr(os, name))))
        opened = wrap(open)
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        stack.enter_context(mock.patch.object(io, "open", opened))
        yield left


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = trial(examples=10, steps=12)


@pytest.mark.parametrize(("kill", "same"), [(True, True), (True, False), (False, True)])
def test_every_call_of_a_save(kill: bool, same: bool) -> None:
    """Beside a checkpoint or in its place: never is there none, and never half of one."""
    machine = CheckpointMachine()
    machine.begin(adamw=False)
    try:
        for call in range(200):
            machine.run = alone(machine.make).steps(2)
            machine.save(1)
            machine.train(0 if same else 1)
            if machine.attempt(call, kill, 1):
                break
            machine.the_latest_is_a_saved_state()
            if not same and 3 in machine.saved:  # published, and then something failed: it is there
                shutil.rmtree(machine.root)
                machine.saved = {}
        assert 15 < call < 199
    finally:
        machine.teardown()
