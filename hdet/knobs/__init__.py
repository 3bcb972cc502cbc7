"""What can be explored: a knob names a scalar hyperparameter, how far it is spread, and where it
lives (docs/knobs.md)."""

from .bound import BoundKnob, Explored, Knob, Meaning
from .groups import GroupKnob, bind_all, check_disjoint
from .of_model import Dropout, LabelSmoothing, LossWeights, Scalar, Temperature
from .of_optimizer import Betas, ClipNorm, GroupValue, LearningRate, WeightDecay

__all__ = [
    "Betas", "BoundKnob", "ClipNorm", "Dropout", "Explored", "GroupKnob", "GroupValue", "Knob",
    "LabelSmoothing", "LearningRate", "LossWeights", "Meaning", "Scalar", "Temperature",
    "WeightDecay", "bind_all", "check_disjoint",
]  # fmt: skip
