"""Tensors in safetensors files: each rank writes its share, and an index says what lies where.

What several ranks hold alike, bitwise, is written once. So no tensor of one rank can be taken
for another's: a rank reads what a rank of the saved run held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..converge.health import digest
from ..replicas import Replicas
from ..tensors.dtensor import is_sharded, local
from .folder import sync
from .together import CheckpointError

FILE_BYTES = 1 << 30
"""a rank begins another file after so much: a file is copied to the host's memory to be written"""


class Chunk(NamedTuple):
    """What a rank holds of a tensor: all of it, or the shard of a DTensor.

    peers: the members of the replica that hold the DTensor together; () for a plain tensor.
    digest: equal for equal contents. is_shared: should all replicas hold the same?
    """

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    peers: tuple[int, ...]
    digest: tuple[float, ...]
    is_shared: bool


Holders = dict[tuple[str, Chunk], list[int]]
"""the ranks that hold each chunk of each tensor, ascending"""


def describe(
    tensors: Mapping[str, Any], replicas: Replicas, is_shared: Callable[[str], bool]
) -> dict[str, Chunk]:
    """By name what this rank holds."""
    row = {}
    for name, tensor in tensors.items():
        dtype, peers = str(tensor.dtype).removeprefix("torch."), tuple[int, ...]()
        if is_sharded(tensor):
            ranks = tensor.device_mesh.mesh.flatten().tolist()
            members = enumerate(replicas.ranks[replicas.index])
            peers = tuple(member for member, rank in members if rank in ranks)
        marks = tuple(digest([_as_real(local(tensor.detach()))]).tolist())
        place = _place_of(tensor)
        row[name] = Chunk(dtype, tuple(tensor.shape), *place, peers, marks, is_shared(name))
    return row


def find_holders(rows: Sequence[Mapping[str, Chunk]], members: int) -> Holders:
    """Who holds what.

    Args:
        rows: for each rank its chunks by the tensors' names.
        members: ranks of each replica.

    Raises:
        CheckpointError: replicas differ in what they should hold alike.
    """
    holders: Holders = {}
    for rank, row in enumerate(rows):
        for name, chunk in row.items():
            holders.setdefault((name, chunk), []).append(rank)
    for (name, chunk), ranks in holders.items():
        own = {rank % members for rank in ranks}
        if chunk.is_shared and len(ranks) < len(own) * (len(rows) // members):
            lacking = [r for r in range(len(rows)) if r % members in own and r not in ranks]
            one, other = ranks[0] // members, lacking[0] // members
            what = "the parameters" if name.startswith("model.") else "the optimizer's state"
            raise CheckpointError(
                f"{what} differ between replicas {one} and {other} (in {name!r}), which should "
                "hold the same after a converge: a checkpoint would mix them. Gradients must be "
                "reduced over all replicas, or the Ensemble made with gradients='local'"
            )
    return holders


def plan_files(holders: Holders, ranks: int) -> tuple[dict[str, Any], list[dict[str, list[str]]]]:
    """Share the writing: a chunk is written by the holder that has the least to write so far.

    Returns:
        The index, name -> [{"dtype", "shape", "offsets", "sizes", "peers", "holders", "file"}, ...]
        and for each rank the names of the tensors that it writes, by file.
    """
    index: dict[str, Any] = {}
    loads, shares = [0] * ranks, [dict[str, list[str]]() for _ in range(ranks)]
    for (name, chunk), own in holders.items():
        writer = min(own, key=loads.__getitem__)
        file = f"rank-{writer:05d}-{loads[writer] // FILE_BYTES:03d}.safetensors"
        loads[writer] += math.prod(chunk.sizes) * int(getattr(torch, chunk.dtype).itemsize)
        shares[writer].setdefault(file, []).append(name)
        facts = {**chunk._asdict(), "holders": own, "file": file}
        del facts["digest"], facts["is_shared"]
        index.setdefault(name, []).append(facts)
    return index, shares


def write_files(
    folder: Path, share: Mapping[str, Sequence[str]], tensors: Mapping[str, Any]
) -> None:
    """Write this rank's files, flushed to the disk. Raises CheckpointError for a tensor that a file
    cannot give back, such as one of torch.float4_e2m1fn_x2."""
    for file, names in share.items():
        held = {name: to_host(_as_real(local(tensors[name]))) for name in names}
        save_file(held, folder / file)
        sync(folder / file)
        with safe_open(folder / file, "pt") as written:
            for name, tensor in held.items():
                _part(written, name, tensor, ": keep its bytes, .view(torch.uint8)")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: safetensors refuses tensors that share memory, such as views."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: safetensors has not all kinds of them."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _part(file: Any, name: str, like: torch.Tensor, remedy: str = "") -> Any:
    """A tensor in an open file, to be sliced. Raises CheckpointError if it has not the dtype and
    the shape of ``like``."""
    part, shape, none = file.get_slice(name), [*like.shape], slice(0) if like.dim() else ()
    if part.get_shape() != shape or part[none].dtype != like.dtype:
        raise CheckpointError(
            f"{name!r} is {part.get_dtype()} of shape {part.get_shape()} in its file, and not "
            f"{like.dtype} of shape {shape}{remedy}"
        )
    return part


def _place_of(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's part of a tensor."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (part,) = tensor.__create_chunk_list__()
    return tuple(part.offsets), tuple(part.sizes)


class SavedRank:
    """What one rank of the saved run held, in files that have been verified.

    Args:
        files: of the manifest; others are not opened.
        content: of state.json.
        rank: its place in the saved run, each of whose replicas had so many ``members``.

    Attributes:
        parts: its plain data, as JSON; None for a part that it had not.
    """

    def __init__(
        self, folder: Path, files: Any, content: Mapping[str, Any], rank: int, members: int
    ) -> None:
        self._files, self._index, self._rank = files, content["tensors"], rank
        self._replica = range(rank - rank % members, rank - rank % members + members)
        self._open = cache(lambda file: safe_open(folder / file, "pt"))
        parts = content["parts"].items()
        self.parts = {name: part["values"][part["of_rank"][rank]] for name, part in parts}

    def _chunks(self, name: str) -> list[dict[str, Any]]:
        """All chunks of the tensor that the rank held a part of."""
        own = next(chunk for chunk in self._index[name] if self._rank in chunk["holders"])
        ranks = {self._replica[member] for member in own["peers"]} or {self._rank}
        return [chunk for chunk in self._index[name] if not ranks.isdisjoint(chunk["holders"])]

    def is_whole(self, name: str) -> bool:
        """Did each member of the replica hold this same tensor, or a shard of it?"""
        own = self._chunks(name)[0]
        held = {*own["holders"], *(self._replica[member] for member in own["peers"])}
        return held.issuperset(self._replica)

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype."""
        chunk = self._chunks(name)[0]
        return tuple(chunk["shape"]), getattr(torch, chunk["dtype"])

    def read(self, name: str, like: Any = None) -> torch.Tensor:
        """Read to the host: what this rank now holds of ``like``, a tensor of its shape, or all.

        Raises:
            CheckpointError: the index has gaps.
        """
        shape, dtype = self.kind(name)
        offsets, sizes = ((0,) * len(shape), shape) if like is None else _place_of(like)
        result = torch.empty(sizes, dtype=dtype)
        filled = torch.zeros(sizes, dtype=torch.bool)
        for chunk in self._chunks(name):
            if chunk["file"] not in self._files:
                raise CheckpointError(f"its index names {chunk['file']!r}, which is no file of it")
            stored = _as_real(torch.empty(chunk["sizes"], dtype=dtype, device="meta"))
            part = _part(self._open(chunk["file"]), name, stored)
            spans = zip(offsets, sizes, chunk["offsets"], chunk["sizes"], strict=True)
            overlaps = [range(max(a, b), min(a + n, b + m)) for a, n, b, m in spans]
            if all(overlaps):
                target, source = (_slices(overlaps, o) for o in (offsets, chunk["offsets"]))
                _as_real(result)[target] = part[source]
                filled[target] = True
        if not filled.all():
            raise CheckpointError(f"its index has gaps: no file holds all of {name!r}")
        return result


def _slices(ranges: Sequence[range], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(r.start - o, r.stop - o) for r, o in zip(ranges, origin, strict=True))
