"""Local gradients: what becomes of an optimizer's moments when the parameters are averaged.

Under shared gradients the moments are equal on all replicas and there is nothing to choose. Under local gradients they are not:

- ``keep``: each replica goes on with its own. No traffic; the first steps after an average use directions that were learned elsewhere. A
  checkpoint holds one state for each replica.
- ``average``: the mean of the moments, as of the parameters. Two to three times the traffic of a cycle (Adam).
- ``reset``: as before the first step, counters included. No traffic; each cycle pays a warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ..converge.bucketed_average import average, check_averageable
from ..converge.buckets import Buckets, Part
from ..optim.state import WEIGHT_KEYS
from ..replicas import Replicas
from ..tensors.dtensor import local_parts
from .snapshot import GroupNumbers, reset_moments, state_tensors

__all__ = ["Moments"]


class Moments:
    """The moments of one optimizer under one of the policies of `Sync`; None, under shared gradients, does nothing."""

    def __init__(self, policy: str | None, optimizer: Optimizer, replicas: Replicas, bucket_bytes: int) -> None:
        self.policy, self._optimizer, self._replicas = policy, optimizer, replicas
        self._buckets = Buckets(lambda: [Part(tensor) for _, _, tensor in self._values()], bucket_bytes, direct=True)
        self._groups = GroupNumbers(optimizer)

    def structure(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """What there is to be averaged, for comparison between peers: an optimizer has no state where there was never a gradient."""
        if self.policy != "average":
            return []
        numbers = {id(p): n for n, p in enumerate(p for group in self._optimizer.param_groups for p in group["params"])}
        return [(numbers[id(p)], key, tuple(tensor.shape)) for p, key, tensor in self._values()]

    def _values(self) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Moments, without counters, masters and other replicas' parameters. Factored ones (Adafactor's) have shapes of their own."""
        return [
            (p, key, local_parts([tensor])[0])
            for p, key, tensor in state_tensors(self._optimizer)
            if key not in (*WEIGHT_KEYS, "step") and tensor.is_floating_point() and (tensor.dim() or not p.dim())
        ]

    @torch.no_grad()
    def converge(self, weights: Sequence[float]) -> None:
        """At the end of a cycle, after the parameters. All peers alike."""
        if self.policy == "reset":
            self.reset()
        elif self.policy == "average":
            for i, (_, _, tensor) in enumerate(self._values()):
                check_averageable(tensor, f"tensor {i}")
            average(self._buckets, self._replicas, weights)
        elif self.policy == "keep" and weights[self._replicas.index] == 0:
            self.reset()  # its own led it astray

    @torch.no_grad()
    def reset(self) -> None:
        """As before the first step, also the counters. Masters stay."""
        reset_moments(self._optimizer)
        self._groups.put_back()

    def of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What the last average has written for this parameter."""
        return [tensor for p, _, tensor in self._values() if p is parameter] if self.policy == "average" else []
