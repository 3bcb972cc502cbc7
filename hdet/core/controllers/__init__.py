"""Controllers: pure functions from a cycle's evidence to decisions, one file each."""

from .protocol import Controller, Decision, Evidence
from .softmax import SoftmaxController

__all__ = ["Controller", "Decision", "Evidence", "SoftmaxController"]
