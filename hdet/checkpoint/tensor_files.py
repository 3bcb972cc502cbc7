"""Tensors in safetensors files: each rank writes its share, and an index says what lies where.

What several ranks hold alike, bit for bit, is written once. So no tensor of one rank can be taken
for another's: a rank reads what a rank of the saved run held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..converge.health import digest
from ..replicas import Replicas
from ..tensors.dtensor import is_sharded, local
from .errors import CheckpointError
from .folder import sync

FILE_BYTES = 1 << 30
"""a rank begins another file after so much: a file is copied to the host's memory to be written"""


class Chunk(NamedTuple):
    """What a rank holds of a tensor: all of it, or the shard of a DTensor.

    peers: the members of the replica that hold the DTensor together; () for a plain tensor.
    digest: equal for equal contents.
    """

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    peers: tuple[int, ...] = ()
    digest: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * int(getattr(torch, self.dtype).itemsize)


def chunk_of(tensor: Any) -> Chunk:
    """Where this rank's part of a tensor lies in it."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if not is_sharded(tensor):
        return Chunk(dtype, shape, (0,) * len(shape), shape)
    (part,) = tensor.__create_chunk_list__()
    return Chunk(dtype, shape, tuple(part.offsets), tuple(part.sizes))


def describe(tensors: Mapping[str, Any], replicas: Replicas) -> dict[str, Chunk]:
    """By name what this rank holds, with peers and digest."""
    row = {}
    for name, tensor in tensors.items():
        own, peers = local(tensor.detach()), tuple[int, ...]()
        marks = digest([torch.view_as_real(own.resolve_conj()) if own.is_complex() else own])
        if is_sharded(tensor):
            ranks = tensor.device_mesh.mesh.flatten().tolist()
            members = enumerate(replicas.ranks[replicas.index])
            peers = tuple(member for member, rank in members if rank in ranks)
        row[name] = chunk_of(tensor)._replace(peers=peers, digest=tuple(marks.tolist()))
    return row


def plan_files(
    rows: Sequence[Mapping[str, Chunk]],
) -> tuple[dict[str, Any], list[dict[str, list[str]]]]:
    """Share the writing: a chunk is written by the holder that has the least to write so far.

    Args:
        rows: for each rank its chunks by the tensors' names.

    Returns:
        The index, name -> [{"dtype", "shape", "offsets", "sizes", "peers", "holders", "file"}, ...]
        with ranks as holders; and for each rank the names of the tensors that it writes, by file.
    """
    holders: dict[tuple[str, Chunk], list[int]] = {}
    for rank, row in enumerate(rows):
        for name, chunk in row.items():
            holders.setdefault((name, chunk), []).append(rank)
    index: dict[str, Any] = {}
    loads, shares = [0] * len(rows), [dict[str, list[str]]() for _ in rows]
    for (name, chunk), ranks in holders.items():
        rank = min(ranks, key=loads.__getitem__)
        file = f"rank-{rank:05d}-{loads[rank] // FILE_BYTES:03d}.safetensors"
        loads[rank] += chunk.nbytes
        shares[rank].setdefault(file, []).append(name)
        facts = {**chunk._asdict(), "holders": ranks, "file": file}
        del facts["digest"]
        index.setdefault(name, []).append(facts)
    return index, shares


def write_files(
    folder: Path, share: Mapping[str, Sequence[str]], tensors: Mapping[str, Any]
) -> None:
    """Write this rank's files, flushed to the disk."""
    for file, names in share.items():
        held = {name: _as_stored(local(tensors[name])) for name in names}
        save_file(with_own_memory(held), folder / file)
        sync(folder / file)


def with_own_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory, such as views of one buffer, which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_shared = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        result[name] = tensor.clone() if is_shared else tensor
        seen.add(storage.data_ptr())
    return result


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, contiguous; complex numbers as pairs, of which safetensors has not all kinds."""
    tensor = tensor.detach().cpu().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()


class TensorFiles:
    """Reads what one rank of the saved run held, from files that have been verified.

    Args:
        rank: of the saved run.
        members: ranks of each of its replicas.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any], rank: int, members: int) -> None:
        self._folder, self._index, self._rank, self._members = folder, index, rank, members
        self._open: dict[str, Any] = {}

    def chunks(self, name: str) -> list[dict[str, Any]]:
        """All chunks of the tensor that the rank held a part of."""
        own = next(chunk for chunk in self._index[name] if self._rank in chunk["holders"])
        if not own["peers"]:
            return [own]
        first = self._rank - self._rank % self._members
        ranks = {first + member for member in own["peers"]}
        chunks = [c for c in self._index[name] if c["peers"] == own["peers"]]
        return [chunk for chunk in chunks if not ranks.isdisjoint(chunk["holders"])]

    def is_whole(self, name: str) -> bool:
        """Did each member of the replica hold this same tensor, or a shard of it?"""
        first, own = self._rank - self._rank % self._members, self.chunks(name)[0]
        held = set(own["holders"]) | {first + member for member in own["peers"]}
        return held.issuperset(range(first, first + self._members))

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype."""
        own = self.chunks(name)[0]
        return tuple(own["shape"]), getattr(torch, own["dtype"])

    def read(self, name: str, like: Any = None) -> torch.Tensor:
        """Read to the host: what this rank now holds of ``like``, a tensor of its shape, or all.

        Raises:
            CheckpointError: the index has gaps, or a file holds another shape.
        """
        shape, dtype = self.kind(name)
        offsets, sizes = ((0,) * len(shape), shape) if like is None else chunk_of(like)[2:4]
        result = torch.empty(sizes, dtype=dtype)
        filled = torch.zeros(sizes, dtype=torch.bool)
        stored = torch.view_as_real(result) if result.is_complex() else result
        for chunk in self.chunks(name):
            begin = chunk["offsets"]
            low = [max(a, b) for a, b in zip(offsets, begin, strict=True)]
            ends = zip(offsets, sizes, begin, chunk["sizes"], strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = _slices(low, high, offsets)
                stored[target] = self._piece(name, chunk, _slices(low, high, begin))
                filled[target] = True
        if not filled.all():
            raise CheckpointError(f"its index has gaps: no file holds all of {name!r}")
        return result

    def _piece(self, name: str, chunk: Mapping[str, Any], part: tuple[slice, ...]) -> torch.Tensor:
        """Part of a chunk, which may look into the open file: to be copied while that is open."""
        if chunk["file"] not in self._open:
            self._open[chunk["file"]] = safe_open(self._folder / chunk["file"], "pt")
        stored = self._open[chunk["file"]].get_slice(name)
        if stored.get_shape() != [*chunk["sizes"], *([2] if self.kind(name)[1].is_complex else [])]:
            raise CheckpointError(f"{chunk['file']!r} and the index differ in {name!r}")
        piece: torch.Tensor = stored[part]
        return piece


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
