"""Who is a replica, several of them in one process, and the noise with which they may begin."""

from .agreement import ReplicaDisagreement
from .topology import Replicas

__all__ = ["ReplicaDisagreement", "Replicas"]
