"""Who is a replica, and the one small collective per cycle that replicas need beside the
average."""

from .agreement import ReplicaDisagreement
from .topology import Replicas

__all__ = ["ReplicaDisagreement", "Replicas"]
