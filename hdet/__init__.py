"""hdet: the replicas of data-parallel training as a live search for hyperparameters.

Replicas train at multiples of a shared value and are averaged every T steps, or copies of the run
train for a short while at other rates; what they show moves the shared value. Start with `Ensemble`
and `AutoLR` (any optimizer, any scheduler), or with `OneCycleAutoLR`, the drop-in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .rules import RULES

__version__ = "0.1.0"

# Names are loaded on first use, so that the command line answers --help without importing torch.
_HOMES = {
    name: home
    for home, names in {
        "trial.auto": "AutoLR",
        "trial.find_rate": "find_rate",
        "trial.rule": "RateInterval",
        "controllers.probe": "ProbeController",
        "controllers.shadow": "Shadow",
        "controllers.softmax": "SoftmaxController",
        "core.controller": "Controller",
        "core.divergence": "Divergence",
        "core.evidence": "Evidence Run",
        "core.plan": "Decision Plan",
        "core.replay": "replay",
        "ensemble": "Ensemble ReplicasDiverged",
        "knobs": "Betas ClipNorm Dropout GroupValue LabelSmoothing LearningRate LossWeights "
        "Scalar Temperature WeightDecay",
        "replicas.noise": "warm_noise_",
        "optim": " ".join(rule.optimizer or "FusedMuon" for rule in RULES.values())
        + " hidden_matrices",
        "converge.sync": "Sync",
        "replicas": "ReplicaDisagreement Replicas",
        "replicas.coresident": "CoresidentReplicas",
        "run.faults": "ReplicaLost",
        "schedulers": "OneCycleAutoLR",
    }.items()
    for name in names.split()
}

_MODULES = ("checkpoint", "converge", "integrations", "kernels", "logging", "optim")

__all__ = [*_HOMES, *_MODULES, "__version__"]  # noqa: PLE0604 - the keys are the names

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import converge as converge
    from . import integrations as integrations
    from . import kernels as kernels
    from . import logging as logging
    from . import optim as optim
    from .controllers.probe import ProbeController as ProbeController
    from .controllers.shadow import Shadow as Shadow
    from .controllers.softmax import SoftmaxController as SoftmaxController
    from .converge.sync import Sync as Sync
    from .core.controller import Controller as Controller
    from .core.divergence import Divergence as Divergence
    from .core.evidence import Evidence as Evidence
    from .core.evidence import Run as Run
    from .core.plan import Decision as Decision
    from .core.plan import Plan as Plan
    from .core.replay import replay as replay
    from .ensemble import Ensemble as Ensemble
    from .ensemble import ReplicasDiverged as ReplicasDiverged
    from .knobs import Betas as Betas
    from .knobs import ClipNorm as ClipNorm
    from .knobs import Dropout as Dropout
    from .knobs import GroupValue as GroupValue
    from .knobs import LabelSmoothing as LabelSmoothing
    from .knobs import LearningRate as LearningRate
    from .knobs import LossWeights as LossWeights
    from .knobs import Scalar as Scalar
    from .knobs import Temperature as Temperature
    from .knobs import WeightDecay as WeightDecay
    from .optim import FusedMuon as FusedMuon
    from .optim import hidden_matrices as hidden_matrices
    from .optim.classes import *
    from .replicas import ReplicaDisagreement as ReplicaDisagreement
    from .replicas import Replicas as Replicas
    from .replicas.coresident import CoresidentReplicas as CoresidentReplicas
    from .replicas.noise import warm_noise_ as warm_noise_
    from .run.faults import ReplicaLost as ReplicaLost
    from .schedulers import OneCycleAutoLR as OneCycleAutoLR
    from .trial.auto import AutoLR as AutoLR
    from .trial.find_rate import find_rate as find_rate
    from .trial.rule import RateInterval as RateInterval


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
