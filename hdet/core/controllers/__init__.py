"""Controllers: pure functions from a cycle's evidence to decisions, one file each, and what they share."""

from .base import BaseController, RuledController
from .hypergradient import HypergradientRule
from .line import LineRule
from .peak import PeakController
from .pooled import PooledController
from .probe import ProbeRule
from .protocol import Controller, Decision, Evidence
from .rank import RankController
from .slope import SlopeController
from .softmax import SoftmaxController

__all__ = [
    "BaseController",
    "Controller",
    "Decision",
    "Evidence",
    "HypergradientRule",
    "LineRule",
    "PeakController",
    "PooledController",
    "ProbeRule",
    "RankController",
    "RuledController",
    "SlopeController",
    "SoftmaxController",
]
