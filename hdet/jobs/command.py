"""`hdet train`: settings and folders in, files and a table out. Everything a user can get wrong is found before a process starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hdet.jobs.checkpoint import load_checkpoint
from hdet.jobs.config import TrainConfig
from hdet.jobs.data import load_corpus
from hdet.jobs.display import open_display
from hdet.jobs.launch import WorkerError, Workers
from hdet.jobs.place import Place, choose_device, join, launched_by_torchrun, torchrun_place
from hdet.jobs.train import RunSpec, check_run, train_all
from hdet.record import CHECKPOINT, CONFIG, HISTORY, REPORT, SAMPLE, RunFolderError, atomic_file
from hdet.report import RunFiles, find_runs, plot, print_table

__all__ = ["train"]


def train(options: argparse.Namespace) -> int:
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
    place = _torchrun_place(config) if launched_by_torchrun() else None
    device = choose_device(config.device, config.processes, least=_least(config.controller)) if place is None else place.device
    if place is None or place.is_first:
        for spec in specs:
            _prepare(spec, options.overwrite)
    return _run(specs, device, place)


def _run(specs: Sequence[RunSpec], device: str, place: Place | None) -> int:
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
                with Workers(specs, device) as workers:
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
    defaults = {"replicas": _default_replicas(typed), "sync_interval": _default_interval(typed)}
    config = TrainConfig(**{**defaults, **typed}, mode="fixed" if options.schedule_only else "hdet")
    out = options.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    if options.compare:
        return [RunSpec(config.with_(mode=mode), out / mode) for mode in ("fixed", "hdet")]
    return [RunSpec(config, out)]


def _default_replicas(typed: dict[str, Any]) -> int:
    """One per GPU where there are enough, else the main job's four."""
    if typed.get("coresident"):
        return TrainConfig().replicas
    if launched_by_torchrun():
        return int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count() if typed.get("device") != "cpu" and torch.cuda.is_available() else 0
    return gpus if gpus >= _least(typed.get("controller")) else TrainConfig().replicas


def _default_interval(typed: dict[str, Any]) -> int:
    """The line reads early and often, and replicas that train alike may be averaged as often as one likes."""
    if typed.get("controller") != "line":
        return TrainConfig().sync_interval
    return max(1, typed.get("steps", TrainConfig().steps) // 400)


def _least(controller: str | None) -> int:
    """Replicas that are worth suggesting: most controllers compare some, the line needs one."""
    return 1 if controller == "line" else 2


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
    """There is enough text, and the line accepts the run; for a resumed run the text is the same as before, and the checkpoint fits."""
    corpus = load_corpus(spec.config.data)
    if not spec.resume:
        if spec.config.reads_line:
            check_run(spec, corpus)
        return
    if load_checkpoint(spec.folder)["text"] != corpus.digest:
        raise ValueError(
            f"data is {spec.config.data!r}, whose text is not what the run in {str(spec.folder)!r} began with: "
            "restore it (or that Python) to resume"
        )
    check_run(spec, corpus)


def _torchrun_place(config: TrainConfig) -> Place:
    place = torchrun_place(config.device)
    if config.coresident and place.world_size > 1:
        raise ValueError(f"coresident is one process, but {place.world_size} were started: start it without torchrun")
    if place.world_size != config.processes:
        raise ValueError(
            f"replicas is {config.replicas}, but {place.world_size} processes were started: leave --replicas out under torchrun"
        )
    return place


def _prepare(spec: RunSpec, overwrite: bool) -> None:
    """Make the folder, make sure that nobody else's run is in it, and write its first file: a full or read-only disk shows here."""
    folder = spec.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = [folder / name for name in (HISTORY, CHECKPOINT, CONFIG, REPORT, SAMPLE) if (folder / name).exists() and not spec.resume]
        if old and not overwrite:
            raise RunFolderError(
                f"out is {str(folder)!r}, which holds {old[0].name} of another run: pass another --out, or --overwrite, or --resume {folder}"
            )
        for path in old:
            path.unlink()
        with atomic_file(folder / CONFIG) as file:
            file.write((json.dumps(spec.config.to_dict(), indent=2) + "\n").encode())
    except OSError as error:
        name, remedy = ("resume", "make it writable, or resume a copy of it") if spec.resume else ("out", "pass another --out")
        raise RunFolderError(f"{name} is {str(folder)!r}, which cannot be written ({error.strerror}): {remedy}") from error


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
    last = specs[-1].folder
    for what, path in (("history", last / HISTORY), ("picture", picture), ("checkpoint", last / CHECKPOINT), ("sample", last / SAMPLE)):
        print(f"{what + ':':<12}{path}")
    if len(specs) > 1:
        print(f"{'also:':<12}{specs[0].folder}{os.sep} (the fixed schedule's files)")
    print(f"\n{printable((last / SAMPLE).read_bytes())}")


def printable(text: bytes) -> str:
    """Generated text may hold control codes, which are no business of the terminal."""
    return "".join(c if c == "\n" or (c.isprintable() and c != "\ufffd") else "·" for c in text.decode("utf-8", "replace")).rstrip()
