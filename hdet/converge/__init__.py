"""Converge: the average of the replicas' parameters, and the checks that go with it (Eq. 3)."""

from .average import BucketedAverage, Masters
from .health import all_finite, digest

__all__ = ["BucketedAverage", "Masters", "all_finite", "digest"]
