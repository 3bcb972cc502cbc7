"""The mean model as safetensors, for programs that know nothing of replicas."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..ensemble import Ensemble
from ..tensors.dtensor import is_sharded, like
from .errors import Together
from .folder import replace_file
from .inventory import Inventory
from .run_state import RunState
from .save_load import check_equal
from .tensor_files import describe, with_own_memory


def export_safetensors(path: str | os.PathLike[str], model: nn.Module, ensemble: Ensemble) -> Path:
    """Write the averaged model to ``path`` (name.safetensors). Every rank calls it.

    Tensors are whole, under the model's names; DTensors are gathered, one at a time. Where members
    of a replica hold tensors of their own (pipeline stages, hand-made shards), the first rank
    gathers these; tensors of one name on several members get ``member2/`` before it. Tied tensors
    are written once, and safetensors.torch.load_model ties them again. Buffers that are not
    averaged are those of the first rank. The file appears whole, by rename.

    Returns:
        ``path``, on every rank, once the file is there.

    Raises:
        ValueError: the replicas have parted and ``ensemble.mean()`` does not know their mean: call
            ``ensemble.converge()`` before.
        CheckpointError: on every rank alike: the file cannot be written; or replicas differ that
            should not, as after a noisy start.
        ReplicaLost: a rank is gone.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {str(target)!r}")
    state = RunState(model, ensemble)
    tensors = _mean_tensors(state)  # before anything communicates: refused on all ranks alike
    with ensemble.during("checkpoint"):
        _export(target, state, tensors)
    return target


def _mean_tensors(state: RunState) -> dict[str, torch.Tensor]:
    """The model's tensors by name, in the middle of a cycle the mean where it is known."""
    ensemble, inventory = state.ensemble, Inventory(state.model)
    has_stepped = ensemble.engine.position or ensemble._fan_out.stepped
    if ensemble.in_sync or not (has_stepped or not ensemble.weights.average.idle):
        return inventory.tensors  # before the first step there is nothing to average
    mean = ensemble.mean()
    if mean is None:
        raise ValueError(
            "in the middle of a cycle the replicas' parameters differ, and a file of them would be "
            "a mixture: call ensemble.converge() on all ranks before"
        )
    pairs = zip(ensemble.parameters, mean, strict=True)
    means = {id(t): value if is_sharded(value) else like(value, t) for t, value in pairs}
    return {name: means.get(id(t), t) for name, t in inventory.tensors.items()}


def _export(target: Path, state: RunState, tensors: Mapping[str, Any]) -> None:
    replicas = state.ensemble.replicas
    together = Together(replicas.world_group)
    own = {f"model.{name}": tensor for name, tensor in tensors.items()}
    places = together.all(lambda: (state.place, describe(own, replicas)))
    rows = [row for _, row in sorted(places, key=lambda place: place[0])]
    names = state.agreeing_names(name for row in rows for name in row)
    check_equal(rows[replicas.member :: replicas.members], names, together)
    own_buffers = {f"model.{name}" for name in state.own_buffers()}
    contents: dict[str, dict[Any, int]] = {}
    for member, row in enumerate(rows[: replicas.members]):
        for key, chunk in row.items():
            # A DTensor is one tensor for its peers; of a buffer of each rank's own one is enough.
            content = chunk.peers or (None if key in own_buffers else chunk.digest)
            contents.setdefault(key, {}).setdefault(content, member)
    held = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        first_holders = contents.get(f"model.{name}", {}).values()
        if replicas.index == 0 and replicas.member in first_holders:
            prefix = f"member{replicas.member}/" if len(first_holders) > 1 else ""
            held[prefix + name] = whole.detach().cpu().contiguous()
        del whole
    gathered = together.gather(held)

    def write() -> None:
        whole = {name: tensor for part in gathered for name, tensor in part.items()}
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target) as partial:
            save_file(with_own_memory(whole), partial, metadata=_metadata(state, set(whole)))

    together.first(write)


def _metadata(state: RunState, names: set[str]) -> dict[str, str]:
    from .. import __version__

    ensemble, inventory = state.ensemble, Inventory(state.model)
    cleaned = [(inventory.cleaned[raw], name) for raw, name in inventory.first_name.items()]
    return {
        **{other: name for other, name in cleaned if other != name and name in names},
        "format": "pt",
        "hdet_version": __version__,
        "step": str(ensemble.engine.step),
        "replicas": str(ensemble.replicas.count),
        "base_values": json.dumps(ensemble.values()),
    }
