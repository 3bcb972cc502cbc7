"""`hdet train`: settings and folders in, files and a table out. Everything a user can get wrong is found before a process starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hdet.cli.display import open_display
from hdet.cli.job.checkpoint import load_checkpoint
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.data import load_corpus
from hdet.cli.job.place import Place, choose_device, join, launched_by_torchrun, torchrun_place
from hdet.cli.job.processes import WorkerError, Workers
from hdet.cli.job.run_files import CHECKPOINT, CONFIG, HISTORY, REPORT, SAMPLE, RunFolderError
from hdet.cli.job.training import RunSpec, run_alone, train_all
from hdet.cli.report import plot, print_table, trial_lines
from hdet.cli.runs import RunFiles, find_runs
from hdet.owned_folder import OwnedFolder, atomic_file, decode_json, read_regular, remove_leftovers


def run(options: argparse.Namespace) -> int:
    """Returns the exit code; raises ValueError for whatever the user can put right."""
    typed = {name: value for name, value in vars(options).items() if name in TrainConfig.__dataclass_fields__}
    specs = _resumed(options.resume, options, typed) if options.resume else _fresh(options, typed)
    config = specs[0].config
    if options.resume and RunFiles.read(options.resume).end is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{options.resume}: already at its last step, {config.steps}")
            _summarise(specs)
        return 0
    _check(specs[-1])
    place = torchrun_place(config) if launched_by_torchrun() else None
    device = choose_device(config.device, config.processes, least=_least(config.controller)) if place is None else place.device
    with ExitStack() as held:
        locks = []
        if place is None or place.is_first:
            locks = [held.enter_context(_held(spec)) for spec in specs]
            _check_folders(specs, options.overwrite)
            for spec in specs:
                _begin(spec)
        return _train(specs, device, place, locks)


def _train(specs: Sequence[RunSpec], device: str, place: Place | None, locks: Sequence[int]) -> int:
    """Train in processes of our own, or, given a place among those of torchrun, in this one."""
    if place is not None and not place.is_first:
        with join(place):
            train_all(specs, place, lambda event: None)
        return 0
    try:
        with open_display() as display:
            if place is not None:
                with join(place):
                    train_all(specs, place, display.show)
            else:
                with Workers(specs, device, locks) as workers:
                    for event in workers.events():
                        display.show(event)
    except WorkerError as error:
        print(f"hdet train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hdet train: interrupted; {_way_back(specs)}", file=sys.stderr)
        return 130
    _summarise(specs)
    return 0


# -- settings and folders ----------------------------------------------------------------------------------------------------


def _fresh(options: argparse.Namespace, typed: dict[str, Any]) -> list[RunSpec]:
    config = TrainConfig(**{"replicas": default_replicas(typed), **typed}, mode="fixed" if options.schedule_only else "hdet")
    out = options.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    if options.compare:
        return [RunSpec(replace(config, mode=mode), out / mode) for mode in ("fixed", "hdet")]
    return [RunSpec(config, out)]


def default_replicas(typed: dict[str, Any]) -> int:
    """One per GPU where there are enough, else the main job's four."""
    if typed.get("coresident"):
        return TrainConfig().replicas
    if launched_by_torchrun():
        return int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count() if typed.get("device") != "cpu" and torch.cuda.is_available() else 0
    return gpus if gpus >= _least(typed.get("controller")) else TrainConfig().replicas


def _least(controller: str | None) -> int:
    """The fewest replicas to suggest: most controllers compare replicas, controller auto needs one."""
    return 1 if controller == "auto" else 2


def _resumed(folder: Path, options: argparse.Namespace, typed: dict[str, Any]) -> list[RunSpec]:
    """The saved run's own settings: what was typed may repeat them, not contradict them."""
    if options.out is not None or options.overwrite:
        raise ValueError("out and overwrite cannot be given with --resume: the run goes on in its own folder")
    config = TrainConfig.from_dict(load_checkpoint(folder)["config"])
    for name, value in typed.items():
        if value != getattr(config, name):
            raise ValueError(
                f"{name} is {value!r}, but the run in {str(folder)!r} has {getattr(config, name)!r}: leave it out to resume that run"
            )
    return [RunSpec(config, folder, resume=True)]


def _check(spec: RunSpec) -> None:
    """Is there enough text? For a resumed run: is it the same, and does the checkpoint fit?"""
    corpus = load_corpus(spec.config.data)
    if not spec.resume:
        return
    if load_checkpoint(spec.folder)["text"] != corpus.digest:
        raise ValueError(
            f"data is {spec.config.data!r}, whose text is not what the run in {str(spec.folder)!r} began with: "
            "restore it (or that Python) to resume"
        )
    run_alone(spec, corpus)


OWN = (HISTORY, CHECKPOINT, REPORT, SAMPLE, CONFIG)
"""what a run writes; config.json, which marks the others as a run's, is the last that is replaced"""


@contextmanager
def _held(spec: RunSpec) -> Iterator[int]:
    """Make the folder, and let no other process write there: gives the handle of the lock."""
    owned = OwnedFolder(spec.folder)
    try:
        with _writable(spec):
            owned.path.mkdir(parents=True, exist_ok=True)
            owned.hold()
        assert owned.handle is not None
        yield owned.handle
    finally:
        owned.release(keep_mark=False)


@contextmanager
def _writable(spec: RunSpec) -> Iterator[None]:
    """A full or read-only disk shows here, before a process is started."""
    try:
        yield
    except OSError as error:
        name, remedy = ("resume", "make it writable, or resume a copy of it") if spec.resume else ("out", "pass another --out")
        raise RunFolderError(f"{name} is {str(spec.folder)!r}, which cannot be written ({error.strerror}): {remedy}") from error


def _check_folders(specs: Sequence[RunSpec], overwrite: bool) -> None:
    """A new run replaces nothing but another run, and that only with --overwrite; nothing is changed here."""
    fresh = [spec.folder for spec in specs if not spec.resume]
    for folder in fresh:
        old = [name for name in OWN if os.path.lexists(folder / name)]
        if old and not _is_run(folder):
            raise _of_others(folder, old[0])
        if old and not overwrite:
            raise RunFolderError(
                f"out is {str(folder)!r}, which holds {old[0]} of another run: pass another --out, or --overwrite, or --resume {folder}"
            )
    if len(fresh) > 1:  # their picture goes beside them
        home = fresh[0].parent
        if os.path.lexists(home / REPORT) and not any(map(_is_run, fresh)):
            raise _of_others(home, REPORT)


def _is_run(folder: Path) -> bool:
    try:
        return TrainConfig.has_written(decode_json(read_regular(folder / CONFIG)))
    except (OSError, ValueError):
        return False


def _of_others(folder: Path, name: str) -> RunFolderError:
    return RunFolderError(f"out is {str(folder)!r}, which holds {name}, and that was not written by hdet train: pass another --out")


def _begin(spec: RunSpec) -> None:
    """Remove an earlier run's files, and what was left of them, and write the first."""
    with _writable(spec):
        remove_leftovers(spec.folder)
        if not spec.resume:
            for name in OWN[:-1]:
                (spec.folder / name).unlink(missing_ok=True)
        with atomic_file(spec.folder / CONFIG) as file:
            file.write((json.dumps(spec.config.to_dict(), indent=2) + "\n").encode())


# -- the end -----------------------------------------------------------------------------------------------------------------


def _way_back(specs: Sequence[RunSpec]) -> str:
    saved = [spec.folder for spec in specs if (spec.folder / CHECKPOINT).is_file()]
    if not saved:
        return "no checkpoint was written yet"
    return f"the last checkpoint is {saved[-1] / CHECKPOINT}: continue with hdet train --resume {saved[-1]}"


def _summarise(specs: Sequence[RunSpec]) -> None:
    runs = find_runs([spec.folder for spec in specs])
    home = specs[0].folder if len(specs) == 1 else specs[0].folder.parent
    picture = home / REPORT
    plot(runs, picture)
    print()
    print_table(runs)
    for line in trial_lines(runs):
        print(line)
    last = specs[-1].folder
    for what, path in (("history", last / HISTORY), ("picture", picture), ("checkpoint", last / CHECKPOINT), ("sample", last / SAMPLE)):
        print(f"{what + ':':<12}{path}")
    if len(specs) > 1:
        print(f"{'also:':<12}{specs[0].folder}{os.sep} (the fixed schedule's files)")
    print(f"\n{printable((last / SAMPLE).read_bytes())}")


def printable(text: bytes) -> str:
    """Generated text may hold control codes, which are no business of the terminal."""
    return "".join(c if c == "\n" or (c.isprintable() and c != "\ufffd") else "·" for c in text.decode("utf-8", "replace")).rstrip()
