"""The mean model as safetensors, for programs that know nothing of replicas."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..ensemble import Ensemble
from ..files import replace_file
from ..tensors.dtensor import is_sharded, like
from .errors import Together
from .files import check_equal
from .inventory import Inventory
from .run_state import RunState
from .tensor_files import Chunk, describe, with_own_memory


def export_safetensors(
    path: str | os.PathLike[str], model: nn.Module, ensemble: Ensemble
) -> list[Path]:
    """Write the averaged model to ``path`` (name.safetensors). Every rank calls it.

    Tensors are whole, under the model's names; DTensors are gathered, one at a time. Where members
    of a replica hold tensors of their own (pipeline stages, hand-made shards), each writes a part,
    name-00001-of-00004.safetensors and so on, and name.safetensors.index.json says what is where;
    tensors of one name on several members get ``member2/`` before it. Tied tensors are written
    once; safetensors.torch.load_model ties them again. Buffers that are not averaged are those of
    replica 0. Files appear whole, by rename.

    Returns:
        The files, on every rank.

    Raises:
        ValueError: the replicas have parted and ``ensemble.mean()`` does not know their mean: call
            ``ensemble.converge()`` before.
        CheckpointError: on every rank alike: a file cannot be written; or replicas differ that
            should not, as after a noisy start.
        ReplicaLost: a rank is gone.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {str(target)!r}")
    state = RunState(model, ensemble)
    tensors = _mean_tensors(state)  # before anything communicates: refused on all ranks alike
    with ensemble.during("checkpoint"):
        return _export(target, state, tensors)


def _mean_tensors(state: RunState) -> dict[str, torch.Tensor]:
    """The model's tensors by name, in the middle of a cycle the mean where it is known."""
    ensemble, inventory = state.ensemble, Inventory(state.model)
    has_stepped = ensemble.parted or ensemble.engine.position or ensemble._fan_out.stepped
    if ensemble.in_sync or not (has_stepped or not ensemble.weights.average.idle):
        return inventory.tensors  # before the first step there is nothing to average
    mean = ensemble.mean()
    if mean is None:
        raise ValueError(
            "in the middle of a cycle the replicas' parameters differ, and a file of them would be a "
            "mixture: call ensemble.converge() on all ranks before"
        )
    pairs = zip(ensemble.parameters, mean, strict=True)
    means = {id(t): value if is_sharded(value) else like(value, t) for t, value in pairs}
    return {name: means.get(id(t), t) for name, t in inventory.tensors.items()}


def _export(target: Path, state: RunState, tensors: Mapping[str, Any]) -> list[Path]:
    replicas = state.ensemble.replicas
    together = Together(replicas.world_group)
    place = replicas.index * replicas.members + replicas.member
    own = {f"model.{name}": describe(t, replicas) for name, t in tensors.items()}
    rows = [row for _, row in sorted(together.all(lambda: (place, own)), key=lambda r: r[0])]
    names = state.agreeing_names(name for row in rows for name in row)
    check_equal(rows[replicas.member :: replicas.members], names, together)
    shares = _share(rows[: replicas.members], state)
    share = shares[place] if place < len(shares) else {}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if name in share:
            held[share[name]] = whole.detach().cpu().contiguous()
        del whole
    writers = [member for member, names in enumerate(shares) if names]
    files = [target]
    if len(writers) > 1:
        part = f"{target.stem}-{{:05d}}-of-{len(writers):05d}.safetensors".format
        files = [target.with_name(part(i + 1)) for i in range(len(writers))]

    def write() -> int:
        if held:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(files[writers.index(place)]) as partial:
                save_file(with_own_memory(held), partial, metadata=_metadata(state, set(held)))
        return sum(tensor.nbytes for tensor in held.values())

    total = sum(together.all(write))
    if len(writers) == 1:
        return files
    index = target.with_name(f"{target.name}.index.json")
    map_ = {n: f.name for m, f in zip(writers, files, strict=True) for n in shares[m].values()}

    def write_index() -> None:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(map_.items()))}
        with replace_file(index) as partial:
            partial.write_text(json.dumps(content, indent=1))

    together.first(write_index)
    return [*files, index]


def _share(rows: Sequence[Mapping[str, Chunk]], state: RunState) -> list[dict[str, str]]:
    """For each member of replica 0: what it writes, by name, and the name in its file."""
    holders: dict[tuple[str, Any], list[int]] = {}
    own_buffers = {f"model.{name}" for name in state.own_buffers()}
    for member, row in enumerate(rows):
        for key, chunk in row.items():
            # A DTensor is one tensor for its peers; of a buffer of each rank's own one is enough.
            content = chunk.peers or (None if key in own_buffers else chunk.digest)
            holders.setdefault((key, content), []).append(member)
    counts = Counter(key for key, _ in holders)
    shares: list[dict[str, str]] = [{} for _ in rows]
    for (key, _), members in holders.items():
        name = key.removeprefix("model.")
        shares[members[0]][name] = name if counts[key] == 1 else f"member{members[0]}/{name}"
    return shares


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
