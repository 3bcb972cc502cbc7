"""Controllers: they plan cycles and learn from them. Pure functions of evidence and state, one file each, and what they share."""

from .base import Controller, Learning, RuledController
from .hypergradient import COSINES, HypergradientRule
from .line import LINE, LineRule
from .peak import PeakController
from .pooled import PooledController
from .probe import PROBE, ProbeRule
from .protocol import Evidence, Run
from .rank import RankController
from .sequential import SequentialController
from .shadow import Shadow
from .slope import SlopeController
from .softmax import SoftmaxController

__all__ = [
    "COSINES",
    "LINE",
    "PROBE",
    "Controller",
    "Evidence",
    "HypergradientRule",
    "Learning",
    "LineRule",
    "PeakController",
    "PooledController",
    "ProbeRule",
    "RankController",
    "RuledController",
    "Run",
    "SequentialController",
    "Shadow",
    "SlopeController",
    "SoftmaxController",
]
