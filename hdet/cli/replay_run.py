"""`hdet replay`: the controller's decisions of a finished or broken run, made once more from its history, without training."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from hdet.cli.job.config import TrainConfig
from hdet.cli.job.data import Corpus
from hdet.cli.job.run_files import CONFIG, HISTORY, RunFolderError, read_config, read_history
from hdet.cli.job.training import RunSpec, run_alone
from hdet.core.replay import replay


def run(options: argparse.Namespace) -> int:
    """Prints a sentence for each difference; the exit code says if there are any. Raises RunFolderError for what is no run, or none that
    has a controller and records of what it was told."""
    folder = options.folder
    settings = read_config(folder)
    try:
        config = TrainConfig.from_dict(settings)
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{str(folder / CONFIG)!r} is no run's ({error}): pass the folder of a run of `hdet train`") from error
    records = [record for record in read_history(folder / HISTORY) if record.get("event") == "cycle"]
    if config.mode == "fixed" or config.controller == "none" or not records or "record" not in records[0]:
        raise RunFolderError(
            f"{str(folder)!r} has no recorded decisions: pass the folder of a run with a controller, of this version of hdet"
        )
    no_text = Corpus(torch.zeros(0), torch.zeros(0), frozenset(), frozenset(), "")
    ensemble = run_alone(RunSpec(config, folder), no_text).ensemble
    assert ensemble is not None and ensemble.engine.controller is not None
    controller = ensemble.engine.controller
    controller.start(replace(ensemble.run, replicas=config.replicas))
    differences = list(replay(controller, records))
    for difference in differences:
        print(difference)
    if not differences:
        count = sum(record["record"]["evidence"] is not None for record in records)
        trials = sum(record.get("trial") is not None for record in records)
        also = f" and {trials} trial{'s' * (trials > 1)}" * bool(trials)
        print(f"{count} decisions{also} replayed, all the same to the bit")
    return int(bool(differences))
