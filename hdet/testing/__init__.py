"""What parts of hdet promise, as tests that a part of yours runs: subclass a contract in a file of
tests, and say how your part is made. pytest and hypothesis are needed here alone."""

from .averages import AveragingContract
from .controllers import ControllerContract

__all__ = ["AveragingContract", "ControllerContract"]
