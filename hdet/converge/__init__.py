"""Ways of averaging the replicas' parameters, and the checks that go with it (docs/converge.md)."""

from .base import Averager, Averaging, Plain, Task
from .buckets import Masters, average_tensors
from .compressed import Compressed
from .exact_local import ExactLocal
from .health import all_finite, digest
from .hierarchical import Hierarchical
from .outer import Outer
from .spread_out import Overlapped, Streaming

__all__ = [
    "Averager",
    "Averaging",
    "Compressed",
    "ExactLocal",
    "Hierarchical",
    "Masters",
    "Outer",
    "Overlapped",
    "Plain",
    "Streaming",
    "Task",
    "all_finite",
    "average_tensors",
    "digest",
]
