# Where each public name of hdet is: hdet/__init__.py reads this, a line a name. csrc/generate.py
# prints those of hdet.optim.classes.

from . import checkpoint as checkpoint
from . import converge as converge
from . import integrations as integrations
from . import kernels as kernels
from . import logging as logging
from . import optim as optim
from .controllers.best_value import BestValueController as BestValueController
from .controllers.probe import ProbeController as ProbeController
from .controllers.shadow import Shadow as Shadow
from .controllers.softmax import SoftmaxController as SoftmaxController
from .converge.sync import Sync as Sync
from .core.clock import QuadraticPeriod as QuadraticPeriod
from .core.controller import Controller as Controller
from .core.divergence import Divergence as Divergence
from .core.evidence import Evidence as Evidence
from .core.evidence import Run as Run
from .core.plan import Decision as Decision
from .core.plan import Plan as Plan
from .ensemble import Ensemble as Ensemble
from .ensemble import ReplicasDiverged as ReplicasDiverged
from .kernels.ema import WeightAverage as WeightAverage
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
from .optim.classes import FusedAdam as FusedAdam
from .optim.classes import FusedAdamW as FusedAdamW
from .optim.classes import FusedAdEMAMix as FusedAdEMAMix
from .optim.classes import FusedLion as FusedLion
from .optim.classes import FusedNAdamW as FusedNAdamW
from .optim.classes import FusedScheduleFreeAdamW as FusedScheduleFreeAdamW
from .optim.classes import FusedSGD as FusedSGD
from .replicas import ReplicaDisagreement as ReplicaDisagreement
from .replicas import Replicas as Replicas
from .replicas.coresident import CoresidentReplicas as CoresidentReplicas
from .replicas.noise import warm_noise_ as warm_noise_
from .run.faults import ReplicaLost as ReplicaLost
from .schedulers import OneCycleAutoLR as OneCycleAutoLR
from .trial.auto import AutoLR as AutoLR
from .trial.find_rate import find_rate as find_rate
from .trial.rule import RateInterval as RateInterval

__version__: str
