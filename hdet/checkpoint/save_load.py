"""save and load: collective, atomic, checked before anything is changed."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..core.validate import whole
from . import folder as folders
from .errors import CheckpointError, Together
from .run_state import RunState
from .saved_state import SavedState
from .tensor_files import Chunk, describe, plan_files, write_files

T = TypeVar("T")


def save(
    root: str | os.PathLike[str], state: RunState, step: int | None = None, *, keep: int = 2
) -> Path:
    """Write ``root/step-XXXXXXXX``, durably and whole, or not at all. Every rank calls it.

    Converges first if the replicas have parted. The folder gets its name by one rename, once all is
    written and synced; before that earlier checkpoints are untouched. A step that is there already
    is replaced. What a killed save has left is removed by the next one.

    Args:
        root: a folder that all ranks see.
        step: what `load` returns; by default the steps that the Ensemble has counted.
        keep: how many checkpoints to keep, this one included.

    Returns:
        The folder, on every rank, once it is durable.

    Raises:
        ValueError: ``step`` is negative or ``keep`` below 1.
        CheckpointError: on every rank alike. Another process is saving there; what has the
            checkpoint's name is not hdet's; ranks differ in ``step``, ``keep``, or in what they
            should have in common; or it cannot be written. Earlier checkpoints are as they were.
    """
    _check_run_state(state)
    step = state.ensemble.engine.step if step is None else whole(step, "step", 0)
    whole(keep, "keep")
    final = folders.final_folder(Path(root), step)
    together = Together(state.ensemble.replicas.world_group)
    with ExitStack() as stack:
        with state.ensemble.during("checkpoint"):
            asked = set(together.all(lambda: (step, keep)))
            if len(asked) > 1:
                raise CheckpointError(
                    "save was called with different (step, keep) on different ranks: "
                    f"{sorted(asked)}"
                )
            together.first(lambda: stack.enter_context(folders.locked_for(final)))
        if not state.ensemble.in_sync:
            state.ensemble.converge()
        state.ensemble.reset_loss_meters()  # losses of the running cycle are not in the checkpoint
        with state.ensemble.during("checkpoint"):
            _write(final, state, step, keep, together)
    newest = folders.latest(root) if together.rank == 0 else final
    if newest != final:
        warnings.warn(
            f"{str(root)!r} holds a later checkpoint than the one saved now: latest() gives "
            f"{str(newest)!r}",
            stacklevel=2,
        )
    return final


def load(root: str | os.PathLike[str], state: RunState, *, missing: int | None = None) -> int:
    """Continue from a checkpoint: a folder ``step-XXXXXXXX``, or the latest of a root.

    Every rank calls it. All of it is read and checked before anything in the run is changed:
    checksums, names, shapes, dtypes, and what Ensemble and optimizer say to their states. The
    number of replicas may be another: base values, corrections and velocities go on. DTensors may
    be sharded in another way. Objects in ``extra`` take their states over first; one that raises
    then is the only thing that has changed.

    Args:
        missing: the step to begin at, such as 0, where ``root`` holds no checkpoint. The first rank
            looks and tells all. None: that is an error. A damaged checkpoint is one in any case.

    Returns:
        The step that was given to `save`; or ``missing``, and nothing has been changed.

    Raises:
        ValueError: ``missing`` is negative.
        CheckpointError: on every rank alike, in one line: there is none, it is damaged (the one
            before is named, never taken silently), of another format, or does not fit the run.
    """
    _check_run_state(state)
    if missing is not None:
        whole(missing, "missing", 0)
    with state.ensemble.during("checkpoint"):
        return _read(Path(root), state, missing)


def _check_run_state(state: Any) -> None:
    if not isinstance(state, RunState):
        raise TypeError(f"state must be an hdet.checkpoint.RunState, got {type(state).__name__}")


def _read(path: Path, state: RunState, missing: int | None) -> int:
    together = Together(state.ensemble.replicas.world_group)

    def open_checkpoint() -> tuple[Path, dict[str, Any]] | None:
        folder = folders.find_checkpoint(path)
        if folder is None and missing is None:
            raise CheckpointError(
                f"{str(path)!r} holds no checkpoint: pass a folder step-XXXXXXXX that "
                "hdet.checkpoint.save wrote, or its root"
            )
        return None if folder is None else (folder, folders.read_manifest(folder))

    opened = together.first(open_checkpoint)
    if opened is None:
        assert missing is not None
        return missing
    folder, manifest = opened
    folders.verify_files(folder, manifest["files"], together)

    def fits(function: Callable[[], T]) -> T:
        try:
            return together.each(function)
        except CheckpointError as error:
            what = f"checkpoint {str(folder)!r} does not fit this run"
            raise CheckpointError(f"{what}: {error}") from error

    saved = fits(lambda: SavedState(state, folder, manifest))
    fits(saved.check)
    # Nothing has been changed so far, on any rank. What can still refuse comes first.
    for take_over in (saved.give_extra, saved.load_ensemble, saved.load_model_and_optimizer):
        fits(take_over)
    step: int = manifest["step"]
    return step


# -- what is written ------------------------------------------------------------------------------


def _write(final: Path, state: RunState, step: int, keep: int, together: Together) -> None:
    from .. import __version__

    partial, replicas = folders.partial_folder(final), state.ensemble.replicas
    parts, tensors = together.each(state.encode)
    rows = together.all(lambda: (state.place, parts, describe(tensors, replicas)))
    rows.sort(key=lambda row: row[0])
    chunks = [row[2] for row in rows]
    names = state.agreeing_names(name for row in chunks for name in row)
    check_equal(chunks[replicas.member :: replicas.members], names, together)
    index, shares = plan_files(chunks)

    def write() -> None:
        if not partial.is_dir():
            raise CheckpointError(f"{str(final.parent)!r} is not one folder for all ranks")
        write_files(partial, shares[state.place], tensors)

    together.all(write)
    content = {"parts": _merge([row[1] for row in rows]), "tensors": index}
    together.first(lambda: folders.write_json(partial / folders.STATE, content))
    files = [folders.STATE, *(file for share in shares for file in share)]
    sums = folders.files_facts(partial, dict.fromkeys(files), together)
    facts = {"hdet": __version__, "torch": str(torch.__version__), "step": step}
    # Replicas that share a process are equal, and are one here.
    facts |= {"replicas": len(rows) // replicas.members, "members": replicas.members}
    together.first(lambda: folders.publish(final, facts, sums, keep))


def _merge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By part its different values, and which of them each rank has."""
    merged = {}
    for part in dict.fromkeys(part for row in rows for part in row):
        texts = [json.dumps(row.get(part)) for row in rows]
        different = list(dict.fromkeys(texts))
        values = [json.loads(text) for text in different]
        merged[part] = {"values": values, "of_rank": [different.index(text) for text in texts]}
    return merged


def check_equal(rows: Sequence[Mapping[str, Chunk]], names: set[str], together: Together) -> None:
    """Compare what replicas should hold alike.

    Args:
        rows: for each replica the chunks of this rank's peer in it.
        names: of the tensors to compare.

    Raises:
        CheckpointError: on all ranks alike, where they differ.
    """

    def compare() -> None:
        for replica, row in enumerate(rows):
            for name in sorted(names):
                if row.get(name) != rows[0].get(name):
                    what = (
                        "the parameters" if name.startswith("model.") else "the optimizer's state"
                    )
                    raise CheckpointError(
                        f"{what} differ between replicas 0 and {replica} (in {name!r}), "
                        "which should hold the same after a converge: a checkpoint would mix them. "
                        "Gradients must be reduced over all replicas, or the Ensemble made with "
                        "gradients='local'"
                    )

    together.all(compare)
