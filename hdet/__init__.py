"""hdet: the replicas of data-parallel training as a live search for hyperparameters.

Each replica trains under its own learning rate, parameters are averaged every T steps, and the replicas' losses move the
shared base value. Start with `OneCycleAutoLR` (the drop-in) or `Ensemble` (any optimizer, any scheduler).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are loaded on first use, so that the command line answers --help without importing torch.
_HOMES = {
    "BaseController": "core.controllers",
    "Betas": "knobs",
    "ClipNorm": "knobs",
    "CoresidentReplicas": "coresident",
    "Dropout": "knobs",
    "Ensemble": "ensemble",
    "Eps": "knobs",
    "Decision": "core.controllers",
    "Divergence": "core.divergence",
    "Evidence": "core.controllers",
    "FusedAdam": "optim",
    "FusedAdamW": "optim",
    "FusedLion": "optim",
    "FusedSGD": "optim",
    "GroupValue": "knobs",
    "HypergradientController": "hypergradient",
    "HypergradientRule": "core.controllers",
    "LabelSmoothing": "knobs",
    "LearningRate": "knobs",
    "LineController": "line",
    "LineRule": "core.controllers",
    "LossWeights": "knobs",
    "ModuleValue": "knobs",
    "OneCycleAutoLR": "schedulers",
    "ProbeController": "probe",
    "ProbeRule": "core.controllers",
    "RankController": "core.controllers",
    "ReplicaDisagreement": "replicas",
    "ReplicaLost": "faults",
    "Replicas": "replicas",
    "ReplicasDiverged": "ensemble",
    "Scalar": "knobs",
    "SlopeController": "core.controllers",
    "SoftmaxController": "core.controllers",
    "Temperature": "knobs",
    "WeightDecay": "knobs",
    "warm_noise_": "noise",
}

_MODULES = ("checkpoint", "converge", "kernels")

__all__ = [*_HOMES, *_MODULES, "__version__"]  # noqa: PLE0604 - the keys are the names

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import converge as converge
    from . import kernels as kernels
    from .core.controllers import BaseController as BaseController
    from .core.controllers import Decision as Decision
    from .core.controllers import Evidence as Evidence
    from .core.controllers import HypergradientRule as HypergradientRule
    from .core.controllers import LineRule as LineRule
    from .core.controllers import ProbeRule as ProbeRule
    from .core.controllers import RankController as RankController
    from .core.controllers import SlopeController as SlopeController
    from .core.controllers import SoftmaxController as SoftmaxController
    from .core.divergence import Divergence as Divergence
    from .coresident import CoresidentReplicas as CoresidentReplicas
    from .ensemble import Ensemble as Ensemble
    from .ensemble import ReplicasDiverged as ReplicasDiverged
    from .faults import ReplicaLost as ReplicaLost
    from .hypergradient import HypergradientController as HypergradientController
    from .knobs import Betas as Betas
    from .knobs import ClipNorm as ClipNorm
    from .knobs import Dropout as Dropout
    from .knobs import Eps as Eps
    from .knobs import GroupValue as GroupValue
    from .knobs import LabelSmoothing as LabelSmoothing
    from .knobs import LearningRate as LearningRate
    from .knobs import LossWeights as LossWeights
    from .knobs import ModuleValue as ModuleValue
    from .knobs import Scalar as Scalar
    from .knobs import Temperature as Temperature
    from .knobs import WeightDecay as WeightDecay
    from .line import LineController as LineController
    from .noise import warm_noise_ as warm_noise_
    from .optim import FusedAdam as FusedAdam
    from .optim import FusedAdamW as FusedAdamW
    from .optim import FusedLion as FusedLion
    from .optim import FusedSGD as FusedSGD
    from .probe import ProbeController as ProbeController
    from .replicas import ReplicaDisagreement as ReplicaDisagreement
    from .replicas import Replicas as Replicas
    from .schedulers import OneCycleAutoLR as OneCycleAutoLR


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
