"""Controllers: pure functions from a cycle's evidence to decisions, one file each."""

from .probe import ProbeRule
from .protocol import Controller, Decision, Evidence
from .softmax import SoftmaxController

__all__ = ["Controller", "Decision", "Evidence", "ProbeRule", "SoftmaxController"]
