"""Converge: the average of the replicas' parameters, the ways of taking it, and the checks that go with it (Eq. 3; docs/converge.md)."""

from .base import Average, Converge, Masters, Task
from .bucketed_average import BucketedAverage
from .compressed import Compressed
from .exact_local import ExactLocal
from .health import all_finite, digest, fingerprints
from .hierarchical import Hierarchical
from .outer import Outer
from .overlapped import Overlapped
from .plain import Plain
from .streaming import Streaming

__all__ = [
    "Average",
    "BucketedAverage",
    "Compressed",
    "Converge",
    "ExactLocal",
    "Hierarchical",
    "Masters",
    "Outer",
    "Overlapped",
    "Plain",
    "Streaming",
    "Task",
    "all_finite",
    "digest",
    "fingerprints",
]
