"""What can be explored: a knob names a scalar hyperparameter, how far it is spread, and where it lives (docs/knobs.md)."""

from .betas import Betas, Eps
from .bound import Bound, GroupKnob, Knob
from .clip_norm import ClipNorm
from .dropout import Dropout
from .group_value import GroupValue
from .learning_rate import LearningRate
from .objective import LabelSmoothing, LossWeights, Temperature
from .scalar import ModuleValue, Scalar
from .together import bind_all, check_disjoint
from .weight_decay import WeightDecay

__all__ = [
    "Betas",
    "Bound",
    "ClipNorm",
    "Dropout",
    "Eps",
    "GroupKnob",
    "GroupValue",
    "Knob",
    "LabelSmoothing",
    "LearningRate",
    "LossWeights",
    "ModuleValue",
    "Scalar",
    "Temperature",
    "WeightDecay",
    "bind_all",
    "check_disjoint",
]
