"""One file that continues a run bit for bit, whole or absent, and refused in one line when it is anything else."""

from __future__ import annotations

import zipfile
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from hdet.cli.job.config import TrainConfig
from hdet.cli.job.run_files import CHECKPOINT, Kinds, RunFolderError, check_kinds
from hdet.core.schema import COUNT, Instance, Number, Optional
from hdet.owned_folder import atomic_file

FORMAT, VERSION = "hdet-train", 1
DICT, TIME = Instance(dict), Number(low=0)
KINDS: Kinds = {
    "config": DICT,
    "model": DICT,
    "optimizer": DICT,
    "scheduler": DICT,
    "text": Instance(str),
    "step": COUNT,
    "ensemble": Optional(DICT),
    "rng": Instance(torch.Tensor),
    "seconds": TIME,
    "probe_ms": TIME,
    "converge_ms": TIME,
    "validation": Optional(Instance(float)),
}
"""what a checkpoint holds; whether the dicts and tensors fit a run is seen by restoring it"""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)`` reads them; atomic."""
    missing = [key for key in KINDS if key not in state]
    if missing:
        raise KeyError(f"the checkpoint's state lacks {missing}")
    with atomic_file(path) as file:
        torch.save({"format": FORMAT, "version": VERSION, **state}, file)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The state in ``folder``, tensors on the CPU, its settings already checked. Raises RunFolderError if there is none, or a truncated
    one, another version's, or one with missing keys or wrong kinds of values."""
    path = folder / CHECKPOINT
    if not path.is_file():
        runs = sorted(str(found.parent) for found in folder.glob(f"*/{CHECKPOINT}"))
        remedy = f"it holds several runs, pass one of {', '.join(runs)}" if runs else "pass the folder of a run that has written one"
        raise RunFolderError(f"{str(folder)!r} has no {CHECKPOINT}: {remedy}")
    try:
        with zipfile.ZipFile(path) as records:  # torch writes checksums and does not read them: a flipped bit would be a changed weight
            if (changed := records.testzip()) is not None:
                raise zipfile.BadZipFile(f"{changed} has changed")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types here, from EOFError to pickle.UnpicklingError
        reason = type(error).__name__
        raise RunFolderError(f"{str(path)!r} cannot be read as a checkpoint ({reason}): it is damaged, start the run again") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RunFolderError(f"{str(path)!r} is no checkpoint of `hdet train`: pass the folder of one of its runs")
    if state.get("version") != VERSION:
        raise RunFolderError(
            f"{str(path)!r} has version {state.get('version')!r}, this hdet reads {VERSION}: continue it with the hdet that wrote it"
        )
    damaged = "it is damaged, start the run again"
    check_kinds(state, KINDS, repr(str(path)), damaged)
    try:
        config = TrainConfig.from_dict(state["config"])
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{str(path)!r} holds settings this hdet refuses: {shorten(str(error), 160)}") from error
    fits = {"step": Number(0, config.steps, whole=True), "ensemble": Instance(type(None) if config.mode == "fixed" else dict)}
    check_kinds(state, fits, repr(str(path)), damaged)
    return state
