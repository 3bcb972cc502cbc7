"""save: collective and atomic."""

from __future__ import annotations

import json
import os
from collections import ChainMap
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..core.validate import warn, whole
from ..optim.masters import REPLICA_KEYS
from ..tensors.dtensor import is_sharded, like
from . import folder as folders
from .plain_data import encode
from .run_state import Inventory, RunState, state_methods
from .tensor_files import describe, find_holders, plan_files, write_files
from .together import CheckpointError, Together


def save(
    root: str | os.PathLike[str], state: RunState, step: int | None = None, *, keep: int = 2
) -> Path:
    """Write ``root/step-XXXXXXXX``, durably and whole, or not at all. Every rank calls it.

    Converges first if the replicas differ. The folder gets its name by one rename, once all is
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

    Example::

        state = hdet.checkpoint.RunState(model, ensemble)
        hdet.checkpoint.save(folder, state)
    """
    ensemble = state.ensemble
    step = ensemble.steps_done if step is None else whole(step, "step", 0)
    whole(keep, "keep")
    final = folders.final_folder(Path(root), step)
    together = Together(ensemble.replicas)
    with ExitStack() as stack, ensemble.guard("checkpoint"):
        asked = set(together.all(lambda: (step, keep)))
        if len(asked) > 1:
            raise CheckpointError(
                f"save was called with different (step, keep) on different ranks: {sorted(asked)}"
            )
        together.first(lambda: stack.enter_context(folders.locked_for(final)))
        if not ensemble.in_sync:
            ensemble.converge()
        ensemble.forget_losses()  # losses of the running cycle are not in the checkpoint
        if ensemble.search is not None:  # a thread of its own may save in a trial
            stack.enter_context(ensemble.search.in_place.held_off("checkpoint.save"))
        _write(final, state, step, keep, together)
    newest = folders.latest(root) if together.place == 0 else final
    if newest != final:
        warn(
            f"{str(root)!r} holds a later checkpoint than the one saved now: latest() gives "
            f"{str(newest)!r}",
        )
    return final


def _write(final: Path, state: RunState, step: int, keep: int, together: Together) -> None:
    from .. import __version__

    replicas, partial = state.ensemble.replicas, folders.partial_folder(final)
    inventory, tensors = Inventory(state), dict[str, torch.Tensor]()
    parts = together.all(lambda: _encode_parts(state, inventory, tensors))
    rows = together.all(lambda: describe(tensors, replicas, inventory.is_shared))
    index, shares = plan_files(find_holders(rows, replicas.members), len(rows))

    def write() -> dict[str, Any]:
        if not partial.is_dir():
            raise CheckpointError(f"{str(final.parent)!r} is not one folder for all ranks")
        share = shares[together.place]
        write_files(partial, share, tensors)
        return {file: folders.file_facts(partial / file) for file in share}

    manifest = {
        "hdet": __version__,
        "torch": str(torch.__version__),
        "step": step,
        "replicas": len(rows) // replicas.members,
        "members": replicas.members,
        "files": dict(ChainMap(*together.all(write))),
    }
    content = {"parts": _merge(parts), "tensors": index}
    together.first(lambda: folders.publish(final, content, manifest, keep))


def _encode_parts(
    run: RunState, inventory: Inventory, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """All that this rank holds after a converge as JSON, by part; its tensors go to ``tensors``."""
    parts: dict[str, Any] = {"model": inventory.tensors, "modules": inventory.modules}
    parts["optimizer"] = _optimizer_part(run, inventory)
    kept = run.ensemble.averager.state()
    if kept:
        params, count = inventory.averaged.items(), len(inventory.averaged)
        parts["average"] = {
            n: [like(tensor, p) for tensor in kept[i::count]] for i, (n, p) in enumerate(params)
        }
    parts["ensemble"] = run.ensemble.state_dict()
    if run.extra is not None:
        items = run.extra.items()
        parts["extra"] = {k: own[0]() if (own := state_methods(v)) else v for k, v in items}
    encoded = {part: encode(value, part, tensors) for part, value in parts.items()}
    for name, tensor in tensors.items():
        if name.startswith("extra") and is_sharded(tensor):
            raise ValueError(f"{name} is a DTensor, and extra is each rank's own: keep its shard")
    return encoded


def _optimizer_part(run: RunState, inventory: Inventory) -> dict[str, Any]:
    """The optimizer's state_dict, with the parameters' names in the place of their numbers."""
    names, saved = list(chain(*inventory.groups)), dict(run.optimizer.state_dict())
    state = {}
    for key, entries in saved.pop("state").items():
        if not isinstance(key, int):
            state[key] = entries  # not a parameter's
        # Further replicas on this device are equal now: one is enough.
        elif own := {k: v for k, v in entries.items() if v is not None and k not in REPLICA_KEYS}:
            state[names[key]] = own
    pairs = zip(saved.pop("param_groups"), inventory.groups, strict=True)
    groups = [{**group, "params": own} for group, own in pairs]
    return {"state": state, "groups": groups, "rest": saved}


def _merge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By part its different values, and which of them each rank has."""
    merged = {}
    for part in dict.fromkeys(part for row in rows for part in row):
        texts = [json.dumps(row.get(part)) for row in rows]
        different = list(dict.fromkeys(texts))
        values = [json.loads(text) for text in different]
        merged[part] = {"values": values, "of_rank": [different.index(text) for text in texts]}
    return merged
