"""Ways of averaging the replicas' parameters, and the checks that go with it (docs/converge.md)."""

from .base import Averager, Averaging, Plain, Task
from .buckets import Masters, average_tensors
from .compressed import Compressed
from .exact_local import ExactLocal
from .health import all_finite, digest
from .outer import Outer

__all__ = [
    "Averager",
    "Averaging",
    "Compressed",
    "ExactLocal",
    "Masters",
    "Outer",
    "Plain",
    "Task",
    "all_finite",
    "average_tensors",
    "digest",
]
