"""Converge: the average of the replicas' parameters, and the checks that go with it (Eq. 3)."""

from .average import BucketedAverage
from .health import all_finite, digest

__all__ = ["BucketedAverage", "all_finite", "digest"]
