"""The mean model as safetensors, for programs that know nothing of replicas."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from ..owned_folder import atomic_file, atomic_path
from ..tensors.dtensor import is_sharded
from .errors import Together
from .files import check_equal, digests
from .keys import Inventory
from .run_state import RunState


def export_safetensors(path: str | os.PathLike[str], model: nn.Module, ensemble: Ensemble) -> list[Path]:
    """Write the averaged model to ``path`` (name.safetensors), whole tensors under the model's names. Every rank calls it.

    DTensors are gathered, one at a time. Where members of a replica hold tensors of their own (pipeline stages, hand-made shards), each
    writes a part: name-00001-of-00004.safetensors and so on, and name.safetensors.index.json says which tensor is where; tensors of
    one name on several members get ``member2/`` before it. Tied tensors are written once; the metadata has their other names, in
    the form that safetensors.torch.load_model reads. Buffers that are not averaged are those of replica 0. Files appear whole, by rename.

    Returns:
        The files, on every rank.

    Raises:
        ValueError: the replicas have parted and ``ensemble.mean()`` does not know their mean: call ``ensemble.converge()`` before.
        ImportError: safetensors is not installed.
        CheckpointError: on every rank alike: a file cannot be written; or replicas differ that should not, as after a noisy start.
        ReplicaLost: a rank is gone.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {str(target)!r}")
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("export_safetensors needs safetensors: pip install safetensors") from error

    state = RunState(model, ensemble)
    keyed = state.model_tensors(state.mean())  # before anything communicates: refused on all ranks alike
    with ensemble.during("checkpoint"):
        return _export(target, state, keyed, save_file)


def _export(target: Path, state: RunState, keyed: Mapping[str, torch.Tensor], save_file: Callable[..., object]) -> list[Path]:
    ensemble = state.ensemble
    together = Together(ensemble.replicas.world_group)
    check_equal(lambda: {"the parameters": digests(keyed.items())}, ensemble.replicas.member, together)
    writes, parts = _parts(state, keyed, together)
    own: dict[str, torch.Tensor] = {}
    for key, tensor in keyed.items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if name := writes.get(key):
            own[name] = whole.cpu().contiguous()
        del whole
    metadata = _metadata(state, set(own))

    def write() -> Path | None:
        if not own:
            return None
        count, place = len(parts), next(i for i, part in enumerate(parts) if part["rank"] == together.rank)
        file = target if count == 1 else target.with_name(f"{target.stem}-{place + 1:05d}-of-{count:05d}.safetensors")
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as partial:
            save_file(_apart(own), partial, metadata=metadata)
        return file

    files = together.all(write)
    written = [file for file in files if file is not None]
    if len(parts) > 1:
        index = target.with_name(f"{target.name}.index.json")
        together.first(lambda: _write_index(index, parts, files))
        written.append(index)
    return written


def _parts(state: RunState, keyed: Mapping[str, torch.Tensor], together: Together) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """This rank's key -> name in its file; and of every rank that writes: its rank and {name: bytes}."""
    replicas = state.ensemble.replicas
    own_rank = state.keys.of_rank()
    mine: dict[str, int] = {}
    if replicas.index == 0 or not state.keys.several_processes:
        for key, tensor in keyed.items():
            # What is everyone's is member 0's to write; a buffer of each rank too, of which one is enough.
            holder = key.split("/")[0] if key.startswith("member") else "member0"
            if holder == f"member{replicas.member}":
                mine[key] = tensor.numel() * tensor.element_size()
    rows = together.all(lambda: mine)
    bare = [{key: key.removeprefix(own_rank if key.startswith("replica") else key.split("/")[0] + "/") for key in row} for row in rows]
    counts = Counter(name for row in bare for name in row.values())
    named = [{key: name if counts[name] == 1 else key for key, name in row.items()} for row in bare]
    parts = [{"rank": r, "sizes": {named[r][key]: size for key, size in row.items()}} for r, row in enumerate(rows) if row]
    return named[together.rank], parts


def _metadata(state: RunState, names: set[str]) -> dict[str, str]:
    from .. import __version__

    ensemble, inventory = state.ensemble, Inventory(state.model)
    tied = {inventory.cleaned[raw]: name for raw, name in inventory.first_name.items() if inventory.cleaned[raw] != name and name in names}
    return {
        **tied,
        "format": "pt",
        "hdet_version": __version__,
        "step": str(ensemble.engine.step),
        "replicas": str(ensemble.replicas.count),
        "base_values": json.dumps(ensemble.values()),
    }


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Untied tensors that share memory (views of one buffer) get memory of their own, as safetensors needs."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen or tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        seen.add(address)
    return result


def _write_index(index: Path, parts: list[dict[str, Any]], files: list[Path | None]) -> None:
    where = {name: getattr(files[part["rank"]], "name", "") for part in parts for name in part["sizes"]}
    total = sum(size for part in parts for size in part["sizes"].values())
    with atomic_file(index) as file:
        file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=1).encode())
