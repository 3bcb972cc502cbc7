"""Who is a replica, and the one small collective per cycle that replicas need beside the average."""

from .topology import ReplicaDisagreement, Replicas

__all__ = ["ReplicaDisagreement", "Replicas"]
