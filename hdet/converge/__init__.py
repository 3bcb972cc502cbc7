"""Converge: the average of the replicas' parameters, and the checks that go with it (Eq. 3)."""

from .average import BucketedAverage
from .health import all_finite, digest
from .plain import Plain
from .protocol import Average, Converge, Masters, Task, local_parts

__all__ = ["Average", "BucketedAverage", "Converge", "Masters", "Plain", "Task", "all_finite", "digest", "local_parts"]
