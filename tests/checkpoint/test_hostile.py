"""A checkpoint from a stranger: nothing in it is run, and nothing outside of it is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from hdet import checkpoint
from hdet.checkpoint.reader import read_index

from ..distributed import run_ranks
from .helpers import alone, hsdp
from .test_folder import first_data, refusal, saved


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def sign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda manifest: None) -> None:
    """The manifest again, with sums that are right: they are no protection against who can write them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        content = (folder / name).read_bytes()
        facts |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    write_signed(folder, manifest)


def write_signed(folder: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("sha256", None)
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def index_of(folder: Path) -> metadata.Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path, 3)
    return tmp_path / "step-00000003"


def sharded(rank: int, world: int, root: str) -> None:
    checkpoint.save(root, hsdp(rank, world).steps(2).state, 2)


def test_a_good_index_is_read_as_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    """Of plain tensors, and of DTensors in several chunks."""
    run_ranks(sharded, 4, str(tmp_path / "sharded"))
    for place in (folder, tmp_path / "sharded" / "step-00000002"):
        ours, theirs = read_index(place), index_of(place)
        for part in ("state_dict_metadata", "planner_data", "storage_data", "version"):
            assert getattr(ours, part) == getattr(theirs, part)
    assert any(len(getattr(entry, "chunks", [])) == 2 for entry in ours.state_dict_metadata.values())


@pytest.mark.parametrize("where", ["alone", "inside", "a class's attribute", "another class", "the end is missing"])
def test_an_index_that_would_run_code_is_refused(folder: Path, tmp_path: Path, where: str) -> None:
    index, bad = index_of(folder), Hostile(tmp_path / "it ran")
    content = (folder / ".metadata").read_bytes()
    if where == "alone":
        content = pickle.dumps(bad)
    elif where == "inside":
        index.planner_data["model.0.weight"] = bad
        content = pickle.dumps(index)
    elif where == "a class's attribute":  # BUILD on the class itself, which every later instance would show
        content = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}(Vmodules\nVchanged\nutb."
    elif where == "another class":
        content = pickle.dumps({"a": torch.nn.Linear})
    else:
        content = content[:-20]
    (folder / ".metadata").write_bytes(content)
    sign(folder)
    message = refusal(folder, alone().steps(2))
    assert "index" in message and str(folder) in message
    assert not (tmp_path / "it ran").exists() and not hasattr(metadata.StorageMeta, "modules")


def test_an_entry_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    """Plain data, which torch's own planner reads with weights_only=False."""
    blob, file = io.BytesIO(), first_data(folder)
    torch.save(Hostile(tmp_path / "it ran"), blob)
    index, at = index_of(folder), file.stat().st_size
    (entry,) = (info for key, info in index.storage_data.items() if key.fqn == "ensemble")
    entry.offset, entry.length = at, len(blob.getvalue())
    file.write_bytes(file.read_bytes() + blob.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    sign(folder)
    assert "failed on rank 0" in refusal(folder, alone().steps(2))
    assert not (tmp_path / "it ran").exists()


WRONG: dict[str, Callable[[metadata.Metadata, filesystem._StorageInfo, Path], Any]] = {
    "an absolute name": lambda index, info, folder: setattr(info, "relative_path", str(folder / info.relative_path)),
    "a name above": lambda index, info, folder: setattr(info, "relative_path", f"../step-00000003/{info.relative_path}"),
    "a device": lambda index, info, folder: setattr(info, "relative_path", "/dev/zero"),
    "a file that the manifest lacks": lambda index, info, folder: setattr(info, "relative_path", "unlisted"),
    "a name that is none": lambda index, info, folder: setattr(info, "relative_path", 7),
    "beyond the file's end": lambda index, info, folder: setattr(info, "length", 1 << 40),
    "before its beginning": lambda index, info, folder: setattr(info, "offset", -1),
    "no number": lambda index, info, folder: setattr(info, "offset", "0"),
    "a transformed entry": lambda index, info, folder: setattr(info, "transform_descriptors", ["zstd"]),
    "entries that are no dict": lambda index, info, folder: setattr(index, "storage_data", [info]),
    "tensors that are no dict": lambda index, info, folder: setattr(index, "state_dict_metadata", 3),
    "paths that are no dict": lambda index, info, folder: setattr(index, "planner_data", None),
    "a path of other kinds": lambda index, info, folder: index.planner_data.update({"model.0.weight": ("model", 1.5)}),
    "a shape of no numbers": lambda index, info, folder: setattr(index.state_dict_metadata["model.0.weight"], "size", ("a",)),
    "properties that are none": lambda index, info, folder: setattr(index.state_dict_metadata["model.0.weight"], "properties", None),
}


@pytest.mark.parametrize("how", WRONG)
def test_an_index_of_other_files_or_kinds_is_refused(folder: Path, how: str) -> None:
    (folder / "unlisted").write_bytes(first_data(folder).read_bytes())
    index = index_of(folder)
    (info,) = (info for key, info in index.storage_data.items() if key.fqn == "model.0.weight")
    WRONG[how](index, info, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    sign(folder)
    message = refusal(folder, alone().steps(2))
    assert "index" in message and str(folder) in message


@pytest.mark.parametrize("name", ["{root}/outside", "../outside", "sub/file", "..", ".", "", "/dev/zero", "a\0b", "a\\b"])
def test_a_manifest_names_files_of_its_own_folder_only(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("secret")
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("secret")
    sums = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    sign(folder, lambda manifest: manifest["files"].update({name.format(root=tmp_path): sums}))
    message = refusal(folder, alone().steps(2))
    assert "has a wrong files" in message and "secret" not in message


def replace(file: Path, how: str) -> None:
    elsewhere = file.rename(file.parent.parent / "elsewhere")
    if how == "a link":
        file.symlink_to(elsewhere)
    elif how == "a device":
        file.symlink_to("/dev/zero")
    elif how == "a pipe":
        os.mkfifo(file)
    else:
        file.mkdir()


@pytest.mark.parametrize("how", ["a link", "a device", "a pipe", "a folder"])
@pytest.mark.parametrize("which", ["data", ".metadata", "manifest.json"])
def test_what_is_no_regular_file_is_not_read(folder: Path, which: str, how: str) -> None:
    file = first_data(folder) if which == "data" else folder / which
    replace(file, how)
    message = refusal(folder, alone().steps(2))
    assert repr(file.name) in message or file.name in message
    assert "regular file" in message


def test_a_file_of_another_size_is_not_even_read(folder: Path) -> None:
    """Nor is one that says to be longer than any memory."""
    os.truncate(first_data(folder), 1 << 42)  # 4 TiB of holes
    assert f"has {1 << 42} bytes instead of" in refusal(folder, alone().steps(2))
    os.truncate(folder / "manifest.json", 1 << 42)
    assert "manifest.json" in refusal(folder, alone().steps(2))
