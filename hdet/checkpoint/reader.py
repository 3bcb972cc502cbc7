"""Reads what torch has written without trusting it: torch's own reader runs whatever code the pickles of a checkpoint name."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ..owned_folder import open_regular
from .errors import CheckpointError

INDEX = ".metadata"


class Reader(FileSystemReader):
    """For ``torch.distributed.checkpoint.load``: regular files of ``folder`` only, which ``files`` (name -> bytes) names."""

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        super().__init__(folder)
        self.fs = _RegularFiles()
        self._folder, self._files = folder, files
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for an index that torch has not written, or that names other files or places."""
        if self._index is None:
            index = read_index(self._folder)
            for info in index.storage_data.values():
                if info.offset + info.length > self._files.get(info.relative_path, -1):
                    raise _refused(self._folder, f"it speaks of {info.length} bytes at {info.offset} in {info.relative_path!r}")
            self._index = index
        return self._index


class Planner(DefaultLoadPlanner):
    """torch's, but plain data is read as tensors are: nothing but plain data can be in it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class _RegularFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb"
        with os.fdopen(open_regular(Path(path)), "rb") as stream:
            yield stream


# -- the index ---------------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Metadata:
    """torch's ``.metadata``, made of nothing but its own kinds of values. Raises CheckpointError for any other, OSError without one."""
    with os.fdopen(open_regular(folder / INDEX), "rb") as file:
        try:
            return _metadata(_Unpickler(file).load())
        except Exception as error:  # a damaged pickle raises anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise _refused(folder, reason) from error


def _refused(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"the index {INDEX} of checkpoint {str(folder)!r} is not one that torch writes ({reason}): it is damaged")


class _Record:
    """Stands for an instance of one of torch's classes: what it was made of. Nothing is called, whatever the pickle asks for."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""what the index of torch 2.10 to 2.13 is made of, beside sizes and dtypes; where it was written, layouts and memory formats are not needed"""


class _Unpickler(pickle.Unpickler):
    """Gives `_Record`s, of classes that are made for this one index: a pickle can set attributes of the classes that it names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return self._classes.setdefault(name, type(name, (_Record,), {}))
        if (module, name) == ("torch", "Size"):
            return tuple
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _metadata(found: Any) -> Metadata:
    """torch's own objects again, each value looked at. Raises ValueError, TypeError or KeyError."""
    fields = _fields(found, "Metadata")
    paths, entries, stored = (_kind(dict, fields[key]) for key in ("planner_data", "state_dict_metadata", "storage_data"))
    return Metadata(
        state_dict_metadata={_kind(str, key): _entry(value) for key, value in entries.items()},
        planner_data={_kind(str, key): _path(value) for key, value in paths.items()},
        storage_data={_place(key): _stored(value) for key, value in stored.items()},
        version=None if fields.get("version") is None else _kind(str, fields["version"]),
    )


def _fields(found: Any, name: str) -> dict[str, Any]:
    if not (isinstance(found, _Record) and type(found).__name__ == name):
        raise ValueError(f"{type(found).__name__} instead of {name}")
    return _kind(dict, found.state)


def _kind(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _whole(value: Any) -> int:
    if not 0 <= _kind(int, value) < 1 << 63:
        raise ValueError("a number of another size")
    return int(value)


def _size(value: Any) -> torch.Size:
    return torch.Size(map(_whole, _kind(tuple, value)))


def _path(value: Any) -> tuple[str | int, ...]:
    return tuple(_whole(part) if type(part) is int else _kind(str, part) for part in _kind(tuple, value))


def _entry(found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(found, _Record) and type(found).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(found, "TensorStorageMetadata")
    properties = fields["properties"]
    if not (isinstance(properties, _Record) and type(properties).__name__ == "TensorProperties"):
        raise ValueError("a tensor without properties")
    dtype = _kind(torch.dtype, _kind(tuple, properties.state)[0])
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _kind(list, fields["chunks"])]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(chunk["offsets"]), sizes=_size(chunk["sizes"])) for chunk in chunks],
    )


def _place(found: Any) -> MetadataIndex:
    fields = _fields(found, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(_kind(str, fields["fqn"]), None if offset is None else _size(offset), None if index is None else _whole(index))


def _stored(found: Any) -> _StorageInfo:
    fields = _fields(found, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError("a transformed entry")
    return _StorageInfo(_kind(str, fields["relative_path"]), _whole(fields["offset"]), _whole(fields["length"]))
