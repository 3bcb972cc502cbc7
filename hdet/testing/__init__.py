"""What parts of hdet promise, as tests that a part of yours runs: subclass a contract in a file of
tests, and say how your part is made.

pytest and hypothesis are needed here alone.
"""

# from .adapters import AdapterContract, Trained
# from .averages import AveragingContract
from .controllers import ControllerContract
# from .rules import RuleContract

__all__ = ["AdapterContract", "AveragingContract", "ControllerContract", "RuleContract", "Trained"]
