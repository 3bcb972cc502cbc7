"""The rules: what a controller makes of evidence, as pure functions with a state. One file a rule, and what they share."""

from .hypergradient_rule import COSINES, HypergradientRule
from .peak import PeakController
from .pooled import PooledController
from .probe_rule import PROBE, ProbeRule
from .rank import RankController
from .slope import SlopeController
from .softmax import SoftmaxController

__all__ = [
    "COSINES",
    "PROBE",
    "HypergradientRule",
    "PeakController",
    "PooledController",
    "ProbeRule",
    "RankController",
    "SlopeController",
    "SoftmaxController",
]
