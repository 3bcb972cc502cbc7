"""The mean model as safetensors, for programs that know nothing of replicas."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..ensemble import Ensemble
from ..replicas import Replicas
from ..tensors.dtensor import is_sharded, like
from .folder import sync
from .run_state import Inventory, RunState
from .tensor_files import Chunk, describe, find_holders, to_host
from .together import Together


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
        ValueError: the replicas differ and ``ensemble.mean()`` does not know their mean: call
            ``ensemble.converge()`` before.
        CheckpointError: on every rank alike: the file cannot be written; or replicas differ that
            should not, as after a noisy start.
        ReplicaLost: a rank is gone.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {str(target)!r}")
    inventory = Inventory(RunState(model, ensemble))
    tensors = _mean_tensors(inventory, ensemble)  # refused before anything communicates
    with ensemble.guard("checkpoint"):
        replicas, together = ensemble.replicas, Together(ensemble.replicas)
        stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
        rows = together.all(lambda: describe(stored, replicas, inventory.is_shared))
        parts = together.gather(_held_tensors(tensors, rows, replicas))
        together.first(lambda: _write(target, parts, inventory, ensemble))
    return target


def _mean_tensors(inventory: Inventory, ensemble: Ensemble) -> dict[str, Any]:
    """The model's tensors by name, in the middle of a cycle the mean where it is known."""
    mean = ensemble.mean()
    if mean is None and (ensemble.has_begun or not ensemble.averager.idle):
        raise ValueError(
            "in the middle of a cycle the replicas' parameters differ, and a file of them would be "
            "a mixture: call ensemble.converge() on all ranks before"
        )
    params = ensemble.parameters
    pairs = zip(params, params if mean is None else mean, strict=True)
    means = {id(t): value if is_sharded(value) else like(value, t) for t, value in pairs}
    return {name: means.get(id(t), t) for name, t in inventory.tensors.items()}


def _held_tensors(
    tensors: Mapping[str, Any], rows: Sequence[Mapping[str, Chunk]], replicas: Replicas
) -> dict[str, torch.Tensor]:
    """What this rank adds to the file: each different content is its first holder's to give."""
    contents: dict[str, dict[Any, int]] = {}
    for (name, chunk), places in find_holders(rows, replicas.members).items():
        if places[0] < replicas.members:
            # A DTensor is one tensor for its peers; of a buffer of each rank's own one is enough.
            content = chunk.peers or (chunk.is_shared and chunk.digest)
            contents.setdefault(name, {}).setdefault(content, places[0])
    held = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # on all ranks alike
        givers = contents.get(f"model.{name}", {}).values()
        if replicas.index == 0 and replicas.member in givers:
            prefix = f"member{replicas.member}/" if len(givers) > 1 else ""
            held[prefix + name] = to_host(whole)
    return held


def _write(
    target: Path, parts: list[dict[str, torch.Tensor]], inventory: Inventory, ensemble: Ensemble
) -> None:
    from .. import __version__

    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    metadata = {
        **{other: name for other, name in inventory.tied.items() if name in tensors},
        "format": "pt",
        "hdet_version": __version__,
        "step": str(ensemble.steps_done),
        "replicas": str(ensemble.replicas.count),
        "base_values": json.dumps(ensemble.values()),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)  # of a killed writer; a link there must not lead the file away
    try:
        save_file(tensors, partial, metadata)
        sync(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    sync(target.parent)
