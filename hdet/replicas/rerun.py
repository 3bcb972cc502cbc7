"""Backward passes that run a module again (activation checkpointing) at the wrong replica's
weights, which would make gradients wrong without a word."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from .topology import Replicas


class RerunCheck:
    """A forward hook for modules of co-resident replicas, without holding these.

    A copy or a pickle of a module has one that does nothing, and so has a compiled model.

    Args:
        leaves: replica by the id of each parameter.
    """

    def __init__(
        self, replicas: Replicas | None = None, leaves: Mapping[int, int] | None = None
    ) -> None:
        self._replicas = None if replicas is None else weakref.ref(replicas)
        self._leaves = leaves or {}

    def __reduce__(self) -> Any:
        return RerunCheck, ()

    def __call__(self, *_: Any) -> None:
        """A module is called. Raises ValueError in the backward pass of another replica than the
        one whose weights are in place."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return
        replicas = None if self._replicas is None else self._replicas()
        if replicas is None:
            return
        owner = _owner(torch._C._current_autograd_node(), self._leaves)
        if owner == replicas.index or (owner is None and replicas.in_use):
            return
        which = "a replica's" if owner is None else f"replica {owner}'s"
        raise ValueError(
            f"{which} backward pass runs a module again (activation checkpointing does), but the "
            f"weights in place are those of replica {replicas.index}: call backward inside the "
            "same `with replicas.use(k):` as the forward pass"
        )


def _owner(start: Any, leaves: Mapping[int, int]) -> int | None:
    """Whose parameters are nearest in the graph from ``start`` on.

    None: it has none of ours, as in a reentrant checkpoint of the first layers.
    """
    seen: set[Any] = {None}
    near = {start} - seen
    while near:
        for node in near:
            replica = leaves.get(id(getattr(node, "variable", None)))
            if replica is not None:
                return replica
        seen |= near
        near = {far for node in near for far, _ in node.next_functions} - seen
    return None
